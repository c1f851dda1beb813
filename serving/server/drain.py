"""The times of a server that drains before it stops, so that clients of any kind leave it without a lost call.

First it says that it is not ready, and answers as before, also new connections: load balancers and endpoints need
time to notice. Then new connections are refused, and each open one is closed by its age: gRPC tells the client, which
finishes its calls and connects elsewhere (GOAWAY; MAX_CONNECTION_AGE of gRPC's proposal A9). The server stops when no
connection is left.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from serving.errors import ConfigurationError
from serving.server.port_handover import PortHandover
from serving.triton.command_line import RENEWAL_AGE_MS, connection_age_of

LEAST_S, MOST_S = 2.0, 3600.0
# Of the whole time: that in which new connections are accepted, and the age of a connection. gRPC draws each
# connection's age from 0.9 to 1.1 of that. What is left is for the last calls.
ACCEPTING, _AGE = 0.5, 0.3
# Seconds after the last new connection until all of them are seen.
_REACHED_S = 1.0


def connection_age_ms(drain_s: float, *, renews: bool) -> int | None:
    """The age at which a server closes connections, in milliseconds. None: it does not.

    Args:
        drain_s: the time in which it drains, in seconds. 0: it does not.
        renews: whether another process can take over its port, with a renewed certificate.
    """
    if drain_s:
        return min(round(1e3 * _AGE * drain_s), RENEWAL_AGE_MS)
    return RENEWAL_AGE_MS if renews else None


def check_drain(drain_s: float, options: Sequence[str]) -> float:
    """Check a time to drain, in seconds; 0: do not drain.

    Args:
        options: those of tritonserver.

    Returns:
        The longest time for which the server keeps a connection, in seconds.

    Raises:
        ConfigurationError: it is too short, too long, or shorter than connections last.
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
        drain_s: the longest time, in seconds.
        port_handover: of its gRPC port. None: new connections cannot be refused, so it drains for the whole time.
        began: when it began to, by `time.monotonic`.
    """

    drain_s: float
    port_handover: PortHandover | None
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
        if self.port_handover is None or passed_s < accepting_s:
            return False
        if not self._refuses:
            self.port_handover.refuse()
            self._refuses = True
        return passed_s >= accepting_s + _REACHED_S and not any(map(self.port_handover.has_connections, processes))
