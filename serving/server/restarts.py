"""How often a tritonserver that died is started anew."""

import time

MOST, WITHIN_S = 5, 600.0


class Restarts:
    """At most `MOST` times within `WITHIN_S`, at once the first time and after longer and longer pauses then."""

    def __init__(self) -> None:
        self._times: list[float] = []

    @property
    def recent(self) -> int:
        """How many there were of late."""
        return len(self._times)

    def next_pause_s(self) -> float | None:
        """How long to wait before the next one, which is counted; None where there were enough."""
        now = time.monotonic()
        self._times = [each for each in self._times if now - each < WITHIN_S]
        if len(self._times) >= MOST:
            return None
        self._times.append(now)
        return 2.0 ** (len(self._times) - 1) - 1
