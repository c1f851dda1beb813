"""HTTP proxies of the environment: never for this machine; an error of a connection through one names it."""

import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from serving.client import LookupClient, Retries
from serving.client.connection import Connection
from serving.client.proxies import may_be_proxied, proxy_note
from serving.errors import ServerUnavailable
from tests.support.fake_server import FakeServer, serving

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


class Refusing(socketserver.ThreadingTCPServer):
    """A proxy that refuses all, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Refusal)
        self.request_lines: list[bytes] = []
        self.url = f"http://user:secret@127.0.0.1:{self.server_address[1]}"


class _Refusal(socketserver.BaseRequestHandler):
    server: Refusing

    def handle(self) -> None:
        self.server.request_lines.append(self.request.recv(4096).partition(b"\r\n")[0])
        self.request.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")


@pytest.fixture
def proxy() -> Iterator[Refusing]:
    with Refusing() as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("variable", PROXIES)
def test_this_machine_is_not_asked_through_a_proxy(
    variable: str, proxy: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, proxy.url)
    with serving(FakeServer(), "127.0.0.1") as address:
        port = address.rpartition(":")[2]
        for url in (address, f"localhost:{port}", f"dns:///localhost:{port}", [address, f"localhost:{port}"]):
            with LookupClient(url, "m", 20) as client:
                assert client.lookup({"x": [[1]]}).version == 7
    assert proxy.request_lines == []


def test_several_addresses_are_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC would ask it for a host that is called as all of them."""
    monkeypatch.setenv("http_proxy", "http://proxy.test:3128")
    addresses = ["a.b:1", "c.d:1"]
    assert ("grpc.enable_http_proxy", 0) in Connection(addresses=addresses)._options()
    assert ("grpc.enable_http_proxy", 1) in Connection(addresses=addresses[:1])._options()
    assert proxy_note(addresses) is None


def test_an_error_names_the_proxy_and_not_its_password(proxy: Refusing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", proxy.url)
    shown = proxy.url.replace("user:secret@", "")
    client = LookupClient("192.0.2.1:1", "m", 20, retries=Retries(attempts=1))
    with client, pytest.raises(ServerUnavailable) as error:
        client.info()
    assert str(error.value).endswith(
        f": connected through the proxy {shown}, set by http_proxy: no_proxy=192.0.2.1 connects directly"
    )
    assert "secret" not in str(error.value)
    assert set(proxy.request_lines) == {b"CONNECT 192.0.2.1:1 HTTP/1.1"}


def test_commands_ask_this_machine_itself(proxy: Refusing, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", proxy.url)
    command = [sys.executable, "-m", "serving", "lookup", "m", "--url", address, "--timeout-s", "20"]
    done = subprocess.run(command, input='{"x": [[1]]}', capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert proxy.request_lines == []


@pytest.mark.parametrize(
    ("rules", "address", "is_direct"),
    [
        ("", "a.b:1", False),
        ("b.c, .d", "a.b:1", False),
        ("a.b", "a.b:1", True),
        ("x, .B", "a.b:1", True),
        ("b", "a.b:1", True),
        ("10.0.0.0/8", "10.1.2.3:1", True),
        ("10.0.0.0/8", "11.1.2.3:1", False),
        ("10.1.2.3", "10.1.2.3:1", True),
        ("2.3", "10.1.2.3:1", True),
    ],
)
def test_no_proxy_leaves_hosts_out_as_grpc_reads_it(
    rules: str, address: str, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.test:3128")
    monkeypatch.setenv("no_proxy", rules)
    note = proxy_note([address])
    assert (note is None) == is_direct


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1", "127.5.0.1:1", "localhost:1", "LocalHost.:1", "a.localhost:1", "[::1]:1", "ipv6:[::1]:1"],
)
def test_addresses_of_this_machine_are_recognized(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.test:3128")
    assert not may_be_proxied([address])
    assert proxy_note([address]) is None
