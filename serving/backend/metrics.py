"""Our metrics on Triton's Prometheus endpoint, next to Triton's own (docs/metrics.md)."""

import ctypes
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter
from types import MappingProxyType
from typing import Any, Literal, Protocol

from serving.errors import IdsOutside, InvalidRequest, Reason
from serving.requests.types import ValidatedRequests


class Metric(Protocol):
    """A metric with its labels filled in, such as a Triton `Metric`."""

    def increment(self, value: float) -> None:
        """Add `value`."""

    def set(self, value: float) -> None:
        """Replace the value of a gauge."""


class Family(Protocol):
    """The metrics that have one name and different labels."""

    def Metric(self, labels: Mapping[str, str]) -> Metric:  # noqa: N802 - Triton's name
        """The metric with these labels."""


Kind = Literal["COUNTER", "GAUGE"]
Families = Callable[[str, str, Kind], Family]


class Total:
    """A counter that is published later, because a call to Triton takes longer than the lookup of a sample.

    It needs no lock: only the counting thread writes `count`, and only the publishing thread writes `_published`.
    """

    def __init__(self, metric: Metric) -> None:
        self.count: float = 0
        self._metric = metric
        self._published: float = 0

    def publish(self) -> None:
        """Add what was counted since the last call to Triton's metric."""
        count = self.count
        if count != self._published:
            self._metric.increment(count - self._published)
            self._published = count


# Upper bounds of the buckets of times, in seconds.
SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Histogram:
    """A histogram that is published later, as counters. Triton's own histogram takes one value at a time.

    Args:
        bucket, count, total: families of counters whose names end in _bucket, _count and _sum.
        bounds: upper bounds of the buckets, in ascending order. The last bucket, "+Inf", has no bound.
        labels: of every counter.

    Attributes:
        counts: the number of values in each bucket [len(bounds) + 1].
        total: the sum of all values.
    """

    def __init__(
        self, bucket: Family, count: Family, total: Family, bounds: Sequence[float], labels: Mapping[str, str]
    ) -> None:
        self._bounds = bounds
        self.counts, self.total = [0] * (len(bounds) + 1), 0.0
        names = (*(f"{bound:g}" for bound in bounds), "+Inf")
        self._buckets = [Total(bucket.Metric({**labels, "le": name})) for name in names]
        self._count, self._sum = Total(count.Metric(labels)), Total(total.Metric(labels))

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def publish(self) -> None:
        """Add what was observed since the last call to Triton's counters."""
        self._sum.count = self.total
        for bucket, count in zip(self._buckets, accumulate(self.counts), strict=True):
            bucket.count = self._count.count = count
        for total in (*self._buckets, self._count, self._sum):
            total.publish()


def histograms(
    families: Callable[[str, str], Family], name: str, what: str, bounds: Sequence[float]
) -> Callable[[Mapping[str, str]], Histogram]:
    """A function that makes a histogram with some labels.

    Args:
        families: makes a family of counters from its name and its help text.
        name: of the histograms.
        what: what they count.
        bounds: see `Histogram`.
    """
    help_texts = {"bucket": f"{what}: at most `le`", "count": what, "sum": f"{what}: their sum"}
    bucket, count, total = (families(f"{name}_{end}", text) for end, text in help_texts.items())
    return partial(Histogram, bucket, count, total, bounds)


def triton_families(pb_utils: Any) -> Families:
    """A function that makes families of Triton metrics, which are never deleted.

    Triton shares metrics of one name and the same labels between processes, but deletes them with the first family
    that has them: other processes then count into freed memory, and tritonserver dies (server#8663). Before 26.09 a
    process that deletes its families at its end dies itself (server#8662).

    Args:
        pb_utils: the module `triton_python_backend_utils` of a running backend.
    """

    def family(name: str, description: str, kind: Kind) -> Family:
        triton_family: Family = pb_utils.MetricFamily(
            name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind)
        )
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(triton_family))
        return triton_family

    return family


STAGES = ("check", "merge", "lookup", "score", "split")
# Upper bounds of the buckets of the histogram of requests in a TBE call.
MERGED = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]


# Largest number of calls that are not added up yet: more than are made between two publications.
_MOST_WAITING = 1 << 16
# The arguments of `LookupMetrics._add_up`.
_Waiting = tuple[Sequence[int], int, int, int, float, Sequence[float]]


class LookupMetrics:
    """The metrics of one model instance.

    Args:
        families: makes a family from its name, its help text and its kind.
        labels: labels of every metric: model and version.
        tables: names of the tables.
        exported_at: when the bundle was exported, Unix time in seconds.
        scales: the largest |score| that the export saw, by output.
        kernels: the instruction set of FBGEMM's kernels (`serving.lookup.instruction_set`).
        has_slow_kernels: whether the processor has faster instructions than these.
        programs: what makes lookups and scores: labels of `tbe_programs`.
    """

    def __init__(
        self,
        families: Families,
        labels: Mapping[str, str],
        tables: Sequence[str],
        exported_at: float,
        scales: Mapping[str, float] = MappingProxyType({}),
        *,
        kernels: str,
        has_slow_kernels: bool,
        programs: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._all: list[Total] = []

        def totals(name: str, description: str, label: str, values: Sequence[str]) -> dict[str, Total]:
            family = families(name, description, "COUNTER")
            by_value = {
                value: Total(family.Metric({**labels, label: value} if label else labels)) for value in values
            }
            self._all.extend(by_value.values())
            return by_value

        def total(name: str, description: str) -> Total:
            return totals(name, description, "", [""])[""]

        def counters(name: str, description: str) -> Family:
            return families(name, description, "COUNTER")

        self._calls = total("tbe_calls_total", "TBE calls; each answers one or more requests")
        self._requests = total("tbe_requests_total", "Requests answered by TBE calls")
        self._samples = total("tbe_samples_total", "Samples looked up")
        self._ids = total("tbe_ids_total", "Ids looked up")
        self._empty = total("tbe_empty_bags_total", "Bags without ids, which are answered with zeros")
        self._user_sides = total("tbe_user_side_total", "Requests for scores whose user side is computed once")
        self._failed = total("tbe_failed_total", "Requests that failed by a fault of the server; its log says why")
        self._shed = total("tbe_shed_total", "Requests refused as UNAVAILABLE by load shedding")
        self._cancelled = total("tbe_cancelled_total", "Requests cancelled or past their deadline before lookup")
        self._overflows = total("tbe_overflow_total", "Requests whose FP16 answer is not finite: beyond 65504")
        self._lost = total("tbe_lost_total", "Requests refused as UNAVAILABLE because a host did not answer")
        self._zeroed = totals(
            "tbe_zeroed_total", "Requests answered with zeros for a table whose host did not answer", "table", tables
        )
        self._captured = total("tbe_captured_total", "Requests written to the capture file")
        self._dropped = total("tbe_capture_dropped_total", "Requests to be captured that were not written")
        self._rejected = totals(
            "tbe_rejected_total", "Requests refused as invalid, by what is wrong", "reason", [r.value for r in Reason]
        )
        self._outside = totals(
            "tbe_ids_outside_total",
            "Ids outside [0, rows), under any id policy but `modulo`",
            "table",
            tables,
        )
        self._recoveries = total("tbe_recoveries_total", "Times `tbe-serve run` loaded the model again after it died")
        calls = "TBE calls, by the requests that each answered together"
        self._merged = histograms(counters, "tbe_call_requests", calls, MERGED)(labels)
        requests = "Requests answered, by the seconds from when they were handed to the model"
        self._times = histograms(counters, "tbe_request_seconds", requests, SECONDS)(labels)
        stage_times = histograms(counters, "tbe_stage_seconds", "TBE calls, by the seconds of a stage", SECONDS)
        self._stages = [stage_times({**labels, "stage": stage}) for stage in STAGES]
        # A gauge would keep its value when the version is unloaded. The rate of a counter becomes 0 then, and also
        # when the process dies or hangs.
        self._serving = total("tbe_serving_seconds_total", "Seconds that instances served. Its rate: how many serve")
        self._started = perf_counter()
        self._waiting: deque[_Waiting] = deque(maxlen=_MOST_WAITING)
        self._set_gauges(families, labels, exported_at, scales, programs)
        slow = families("tbe_slow_kernels", "1 if FBGEMM does not use the processor's vector instructions", "GAUGE")
        slow.Metric({**labels, "instruction_set": kernels}).set(has_slow_kernels)

    def _set_gauges(
        self,
        families: Families,
        labels: Mapping[str, str],
        exported_at: float,
        scales: Mapping[str, float],
        programs: Mapping[str, str],
    ) -> None:
        """Set gauges, which are not incremented: instances share them, and they outlive a killed process."""
        name = "tbe_bundle_exported_timestamp_seconds"
        families(name, "When the bundle was exported, Unix time", "GAUGE").Metric(labels).set(exported_at)
        description = "1. Its labels are the formats of the programs that make lookups and scores"
        families("tbe_programs", description, "GAUGE").Metric({**labels, **programs}).set(1)
        if scales:
            largest = families("tbe_score_scale", "The largest |score| of an output that the export saw", "GAUGE")
            for output, scale in scales.items():
                largest.Metric({**labels, "output": output}).set(scale)

    def count_call(self, checked: ValidatedRequests, handed_over: float, times: Sequence[float]) -> None:
        """Count a TBE call. `publish` adds it up later, so that answers do not wait for it.

        Args:
            checked: the requests that it answered.
            handed_over: `perf_counter` when Triton handed them over, in seconds.
            times: `perf_counter` at the start of the first stage and at the end of each [len(STAGES) + 1].
        """
        samples = [request.samples for request in checked.requests]
        empty = checked.lengths.size - checked.lengths.nonzero()[0].size
        user_sides = sum(request.is_user_side for request in checked.requests)
        self._waiting.append((samples, checked.values.size, empty, user_sides, handed_over, times))

    def _add_up(
        self,
        samples: Sequence[int],
        ids: int,
        empty: int,
        user_sides: int,
        handed_over: float,
        times: Sequence[float],
    ) -> None:
        requests = len(samples)
        self._times.observe(times[-1] - handed_over, requests)
        self._calls.count += 1
        self._requests.count += requests
        self._samples.count += sum(samples)
        self._ids.count += ids
        self._empty.count += empty
        self._user_sides.count += user_sides
        for stage, (start, end) in zip(self._stages, pairwise(times), strict=True):
            stage.observe(end - start)
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
        """Count requests that were refused because a host was lost, and by table those that got zeros instead."""
        self._lost.count += requests
        for table, count in zeroed.items():
            self._zeroed[table].count += count

    def count_captured(self, is_kept: bool) -> None:
        """Count a request to be captured, and whether it was written to the file."""
        (self._captured if is_kept else self._dropped).count += 1

    def count_recovery(self) -> None:
        """Count that the model was loaded again because its process died."""
        self._recoveries.count += 1

    def publish(self) -> None:
        """Add what was counted since the last call to Triton's metrics."""
        for _ in range(len(self._waiting)):  # more may arrive meanwhile
            self._add_up(*self._waiting.popleft())
        self._serving.count = perf_counter() - self._started
        for total in self._all:
            total.publish()
        for histogram in (self._merged, self._times, *self._stages):
            histogram.publish()


class Publisher:
    """Calls functions on its own thread every `PERIOD_S` seconds, and a last time when it is stopped.

    Args:
        publishes: the functions, in the order of the calls.
        ends: functions that are called after the last time.
    """

    PERIOD_S = 0.5

    def __init__(self, publishes: Sequence[Callable[[], None]], ends: Sequence[Callable[[], None]]) -> None:
        self._publishes, self._ends = publishes, ends
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
        for end in self._ends:
            end()

    def _publish(self) -> None:
        for publish in self._publishes:
            publish()
