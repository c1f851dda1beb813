"""What operators see on Triton's Prometheus endpoint, beside Triton's own metrics."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from serving.kjt import KjtRequest, Schema


class Counter(Protocol):
    """A counter with its labels filled in, such as a Triton `Metric`."""

    def increment(self, value: float) -> None:
        """Add `value`."""


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
        self._calls = counter("tbe_calls_total", "TBE calls; each answers one or more requests", labels)
        self._requests = counter("tbe_requests_total", "Requests answered by TBE calls", labels)
        self._samples = counter("tbe_samples_total", "Samples looked up", labels)
        self._ids = counter("tbe_ids_total", "Ids looked up", labels)
        self._rejected = counter("tbe_rejected_total", "Requests refused as invalid", labels)
        self._dropped = {
            table: counter(
                "tbe_ids_dropped_total",
                "Ids outside [0, rows), left out by the table's `zero` policy",
                labels | {"table": table},
            )
            for table in schema.tables
        }
        self._tables = schema.tables

    def answered(self, requests: Iterable[KjtRequest]) -> None:
        """Count one TBE call that answered `requests`."""
        self._calls.increment(1)
        for request in requests:
            self._requests.increment(1)
            self._samples.increment(request.samples)
            self._ids.increment(request.values.size)
            if request.dropped is not None:
                for feature, dropped in zip(request.features, request.dropped.tolist(), strict=True):
                    self._dropped[self._tables[feature]].increment(dropped)

    def rejected(self) -> None:
        """Count one request that was refused as invalid."""
        self._rejected.increment(1)


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
