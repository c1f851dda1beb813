"""What operators see on Triton's Prometheus endpoint, beside Triton's own metrics."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from serving.kjt import KjtRequest, Schema


class Counter(Protocol):
    """A counter with its labels filled in, such as a Triton `Metric`."""

    def increment(self, value: float) -> None:
        """Add `value`."""


class _Total:
    """A count that is published later: telling Triton takes longer than looking one sample up.

    The thread that counts writes `count`, the thread that publishes writes `_published`: no lock is needed.
    """

    def __init__(self, counter: Counter) -> None:
        self.count = 0
        self._counter = counter
        self._published = 0

    def publish(self) -> None:
        count = self.count
        if count != self._published:
            self._counter.increment(count - self._published)
            self._published = count


class LookupMetrics:
    """Counters of one model instance; Triton adds instances of one model and version together.

    Args:
        counter: makes a counter from its name, help text and labels.
        labels: model and version.
        schema: names the tables.
    """

    def __init__(
        self, counter: Callable[[str, str, dict[str, str]], Counter], labels: dict[str, str], schema: Schema
    ) -> None:
        # Triton deletes a family, and with it its metrics, when nothing holds it: `counter` does.
        self._counter = counter

        def total(name: str, description: str, **more: str) -> _Total:
            return _Total(counter(name, description, labels | more))

        self._calls = total("tbe_calls_total", "TBE calls; each answers one or more requests")
        self._requests = total("tbe_requests_total", "Requests answered by TBE calls")
        self._samples = total("tbe_samples_total", "Samples looked up")
        self._ids = total("tbe_ids_total", "Ids looked up")
        self._rejected = total("tbe_rejected_total", "Requests refused as invalid")
        dropped = "Ids outside [0, rows), left out by the table's `zero` policy"
        by_table = {table: total("tbe_ids_dropped_total", dropped, table=table) for table in schema.tables}
        self._dropped = [by_table[table] for table in schema.tables]
        self._all = [self._calls, self._requests, self._samples, self._ids, self._rejected, *by_table.values()]

    def answered(self, requests: Sequence[KjtRequest]) -> None:
        """Count one TBE call that answered `requests`."""
        self._calls.count += 1
        self._requests.count += len(requests)
        for request in requests:
            self._samples.count += request.samples
            self._ids.count += request.values.size
            if request.dropped is not None:
                for feature, dropped in zip(request.features, request.dropped.tolist(), strict=True):
                    self._dropped[feature].count += dropped

    def rejected(self) -> None:
        """Count one request that was refused as invalid."""
        self._rejected.count += 1

    def publish(self) -> None:
        """Tell Triton what was counted since the last time."""
        for total in self._all:
            total.publish()


class Publisher:
    """Calls `publish` on a thread of its own, every `PERIOD_S` seconds and once more when it is stopped."""

    PERIOD_S = 0.25

    def __init__(self, publish: Callable[[], None]) -> None:
        self._publish = publish
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Publish what is left, and end the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self.PERIOD_S):
            self._publish()
        self._publish()


def triton_counters(pb_utils: Any) -> Callable[[str, str, dict[str, str]], Counter]:
    """Make Triton counters: one family for each name, shared by all its labels.

    Args:
        pb_utils: the module `triton_python_backend_utils` of a running backend.
    """
    families: dict[str, Any] = {}

    def counter(name: str, description: str, labels: dict[str, str]) -> Counter:
        if name not in families:
            families[name] = pb_utils.MetricFamily(
                name=name, description=description, kind=pb_utils.MetricFamily.COUNTER
            )
        metric: Counter = families[name].Metric(labels=labels)
        return metric

    return counter
