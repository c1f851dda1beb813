"""Admission: how long requests have waited, and whether there is time to answer more of them."""

from time import perf_counter

# This many TBE calls are made for a backlog, however long they take: a few large requests are no overload.
_MIN_CALLS = 4
# A handover that follows the last one within this time belongs to the same backlog. Triton takes less than this to
# copy the 256 requests of the largest handover.
_SAME_BACKLOG_S = 0.05


class Backlog:
    """The requests that wait for this instance, as far as it can tell.

    Triton hands over a limited number of requests at once, so a handover need not be all that wait. A full handover
    that follows a full one at once belongs to the same backlog.

    Args:
        max_busy_ms: longest time in which a backlog is answered.
        largest_handover: most requests that Triton hands over together.

    Attributes:
        waited_s: longest time that the requests of this handover may have waited in the backend, in seconds.
    """

    def __init__(self, max_busy_ms: int, largest_handover: int) -> None:
        self.waited_s = 0.0
        self._max_busy_ms = max_busy_ms
        self._largest_handover = largest_handover
        self._is_full = False
        self._calls = 0
        # Times of `perf_counter`: of the backlog's first handover, and of the start and the end of the last handover.
        self._since = self._started = self._ended = 0.0

    def start_handover(self, requests: int) -> None:
        """Triton handed over so many requests."""
        now = perf_counter()
        follows_at_once = now - self._ended < _SAME_BACKLOG_S
        is_full = requests >= self._largest_handover
        if not (self._is_full and is_full and follows_at_once):
            self._since, self._calls = now, 0
        # They may have waited while the last handover was answered, and before, as Triton may have two ready.
        self.waited_s = self._ended - self._started + self.waited_s / 2 if follows_at_once else 0.0
        self._started, self._is_full = now, is_full

    def count_call(self) -> None:
        """A TBE call is made."""
        self._calls += 1

    def is_overdue(self) -> bool:
        """Whether the time in which this backlog is answered is over."""
        return self._calls >= _MIN_CALLS and 1e3 * (perf_counter() - self._since) > self._max_busy_ms

    def end_handover(self) -> None:
        """All requests of the handover have their outcomes."""
        self._ended = perf_counter()
