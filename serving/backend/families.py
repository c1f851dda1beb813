"""Triton's metrics, as they are counted here: cheaply, and published later."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol


class Metric(Protocol):
    """A metric with its labels filled in, such as a Triton `Metric`."""

    def increment(self, value: float) -> None:
        """Add `value`."""

    def set(self, value: float) -> None:
        """Replace the value; for gauges."""

    def observe(self, value: float) -> None:
        """Count `value` in its bucket; for histograms."""


class Family(Protocol):
    """The metrics that have one name and different labels."""

    def Metric(self, labels: Mapping[str, str], buckets: list[float] | None = None) -> Metric:  # noqa: N802 - Triton's name
        """The metric with these labels. `buckets`: the upper bounds of a histogram's buckets, as a list."""


Kind = Literal["COUNTER", "GAUGE", "HISTOGRAM"]
Families = Callable[[str, str, Kind], Family]


class Total:
    """A number that is published later, because telling Triton takes longer than looking one sample up.

    No lock is needed: one thread counts and writes `count`, another one publishes and writes `_published`.
    """

    def __init__(self, metric: Metric) -> None:
        self.count: float = 0
        self._metric = metric
        self._published: float = 0

    def publish(self) -> None:
        """Tell Triton what was counted since the last time."""
        count = self.count
        if count != self._published:
            self._metric.increment(count - self._published)
            self._published = count


class Histogram:
    """How often each value was seen. It is published later, as a `Total` is.

    Triton takes one observation at a time.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._seen: dict[int, int] = {}
        self._published: dict[int, int] = {}

    def observe(self, value: int) -> None:
        """Count `value`."""
        self._seen[value] = self._seen.get(value, 0) + 1

    def publish(self) -> None:
        """Tell Triton what was observed since the last time."""
        seen = self._seen.copy()
        for value, count in seen.items():
            for _ in range(count - self._published.get(value, 0)):
                self._metric.observe(value)
        self._published = seen


def triton_families(pb_utils: Any) -> Families:
    """A function that makes families of Triton metrics.

    Args:
        pb_utils: the module `triton_python_backend_utils` of a running backend.
    """

    def family(name: str, description: str, kind: Kind) -> Family:
        made: Family = pb_utils.MetricFamily(
            name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind)
        )
        return made

    return family
