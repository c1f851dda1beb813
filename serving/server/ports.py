"""Where a server listens."""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from serving.errors import ServerFailed
from serving.server.access import Access

_EVERYWHERE = "0.0.0.0"  # noqa: S104  # compared with, not listened on


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """Where a server listens; 0 takes a free port. `http` is taken where `Access.http` asks for it."""

    grpc: int = 8001
    http: int = 8000
    metrics: int = 8002


@contextlib.contextmanager
def free_ports(access: Access, ports: Ports) -> Iterator[Ports]:
    """Check that the ports are free, and choose the ones that were left open (0).

    Nothing listens until tritonserver does: no other server of ours chooses them until the block ends.

    Raises:
        ServerFailed: one is taken; names it.
    """
    with contextlib.ExitStack() as claims:
        while True:
            taken = _take_ports(access, ports)
            chosen = [getattr(taken, name) for name in ("grpc", "http", "metrics") if not getattr(ports, name)]
            if all(_claim(port, claims) for port in chosen if port):
                break
        yield taken


def _claim(port: int, claims: contextlib.ExitStack) -> bool:
    """Whether nobody else has claimed it: an abstract name (unix(7)) has one owner, and goes with its process."""
    claim = claims.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    try:
        claim.bind(f"\0tbe-serving-port-{port}")
    except OSError:
        return False
    return True


def _take_ports(access: Access, ports: Ports) -> Ports:
    with contextlib.ExitStack() as stack:
        chosen = {"http": 0}
        for name in ("grpc", *(("http",) if access.http else ()), "metrics"):
            asked = getattr(ports, name)
            host = access.http_host if name == "http" else access.host
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, asked))
            except OSError as error:
                raise ServerFailed(
                    f"--{name}-port {asked}: cannot listen on {host}: {error.strerror}: pick another, or 0 for a "
                    "free one"
                ) from error
            chosen[name] = listener.getsockname()[1]
        return Ports(**chosen)


@contextlib.contextmanager
def ipv4_alone(host: str, port: int) -> Iterator[None]:
    """Keep gRPC from listening on [::] beside 0.0.0.0, as it does where it can: nobody asked for IPv6.

    It listens on IPv4 alone where the port of [::] is taken; a socket that does not listen takes it.
    """
    with contextlib.ExitStack() as stack:
        if host == _EVERYWHERE:
            with contextlib.suppress(OSError):  # no IPv6 here, or somebody else has it
                taken = stack.enter_context(socket.socket(socket.AF_INET6))
                taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                taken.bind(("::", port))
        yield
