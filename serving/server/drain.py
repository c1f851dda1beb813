"""The timing of a server that drains before it stops, so that no client loses a call.

First the server reports that it is not ready but accepts new connections, because load balancers need time to notice.
Then it refuses new connections, and closes open connections by their age: gRPC sends GOAWAY, and the client finishes
its calls and connects to another server (MAX_CONNECTION_AGE of gRPC's proposal A9). The server stops when no
connection is left.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from serving.errors import ConfigurationError
from serving.server.port_handover import PortHandover
from serving.triton.command_line import RENEWAL_AGE_MS, connection_age_of

LEAST_S, MOST_S = 2.0, 3600.0
# Shares of the drain time: the time in which new connections are accepted, and the age at which a connection is
# closed. gRPC draws each age from 0.9 to 1.1 of that. The last calls have the remaining time.
ACCEPTING, _AGE = 0.5, 0.3
# Seconds until a new connection is certain to be counted.
_REACHED_S = 1.0


def connection_age_ms(drain_s: float, *, renews: bool) -> int | None:
    """The age at which a server closes connections, in milliseconds, or None if it closes none.

    Args:
        drain_s: the drain time in seconds; 0 if the server does not drain.
        renews: whether a process with a renewed certificate can take over its port.
    """
    if drain_s:
        return min(round(1e3 * _AGE * drain_s), RENEWAL_AGE_MS)
    return RENEWAL_AGE_MS if renews else None


def check_drain(drain_s: float, options: Sequence[str]) -> float:
    """Check a drain time.

    Args:
        drain_s: in seconds; 0 for no draining.
        options: the options of tritonserver.

    Returns:
        The longest time for which the server keeps a connection, in seconds.

    Raises:
        ConfigurationError: the time is too short, too long, or shorter than connections last.
    """
    if not (drain_s == 0 or LEAST_S <= drain_s <= MOST_S):
        raise ConfigurationError(f"--drain-s {drain_s:g}: expected 0, or {LEAST_S:g} to {MOST_S:g} seconds")
    connection_age_s = connection_age_of(options)
    closing_s = (1 - ACCEPTING) * drain_s
    if drain_s and connection_age_s > closing_s:
        raise ConfigurationError(
            f"--drain-s {drain_s:g}: closes connections in its last {closing_s:g} s, and they last up to "
            f"{connection_age_s:g} s: leave --grpc-max-connection-age out, or drain for longer"
        )
    return connection_age_s


@dataclass(slots=True)
class Drain:
    """A server that drains before it stops.

    Attributes:
        drain_s: the maximum drain time, in seconds.
        port_handover: refuses new connections of the gRPC port. If it is None, the server drains for the whole time.
        began: when the server began to drain, by `time.monotonic`.
    """

    drain_s: float
    port_handover: PortHandover | None
    began: float
    _refuses: bool = False

    def is_over(self, processes: list[int]) -> bool:
        """Refuse new connections when that is due. Returns whether draining is over: no connection is left, or the
        time is up.

        Args:
            processes: the process ids of tritonservers that may have connections.
        """
        passed_s = time.monotonic() - self.began
        if passed_s >= self.drain_s:
            return True
        accepting_s = ACCEPTING * self.drain_s
        if self.port_handover is None or passed_s < accepting_s:
            return False
        if not self._refuses:
            self.port_handover.refuse()
            self._refuses = True
        return passed_s >= accepting_s + _REACHED_S and not any(map(self.port_handover.has_connections, processes))
