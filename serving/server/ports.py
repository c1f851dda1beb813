"""Where a server listens: its ports, its addresses, and their options of tritonserver."""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from serving.arguments import check_arguments
from serving.errors import ConfigurationError
from serving.server.access import Access
from serving.server.drain import connection_age_ms
from serving.server.port_handover import PortHandover, ipv4_alone
from serving.server.run_file import unix_socket
from serving.triton.command_line import age_options, port_options


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """The ports to listen on. 0 means any free port. `http` is used only if `Access.http` is set."""

    grpc: int = 8001
    http: int = 8000
    operations: int = 8002

    def __post_init__(self) -> None:
        check_arguments(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoints:
    """The addresses of a server.

    Attributes:
        grpc: "host:port".
        operations: "http://host:port".
        http: "host:port", or None if clients may not use HTTP.
        listener: the socket of the operations port.
        control: the address of the control API, see `Control`. It is `http` if that is set: Triton has one HTTP
            endpoint. Otherwise it is a Unix socket.
        metrics: the Unix socket of Triton's metrics, "unix:/path".
        port_handover: directs connections of the gRPC port, for draining and certificate renewal. None if neither is
            configured, or a sandbox forbids it. With HTTP, certificates are not renewed: two processes cannot share
            its port.
        options: the options of tritonserver for its ports.
    """

    grpc: str
    http: str | None
    operations: str
    listener: socket.socket
    control: str
    metrics: str
    port_handover: PortHandover | None
    options: list[str]


@contextlib.contextmanager
def free_endpoints(access: Access, ports: Ports, drain_s: float) -> Iterator[Endpoints]:
    """Find free ports for a server. No other server of ours takes them until the block ends.

    Args:
        access: where it listens.
        ports: the ports to listen on.
        drain_s: how long the server drains before it stops, in seconds.

    Raises:
        ConfigurationError: a port is taken, or the control socket cannot be made.
    """
    with contextlib.ExitStack() as stack:
        reserved = stack.enter_context(free_ports(access, ports))
        http = f"{access.http_host}:{reserved.http}" if access.http else None
        control = http or stack.enter_context(unix_socket("control"))
        metrics = stack.enter_context(unix_socket("metrics"))
        port_handover = None
        if drain_s or (access.tls is not None and not access.http):
            with contextlib.suppress(OSError):  # a sandbox allows no program
                port_handover = PortHandover(access.host, reserved.grpc)
                stack.callback(port_handover.close)
        if port_handover is None:
            stack.enter_context(ipv4_alone(access.host, reserved.grpc))
        yield Endpoints(
            grpc=f"{access.host}:{reserved.grpc}",
            http=http,
            operations=f"http{'s' if access.operations_tls else ''}://{access.operations_host}:{reserved.operations}",
            listener=stack.enter_context(_bound("operations", access.operations_host, reserved.operations)),
            control=control,
            metrics=metrics,
            port_handover=port_handover,
            options=[
                *port_options(reserved.grpc, reserved.http, share=port_handover is not None),
                *age_options(connection_age_ms(drain_s, renews=port_handover is not None)),
            ],
        )


@contextlib.contextmanager
def free_ports(access: Access, ports: Ports) -> Iterator[Ports]:
    """Check that the ports are free, and replace each 0 by a free port.

    No process listens on them until tritonserver does. So each chosen port is claimed until the block ends.
    """
    with contextlib.ExitStack() as claims:
        while True:
            reserved = _take_ports(access, ports)
            chosen = [getattr(reserved, name) for name in ("grpc", "http", "operations") if not getattr(ports, name)]
            if all(_claim(port, claims) for port in chosen if port):
                break
        yield reserved


def _claim(port: int, claims: contextlib.ExitStack) -> bool:
    """Claim a port among servers of ours. False if another server has claimed it.

    A claim is an abstract socket name (unix(7)). It has one owner, and disappears with that process.
    """
    claim = claims.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    try:
        claim.bind(f"\0tbe-serving-port-{port}")
    except OSError:
        return False
    return True


def _take_ports(access: Access, ports: Ports) -> Ports:
    with contextlib.ExitStack() as stack:
        chosen = {"http": 0}
        hosts = {
            "grpc": access.host,
            **({"http": access.http_host} if access.http else {}),
            "operations": access.operations_host,
        }
        for name, host in hosts.items():
            bound = stack.enter_context(_bound(name, host, getattr(ports, name)))
            chosen[name] = bound.getsockname()[1]
        return Ports(**chosen)


@contextlib.contextmanager
def _bound(name: str, host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is bound to a port."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"--{name}-port {port}: cannot listen on {host}: {error.strerror}: pick another, or 0 for a free one"
            ) from error
        yield bound
