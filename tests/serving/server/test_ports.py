"""Free ports, and ports that several processes share."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections import Counter

import psutil
import pytest

from serving.server import Access
from serving.server.port_handover import PortHandover
from serving.server.ports import free_ports
from tests.support.servers import FREE


def test_servers_that_start_together_take_different_ports() -> None:
    with contextlib.ExitStack() as starting:
        taken_ports = [starting.enter_context(free_ports(Access(http=True), FREE)) for _ in range(300)]
    chosen = [
        port
        for server_ports in taken_ports
        for port in (server_ports.grpc, server_ports.http, server_ports.operations)
    ]
    assert len(set(chosen)) == 900


# Listens as gRPC does, by three sockets, and answers with its name.
_LISTENING = """
import selectors, socket, sys
family, host, port, name = getattr(socket, sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
selector = selectors.DefaultSelector()
for _ in range(3):
    listener = socket.socket(family)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen(64)
    selector.register(listener, selectors.EVENT_READ)
print("listens", flush=True)
kept = []
while True:
    for key, _ in selector.select():
        kept.append(key.fileobj.accept()[0])
        kept[-1].sendall(name.encode())
"""


def answers(port: int) -> Counter[str]:
    """Who answers fifty new connections. The first that is turned away is the last."""
    counter: Counter[str] = Counter()
    for _ in range(50):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                counter[connection.recv(10).decode()] += 1
        except ConnectionResetError:
            counter["turned away"] += 1
            break
    return counter


@pytest.mark.promise("TLS certificates and authorities are renewed under load without a failed call")
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_new_connections_reach_only_the_chosen_process(host: str) -> None:
    """Through six handovers; whoever ends, and whenever."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(free_ports(Access(), FREE)).grpc
        handover = PortHandover(host, port)
        stack.callback(handover.close)
        is_mapped = host == "127.0.0.1" and socket.has_dualstack_ipv6()

        def start(name: str) -> "subprocess.Popen[str]":
            handover.hold_ipv6()
            family, address = ("AF_INET6", f"::ffff:{host}") if is_mapped else ("AF_INET", host)
            command = [sys.executable, "-c", _LISTENING, family, address, str(port), name]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
            return process

        def end(process: "subprocess.Popen[str]") -> None:
            process.kill()
            process.wait()

        assert answers(port) == {"turned away": 1}
        before = len(gate_sockets(port))
        present = start("0")
        assert handover.can_direct_to(present.pid)
        for name in "123456":
            connection = socket.create_connection(("127.0.0.1", port))
            stack.callback(connection.close)
            assert connection.recv(1) == str(int(name) - 1).encode()
            failed = start("-")  # ends before it is led to
            assert answers(port) == {str(int(name) - 1): 50}
            end(failed)
            assert answers(port) == {str(int(name) - 1): 50}
            following = start(name)
            assert answers(port) == {str(int(name) - 1): 50}
            handover.hand_over(present.pid)
            assert answers(port) == {name: 50}
            assert handover.has_connections(present.pid)
            end(present)
            assert not handover.has_connections(present.pid)
            assert answers(port) == {name: 50}
            handover.predecessor_ended()
            assert answers(port) == {name: 50}
            assert len(gate_sockets(port)) == before + int(name)  # one stays of each handover
            present = following
        handover.hand_over(present.pid)  # to a process that dies before the one before has ended
        end(present)
        assert answers(port) == {"turned away": 1}
        handover.direct_to_next()
        present = start("anew")
        assert answers(port) == {"anew": 50}
        following = start("last")
        handover.hand_over(present.pid)
        end(present)
        handover.predecessor_ended()
        assert answers(port) == {"last": 50}
        assert not handover.has_connections(following.pid)
        following.send_signal(signal.SIGSTOP)  # it accepts nothing
        connection = socket.create_connection(("127.0.0.1", port))
        stack.callback(connection.close)
        assert handover.has_connections(following.pid)


def gate_sockets(port: int) -> list[int]:
    """Sockets of this process that listen on a port."""
    connections = psutil.Process().net_connections("tcp")
    return [
        connection.fd
        for connection in connections
        if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
    ]
