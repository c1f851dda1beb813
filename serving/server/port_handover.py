"""Hand new connections of a gRPC port from one tritonserver process to the next."""

import contextlib
import ctypes
import os
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from serving.server.access import EVERYWHERE

# <asm-generic/socket.h>, <linux/filter.h>: a program's one step, "return this number".
_SO_ATTACH_REUSEPORT_CBPF, _RETURN = 51, 0x06
# <net/tcp_states.h>
_ESTABLISHED, _LISTEN = "01", "0A"


class PortHandover:
    """Directs new connections of a gRPC port to one of the processes that listen on it.

    Sockets that listen on one port by SO_REUSEPORT form an array in the kernel, in the order in which they began to
    listen. A program returns the index of the socket that gets a new connection (socket(7),
    SO_ATTACH_REUSEPORT_CBPF). When a socket closes, the last one moves to its index (reuseport_detach_sock() of
    net/core/sock_reuseport.c). So before connections are directed to a new process, this class adds sockets after
    the new process's own: as many fillers as the process before has sockets. When the process before closes its
    sockets, the fillers move to their indices, and the sockets of the new process keep theirs. Then all fillers but
    one can close: the sockets that move to their indices belong to the new process, but are not the one that
    connections are directed to.

    While a process listens, no connection is directed to a filler, nor to the first socket of all, which holds the
    program. The kernel would otherwise choose a filler at random, and reset that connection.

    Only TCP over IPv4: `Access.host` is such an address.

    Raises:
        OSError: the port is taken, or the kernel takes no program.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        # As gRPC chooses (create_dualstack_socket of tcp_socket_utils): sockets of another family share no port.
        is_mapped = host != EVERYWHERE and _has_ipv6()
        self._family = socket.AF_INET6 if is_mapped else socket.AF_INET
        self._address = f"::ffff:{host}" if is_mapped else host, port
        self._first = self._bound_socket()
        self._ipv6 = contextlib.ExitStack()
        self._fillers: list[socket.socket] = []
        # The fillers that can close when the process before has ended.
        self._spare: list[socket.socket] = []
        # With a program before it listens: it never gets a connection.
        self._direct_to(1)
        self._first.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._first, selectors.EVENT_READ)
        self._is_open = True
        self._thread = threading.Thread(target=self._reset_connections, name="port handover", daemon=True)
        self._thread.start()

    def direct_to_next(self) -> None:
        """Direct new connections to the process that is about to start. No other process listens."""
        self.predecessor_ended()
        self._direct_to(1 + len(self._fillers))

    def hold_ipv6(self) -> None:
        """Keep gRPC from [::], as `ipv4_alone` does. Call this just before a process starts.

        The socket that holds [::] has to be the last that took the port. The kernel may compare a new socket with the
        last one alone: `fastreuseport` in net/ipv4/inet_connection_sock.c.
        """
        self._ipv6.close()
        self._ipv6.enter_context(ipv4_alone(self._host, self._port))

    def close(self) -> None:
        """Let the kernel choose among the processes from now on."""
        if not self._is_open:
            return
        self._ipv6.close()
        self._is_open = False
        self._first.shutdown(socket.SHUT_RDWR)  # it stops listening, which wakes the thread
        self._thread.join()

    def _reset_connections(self) -> None:
        """Reset each connection that reaches the first socket or a filler."""
        while self._is_open:
            for key, _ in self._selector.select():
                with contextlib.suppress(OSError), cast(socket.socket, key.fileobj).accept()[0] as connection:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for key in [*self._selector.get_map().values()]:
            cast(socket.socket, key.fileobj).close()
        self._selector.close()

    def hand_over(self, process: int) -> None:
        """Direct new connections to the process that began to listen after `process`, which got them so far.

        Open connections stay with their process.

        Raises:
            OSError: as the constructor; or `process` has ended.
        """
        listening = len(self._sockets(process, _LISTEN))
        if not listening:
            raise ProcessLookupError(f"process {process} does not listen")
        with contextlib.ExitStack() as stack:
            fillers = [stack.enter_context(self._bound_socket()) for _ in range(listening)]
            for filler in fillers:
                filler.listen()
                self._selector.register(filler, selectors.EVENT_READ)
            self._direct_to(1 + len(self._fillers) + listening)
            stack.pop_all()
        self._fillers += fillers
        self._spare = fillers[1:]

    def refuse(self) -> None:
        """Direct new connections to the first socket, which resets them. Open connections stay."""
        self._direct_to(0)

    def predecessor_ended(self) -> None:
        """Close the fillers that are no longer needed because the previous process has ended."""
        for filler in self._spare:
            self._selector.unregister(filler)
            filler.close()
            self._fillers.remove(filler)
        self._spare = []

    def can_direct_to(self, process: int) -> bool:
        """Whether a process listens on the port so that connections can be directed to it."""
        with contextlib.suppress(OSError):
            return bool(self._sockets(process, _LISTEN))
        return False

    def has_connections(self, process: int) -> bool:
        """Whether a process has connections at the port, accepted or not. False if it has ended."""
        with contextlib.suppress(OSError):
            # The receive queue of a listening socket counts connections that are not accepted yet.
            waiting = sum(int(row[4].partition(":")[2], 16) for row in self._sockets(process, _LISTEN))
            return waiting > 0 or bool(self._sockets(process, _ESTABLISHED))
        return False

    def _bound_socket(self) -> socket.socket:
        bound = socket.socket(self._family)
        bound.setblocking(False)
        if self._family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(self._address)
        return bound

    def _direct_to(self, index: int) -> None:
        step = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, index))
        program = struct.pack("HP", 1, ctypes.addressof(step))  # struct sock_fprog
        self._first.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)

    def _sockets(self, process: int, state: str) -> list[list[str]]:
        """The rows of a process's sockets at the port, in a state: proc(5), /proc/PID/net/tcp."""
        folder = Path("/proc") / str(process)
        files = set()
        for descriptor in (folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was just closed
                files.add(os.readlink(descriptor))
        table = folder / "net" / ("tcp6" if self._family == socket.AF_INET6 else "tcp")
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
        end = f":{self._port:04X}"
        return [row for row in rows if row[3] == state and row[1].endswith(end) and f"socket:[{row[9]}]" in files]


def _has_ipv6() -> bool:
    """Whether gRPC assumes that there is IPv6: grpc_ipv6_loopback_available() of its source."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@contextlib.contextmanager
def ipv4_alone(host: str, port: int) -> Iterator[None]:
    """Keep gRPC from listening on IPv6 if it is to listen on 0.0.0.0.

    gRPC also listens on [::] unless the port is taken there, so this binds a socket to it that does not listen.
    """
    with contextlib.ExitStack() as stack:
        if host == EVERYWHERE:
            with contextlib.suppress(OSError):  # no IPv6 here, or another process has the port
                bound = stack.enter_context(socket.socket(socket.AF_INET6))
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                bound.bind(("::", port))
        yield
