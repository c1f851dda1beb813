"""The times of a server that drains before it stops, so that clients of any kind leave it without a lost call.

First it says that it is not ready, and answers as before, also new connections: load balancers and endpoints need
time to notice. Then new connections are refused, and each open one is closed by its age: gRPC tells the client, which
finishes its calls and connects elsewhere (GOAWAY; MAX_CONNECTION_AGE of gRPC's proposal A9). The server stops when no
connection is left.
"""

from collections.abc import Sequence

from serving.errors import ConfigurationError
from serving.triton.command_line import RENEWAL_AGE_MS, connection_age_of

LEAST_S, MOST_S = 2.0, 3600.0
# Of the whole time: that in which new connections are accepted, and the age of a connection. gRPC draws each
# connection's age from 0.9 to 1.1 of that. What is left is for the last calls.
ACCEPTING, _AGE = 0.5, 0.3


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
