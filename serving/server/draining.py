"""A server that drains: it refuses new connections, and waits until no open one is left."""

import time
from dataclasses import dataclass

from serving.server.drain import ACCEPTING
from serving.server.ports import Gate

# Seconds after the last new connection until all of them are seen.
_REACHED_S = 1.0


@dataclass(slots=True)
class Drain:
    """A server that drains before it stops: it has its clients go elsewhere, as `serving.server.drain` says.

    Attributes:
        drain_s: the longest time, in seconds.
        gate: of its gRPC port. None: new connections cannot be refused, so it drains for the whole time.
        began: when it began to, by `time.monotonic`.
    """

    drain_s: float
    gate: Gate | None
    began: float
    _refuses: bool = False

    def is_over(self, processes: list[int]) -> bool:
        """Do what is due. Returns whether no connection is left, or the time is up.

        Args:
            processes: the tritonservers that may have connections.
        """
        passed_s = time.monotonic() - self.began
        if passed_s >= self.drain_s:
            return True
        accepting_s = ACCEPTING * self.drain_s
        if self.gate is None or passed_s < accepting_s:
            return False
        if not self._refuses:
            self.gate.refuse()
            self._refuses = True
        return passed_s >= accepting_s + _REACHED_S and not any(map(self.gate.has_connections, processes))
