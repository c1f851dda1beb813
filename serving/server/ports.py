"""Where a server listens: its ports, its addresses, and their options of tritonserver."""

import contextlib
import ctypes
import os
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from serving.arguments import check_arguments
from serving.errors import ConfigurationError
from serving.server.access import EVERYWHERE, Access
from serving.server.drain import connection_age_ms
from serving.server.run_file import unix_socket
from serving.triton.command_line import age_options, port_options

# <asm-generic/socket.h>, <linux/filter.h>: a program's one step, "return this number".
_SO_ATTACH_REUSEPORT_CBPF, _RETURN = 51, 0x06
# <net/tcp_states.h>
_ESTABLISHED, _LISTEN = "01", "0A"


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
        http: "host:port". None: clients may not use HTTP.
        listener: the socket of the operations port.
        control: the address of the control API, see `Control`. It is `http` if that is set: Triton has one HTTP
            endpoint. Otherwise it is a Unix socket.
        metrics: the Unix socket of Triton's metrics, "unix:/path".
        gate: of the gRPC port. None: nothing needs one, or a sandbox allows none. A renewed certificate needs it,
            unless HTTP is on: two processes cannot share that. Draining needs it.
        options: the options of tritonserver for its ports.
    """

    grpc: str
    http: str | None
    operations: str
    listener: socket.socket
    control: str
    metrics: str
    gate: "Gate | None"
    options: list[str]


class Gate:
    """Leads new connections of a gRPC port to one of the processes that listen on it.

    Sockets that listen on one port by SO_REUSEPORT are an array in the kernel, in the order in which they began. A
    program says by its place which one gets a new connection (socket(7), SO_ATTACH_REUSEPORT_CBPF). When one closes,
    the last takes its place (reuseport_detach_sock() of net/core/sock_reuseport.c). So sockets of ours come behind a
    process that is led to, as many as the one before it has. When that closes its own, they move, and the process
    stays where it is. Then all but one of them can go: what takes their places are sockets of the process but the one
    that is led to.

    While a process listens, nobody is led to a socket of ours, nor to the first one of all, which holds the program.
    Else the kernel chooses one of them, and who comes is turned away at once, as if nobody listened.

    Only TCP over IPv4: `Access.host` is such an address.

    Raises:
        OSError: the port is taken, or the kernel takes no program.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        # As gRPC chooses (create_dualstack_socket of tcp_socket_utils): sockets of another family share no port.
        is_mapped = host != EVERYWHERE and _has_ipv6()
        self._family = socket.AF_INET6 if is_mapped else socket.AF_INET
        self._address = f"::ffff:{host}" if is_mapped else host, port
        self._first = self._bound()
        self._ipv6 = contextlib.ExitStack()
        self._fillers: list[socket.socket] = []
        # Those of `_fillers` that can go when the process before has ended.
        self._spare: list[socket.socket] = []
        # With a program before it listens: it never gets a connection.
        self._lead_to(1)
        self._first.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._first, selectors.EVENT_READ)
        self._is_open = True
        self._thread = threading.Thread(target=self._turn_away, name="gate", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Lead new connections to the process that is about to start: there is no other."""
        self.settle()
        self._lead_to(1 + len(self._fillers))

    def before_start(self) -> None:
        """Call this just before a process starts, for `_ipv4_alone`.

        What keeps others from [::] has to be the last that took the port. Else the kernel may look only whether they
        share it with the last: `fastreuseport` in net/ipv4/inet_connection_sock.c.
        """
        self._ipv6.close()
        self._ipv6.enter_context(_ipv4_alone(self._host, self._port))

    def close(self) -> None:
        """From now on, the kernel chooses among the processes."""
        if not self._is_open:
            return
        self._ipv6.close()
        self._is_open = False
        self._first.shutdown(socket.SHUT_RDWR)  # it listens no more, and the thread looks
        self._thread.join()

    def _turn_away(self) -> None:
        """Reset each connection that comes to a socket of ours."""
        while self._is_open:
            for key, _ in self._selector.select():
                with contextlib.suppress(OSError), cast(socket.socket, key.fileobj).accept()[0] as came:
                    came.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for key in [*self._selector.get_map().values()]:
            cast(socket.socket, key.fileobj).close()
        self._selector.close()

    def hand_over(self, process: int) -> None:
        """Lead new connections to the process that began to listen after `process`, which they have come to so far.

        Connections stay where they are.

        Raises:
            OSError: as for the gate; or `process` has ended.
        """
        listening = len(self._sockets(process, _LISTEN))
        if not listening:
            raise ProcessLookupError(f"process {process} does not listen")
        with contextlib.ExitStack() as stack:
            fillers = [stack.enter_context(self._bound()) for _ in range(listening)]
            for filler in fillers:
                filler.listen()
                self._selector.register(filler, selectors.EVENT_READ)
            self._lead_to(1 + len(self._fillers) + listening)
            stack.pop_all()
        self._fillers += fillers
        self._spare = fillers[1:]

    def refuse(self) -> None:
        """Lead new connections to the first socket of ours, which resets them. Open ones stay."""
        self._lead_to(0)

    def settle(self) -> None:
        """The process before has ended."""
        for each in self._spare:
            self._selector.unregister(each)
            each.close()
            self._fillers.remove(each)
        self._spare = []

    def is_shared_with(self, process: int) -> bool:
        """Whether a process listens on the port so that it can be led to."""
        with contextlib.suppress(OSError):
            return bool(self._sockets(process, _LISTEN))
        return False

    def has_connections(self, process: int) -> bool:
        """Whether a process has connections at the port, accepted or not. It has none if it has ended."""
        with contextlib.suppress(OSError):
            # Of a socket that listens, the queue of what came is that of connections to accept.
            waiting = sum(int(row[4].partition(":")[2], 16) for row in self._sockets(process, _LISTEN))
            return waiting > 0 or bool(self._sockets(process, _ESTABLISHED))
        return False

    def _bound(self) -> socket.socket:
        bound = socket.socket(self._family)
        bound.setblocking(False)
        if self._family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(self._address)
        return bound

    def _lead_to(self, place: int) -> None:
        step = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, place))
        program = struct.pack("HP", 1, ctypes.addressof(step))  # struct sock_fprog
        self._first.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)

    def _sockets(self, process: int, state: str) -> list[list[str]]:
        """The rows of a process's sockets at the port, in a state: proc(5), /proc/PID/net/tcp."""
        folder = Path("/proc") / str(process)
        own = set()
        for each in (folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was just closed
                own.add(os.readlink(each))
        table = folder / "net" / ("tcp6" if self._family == socket.AF_INET6 else "tcp")
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
        end = f":{self._port:04X}"
        return [row for row in rows if row[3] == state and row[1].endswith(end) and f"socket:[{row[9]}]" in own]


def _has_ipv6() -> bool:
    """Whether gRPC takes it that there is IPv6: grpc_ipv6_loopback_available() of its source."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as tried:
        tried.bind(("::1", 0))
        return True
    return False


@contextlib.contextmanager
def free_endpoints(access: Access, ports: Ports, drain_s: float = 0.0) -> Iterator[Endpoints]:
    """Find free ports for a server. No other server of ours takes them until the block ends.

    Args:
        access: where it listens.
        ports: the ports to listen on.
        drain_s: how long it drains before it stops, in seconds.

    Raises:
        ConfigurationError: a port is taken, or there is no place for the control socket.
    """
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(free_ports(access, ports))
        http = f"{access.http_host}:{taken.http}" if access.http else None
        control = http or stack.enter_context(unix_socket("control"))
        metrics = stack.enter_context(unix_socket("metrics"))
        gate = None
        if drain_s or (access.tls is not None and not access.http):
            with contextlib.suppress(OSError):  # a sandbox allows no program
                gate = Gate(access.host, taken.grpc)
                stack.callback(gate.close)
        if gate is None:
            stack.enter_context(_ipv4_alone(access.host, taken.grpc))
        yield Endpoints(
            grpc=f"{access.host}:{taken.grpc}",
            http=http,
            operations=f"http{'s' if access.operations_tls else ''}://{access.operations_host}:{taken.operations}",
            listener=stack.enter_context(_bound("operations", access.operations_host, taken.operations)),
            control=control,
            metrics=metrics,
            gate=gate,
            options=[
                *port_options(taken.grpc, taken.http, share=gate is not None),
                *age_options(connection_age_ms(drain_s, renews=gate is not None)),
            ],
        )


@contextlib.contextmanager
def free_ports(access: Access, ports: Ports) -> Iterator[Ports]:
    """Check that the ports are free, and choose free ones for those that are 0.

    No process listens on them until tritonserver does. So each chosen port is claimed until the block ends.
    """
    with contextlib.ExitStack() as claims:
        while True:
            taken = _take_ports(access, ports)
            chosen = [getattr(taken, name) for name in ("grpc", "http", "operations") if not getattr(ports, name)]
            if all(_claim(port, claims) for port in chosen if port):
                break
        yield taken


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


@contextlib.contextmanager
def _ipv4_alone(host: str, port: int) -> Iterator[None]:
    """Keep gRPC from listening on IPv6, if it is to listen on 0.0.0.0.

    gRPC would listen on [::] too, unless that port of [::] is taken. So a socket of ours takes it, and does not
    listen.
    """
    with contextlib.ExitStack() as stack:
        if host == EVERYWHERE:
            with contextlib.suppress(OSError):  # no IPv6 here, or another process has the port
                taken = stack.enter_context(socket.socket(socket.AF_INET6))
                taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                taken.bind(("::", port))
        yield
