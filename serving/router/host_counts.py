"""Counts of the calls to a host."""

from bisect import bisect_left
from dataclasses import dataclass, field
from threading import Lock

# Upper bounds of the buckets of calls by their time, in seconds.
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(slots=True)
class HostCounts:
    """Counts since the start. Several threads may add to them.

    Attributes:
        seconds: sum of the times of all calls.
        by_seconds: how many calls ended in each bucket [len(SECONDS) + 1]. The last bucket has no upper bound.
        bytes_out: bytes of the messages that were sent, with all attempts.
        bytes_in: bytes of the partial sums that were received.
        retries: attempts after the first of a call.
        timeouts: attempts without an answer when the next began, or at the end of the timeout.
        lost: calls without an answer.
    """

    seconds: float = 0.0
    by_seconds: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    bytes_out: int = 0
    bytes_in: int = 0
    retries: int = 0
    timeouts: int = 0
    lost: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def calls(self) -> int:
        """All calls, answered or not."""
        return sum(self.by_seconds)

    def add(
        self, *, bytes_out: int = 0, bytes_in: int = 0, retries: int = 0, timeouts: int = 0, lost: int = 0
    ) -> None:
        """Add to these counts."""
        with self._lock:
            self.bytes_out += bytes_out
            self.bytes_in += bytes_in
            self.retries += retries
            self.timeouts += timeouts
            self.lost += lost

    def took(self, seconds: float) -> None:
        """Count a call and its time."""
        with self._lock:
            self.seconds += seconds
            self.by_seconds[bisect_left(SECONDS, seconds)] += 1
