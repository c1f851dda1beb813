"""Metrics of a router's hosts: the calls to them, and their replicas."""

import math
from collections.abc import Callable, Iterator, Mapping

from serving.backend.metrics import Families, Family, Total, histograms
from serving.ranks import Ranks
from serving.router.host import SECONDS, HostCounts

_PLAIN: dict[str, tuple[str, Callable[[HostCounts], float]]] = {
    "tbe_host_retries_total": ("Attempts of calls to a host beyond the first", lambda counts: counts.retries),
    "tbe_host_timeouts_total": (
        "Attempts of calls to a host with no answer in time",
        lambda counts: counts.timeouts,
    ),
    "tbe_host_lost_total": ("Calls to a host that got no answer", lambda counts: counts.lost),
}


class HostMetrics:
    """Publishes the counts and the replicas of each host.

    Args:
        families: makes a family from its name, its help text and its kind.
        labels: labels of every metric: model and version.
        ranks: of the router.
    """

    def __init__(self, families: Families, labels: Mapping[str, str], ranks: Ranks) -> None:
        self._ranks = ranks
        self._counts = counts = ranks.counts
        self._families = {name: families(name, text, "COUNTER") for name, (text, _) in _PLAIN.items()}
        self._families |= {
            "tbe_host_bytes_total": families(
                "tbe_host_bytes_total", "Bytes of requests to a host, and of its answers", "COUNTER"
            ),
            "tbe_host_replicas": families("tbe_host_replicas", "Replicas of a host that its addresses name", "GAUGE"),
            "tbe_host_replicas_up": families(
                "tbe_host_replicas_up", "Replicas of a host that have its bundle and answer", "GAUGE"
            ),
        }

        def counters(name: str, text: str) -> Family:
            self._families[name] = families(name, text, "COUNTER")
            return self._families[name]

        times = histograms(counters, "tbe_host_call_seconds", "Calls to a host, by their seconds", SECONDS)
        self._times = {host: times({**labels, "host": str(host)}) for host in counts}
        # Set, not incremented: all instances of a router see the same replicas.
        self._replicas = {
            (host, name): self._families[name].Metric({**labels, "host": str(host)})
            for host in counts
            for name in ("tbe_host_replicas", "tbe_host_replicas_up")
        }
        self._totals = {
            (host, name, *more.values()): Total(self._families[name].Metric({**labels, "host": str(host), **more}))
            for host, host_counts in counts.items()
            for name, more, _ in _values(host_counts)
        }

    def publish(self) -> None:
        """Add what was counted since the last call to Triton's metrics, and set the gauges of replicas."""
        for host, counts in self._counts.items():
            for name, more, value in _values(counts):
                total = self._totals[(host, name, *more.values())]
                total.count = value
                total.publish()
            times = self._times[host]
            times.counts, times.total = counts.by_seconds, counts.seconds
            times.publish()
        for host_replicas in self._ranks.replicas:
            self._replicas[(host_replicas.host, "tbe_host_replicas")].set(len(host_replicas.replicas))
            self._replicas[(host_replicas.host, "tbe_host_replicas_up")].set(host_replicas.up)

    def end(self) -> None:
        """Set the gauges to NaN when the version is unloaded: they outlive it, and NaN reports no lost replica."""
        for replicas in self._replicas.values():
            replicas.set(math.nan)


def _values(counts: HostCounts) -> Iterator[tuple[str, dict[str, str], float]]:
    """The value of every metric of a host: family, labels in addition to the host's number, value."""
    for name, (_, value) in _PLAIN.items():
        yield name, {}, value(counts)
    yield "tbe_host_bytes_total", {"direction": "out"}, counts.bytes_out
    yield "tbe_host_bytes_total", {"direction": "in"}, counts.bytes_in
