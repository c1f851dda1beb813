"""What operators see of a router's hosts."""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from serving.backend.families import Families, Total
from serving.ranks.counts import SECONDS, HostCounts

_BOUNDS = (*(f"{bound:g}" for bound in SECONDS), "+Inf")
_PLAIN: dict[str, tuple[str, Callable[[HostCounts], float]]] = {
    "tbe_host_retries_total": ("Attempts of calls to a host beyond the first", lambda counts: counts.retries),
    "tbe_host_timeouts_total": (
        "Attempts of calls to a host with no answer in time",
        lambda counts: counts.timeouts,
    ),
    "tbe_host_lost_total": ("Calls to a host that got no answer", lambda counts: counts.lost),
    # As a histogram of Prometheus: its parts are counters. Triton's own takes one observation at a time.
    "tbe_host_call_seconds_count": ("Calls to a host", lambda counts: counts.calls),
    "tbe_host_call_seconds_sum": ("Time that calls to a host took", lambda counts: counts.seconds),
}


class HostMetrics:
    """The counts of each host, published.

    Args:
        families: makes a family from its name, its help text and its kind.
        labels: labels of every metric: model and version.
        counts: of each host, by its number.
    """

    def __init__(self, families: Families, labels: Mapping[str, str], counts: Mapping[int, HostCounts]) -> None:
        self._counts = counts
        self._families = {name: families(name, text, "COUNTER") for name, (text, _) in _PLAIN.items()}
        self._families |= {
            "tbe_host_call_seconds_bucket": families(
                "tbe_host_call_seconds_bucket", "Calls to a host that took no longer than `le` seconds", "COUNTER"
            ),
            "tbe_host_bytes_total": families(
                "tbe_host_bytes_total", "Bytes of requests to a host, and of its answers", "COUNTER"
            ),
        }
        self._totals = {
            (host, name, *more.values()): Total(self._families[name].Metric({**labels, "host": str(host), **more}))
            for host, found in counts.items()
            for name, more, _ in _values(found)
        }

    def publish(self) -> None:
        """Tell Triton what was counted since the last time."""
        for host, counts in self._counts.items():
            for name, more, value in _values(counts):
                total = self._totals[(host, name, *more.values())]
                total.count = value
                total.publish()


def _values(counts: HostCounts) -> Iterator[tuple[str, dict[str, str], float]]:
    """Every metric of a host: its family, its labels beside the host's, and its value."""
    for name, (_, value) in _PLAIN.items():
        yield name, {}, value(counts)
    for bound, calls in zip(_BOUNDS, accumulate(counts.by_seconds), strict=True):
        yield "tbe_host_call_seconds_bucket", {"le": bound}, calls
    yield "tbe_host_bytes_total", {"direction": "out"}, counts.bytes_out
    yield "tbe_host_bytes_total", {"direction": "in"}, counts.bytes_in
