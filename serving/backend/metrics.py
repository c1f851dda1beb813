"""What operators see on Triton's Prometheus endpoint, beside Triton's own metrics (docs/operating.md)."""

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from time import perf_counter

import numpy as np

from serving.backend.families import Families, Family, Histogram, Kind, Total
from serving.errors import IdsOutside, InvalidRequest, Reason
from serving.request.tensors import Checked

STAGES = ("check", "merge", "lookup", "score", "split")
# Upper bounds of the buckets of the histogram of requests in a TBE call.
MERGED = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]


class LookupMetrics:
    """What one model instance counts.

    Args:
        families: makes a family from its name, its help text and its kind.
        labels: labels of every metric: model and version.
        tables: names of the tables.
        exported_at: when the bundle was exported, Unix time in seconds.
    """

    def __init__(
        self, families: Families, labels: Mapping[str, str], tables: Sequence[str], exported_at: float
    ) -> None:
        # Triton deletes a family, and with it its metrics, when nothing holds it.
        self._families: list[Family] = []
        self._all: list[Total] = []

        def family_of(name: str, description: str, kind: Kind) -> Family:
            self._families.append(families(name, description, kind))
            return self._families[-1]

        def totals(name: str, description: str, label: str, values: Sequence[str]) -> dict[str, Total]:
            family = family_of(name, description, "COUNTER")
            made = {value: Total(family.Metric({**labels, label: value} if label else labels)) for value in values}
            self._all.extend(made.values())
            return made

        def total(name: str, description: str) -> Total:
            return totals(name, description, "", [""])[""]

        self._calls = total("tbe_calls_total", "TBE calls; each answers one or more requests")
        self._requests = total("tbe_requests_total", "Requests answered by TBE calls")
        self._samples = total("tbe_samples_total", "Samples looked up")
        self._ids = total("tbe_ids_total", "Ids looked up")
        self._empty = total("tbe_empty_bags_total", "Bags without ids, which are answered with zeros")
        self._failed = total("tbe_failed_total", "Requests that failed by a fault of the server; its log says why")
        self._shed = total("tbe_turned_away_total", "Requests refused as UNAVAILABLE because too many waited")
        self._cancelled = total("tbe_gone_total", "Requests whose callers had gone before they were looked up")
        self._overflows = total(
            "tbe_overflow_total", "Requests whose FP16 answer is not finite: a sum was beyond 65504"
        )
        self._lost = total("tbe_lost_total", "Requests refused as UNAVAILABLE because a host did not answer")
        self._zeroed = totals(
            "tbe_zeroed_total", "Requests answered with zeros for a table whose host did not answer", "table", tables
        )
        self._captured = total("tbe_captured_total", "Requests written to the capture file")
        self._rejected = totals(
            "tbe_rejected_total", "Requests refused as invalid, by what is wrong", "reason", [r.value for r in Reason]
        )
        self._outside = totals(
            "tbe_ids_outside_total",
            "Ids outside [0, rows), whatever the table's id policy; under `modulo` none is",
            "table",
            tables,
        )
        self._seconds = totals(
            "tbe_stage_seconds_total", "Time that TBE calls took, by stage of the request path", "stage", STAGES
        )
        self._recoveries = total("tbe_recoveries_total", "Times `tbe-serve run` loaded the model anew after it died")
        merged = family_of("tbe_call_requests", "Requests that a TBE call answered together", "HISTOGRAM")
        self._merged = Histogram(merged.Metric(labels, MERGED))
        # A gauge keeps its value when its version is unloaded. A counter's rate becomes 0 then, and when its process
        # dies or hangs.
        self._serving = total("tbe_serving_seconds_total", "Seconds that instances served; its rate is how many do")
        self._started = perf_counter()
        exported = family_of(
            "tbe_bundle_exported_timestamp_seconds", "When the bundle was exported, Unix time", "GAUGE"
        )
        # Set, not incremented: instances share this gauge, and it outlives a process that was killed.
        exported.Metric(labels).set(exported_at)

    def count_call(self, checked: Checked, times: Sequence[float]) -> None:
        """Count a TBE call.

        Args:
            checked: the requests that it answered.
            times: what `perf_counter` said at the start of the first stage and at the end of each, in seconds.
        """
        requests = len(checked.requests)
        self._calls.count += 1
        self._requests.count += requests
        self._samples.count += sum(request.samples for request in checked.requests)
        self._ids.count += checked.values.size
        self._empty.count += checked.lengths.size - np.count_nonzero(checked.lengths)
        for stage, (start, end) in zip(STAGES, pairwise(times), strict=True):
            self._seconds[stage].count += end - start
        self._merged.observe(requests)

    def count_invalid(self, error: InvalidRequest) -> None:
        """Count a request that was refused as invalid."""
        self._rejected[error.reason.value].count += 1
        if isinstance(error, IdsOutside):
            self.count_ids_outside(error.counts)

    def count_ids_outside(self, counts: Mapping[str, int]) -> None:
        """Count ids outside their tables, by table."""
        for table, count in counts.items():
            self._outside[table].count += count

    def count_failed(self, requests: int) -> None:
        """Count requests that failed by a fault of the server."""
        self._failed.count += requests

    def count_shed(self, requests: int) -> None:
        """Count requests that were refused as UNAVAILABLE, by load shedding."""
        self._shed.count += requests

    def count_cancelled(self, requests: int) -> None:
        """Count requests whose callers cancelled, or whose deadlines had passed."""
        self._cancelled.count += requests

    def count_overflows(self, requests: int) -> None:
        """Count requests whose FP16 answer is not finite."""
        self._overflows.count += requests

    def count_lost(self, requests: int, zeroed: Mapping[str, int]) -> None:
        """Count requests that hosts left unanswered, and by table those that got zeros instead."""
        self._lost.count += requests
        for table, count in zeroed.items():
            self._zeroed[table].count += count

    def count_captured(self) -> None:
        """Count a request that was written to the capture file."""
        self._captured.count += 1

    def count_recovery(self) -> None:
        """Count that the model was loaded again because its process had died."""
        self._recoveries.count += 1

    def publish(self) -> None:
        """Tell Triton what was counted since the last time."""
        self._serving.count = perf_counter() - self._started
        for total in self._all:
            total.publish()
        self._merged.publish()


class Publisher:
    """Calls `publish` on a thread of its own every `PERIOD_S` seconds, and once more when it is stopped."""

    PERIOD_S = 0.5

    def __init__(self, publish: Callable[[], None]) -> None:
        self._publish = publish
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Publish the last counts, and end the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self.PERIOD_S):
            self._publish()
        self._publish()
