"""How often, and after which pauses, a tritonserver that died is started anew."""

import time

MOST, WITHIN_S = 5, 600.0


class Restarts:
    """At most MOST times within WITHIN_S: at once where the last start came to serve, else after 1, 3, 7 and 15 s."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._failed = 0

    @property
    def recent(self) -> int:
        """How many there were within WITHIN_S."""
        return len(self._times)

    def next_pause_s(self, *, has_served: bool) -> float | None:
        """Seconds to wait before the next start, which is counted. None: there were MOST already.

        Args:
            has_served: whether the one that died had come to serve.
        """
        now = time.monotonic()
        self._times = [each for each in self._times if now - each < WITHIN_S]
        if len(self._times) >= MOST:
            return None
        self._times.append(now)
        self._failed = 0 if has_served else self._failed + 1
        return 2.0**self._failed - 1
