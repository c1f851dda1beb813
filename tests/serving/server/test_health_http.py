"""The operations port: its answers, and what those get who would fill it. Others here have real servers."""

import http.client
import socket
import ssl
import sys
import time
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis.strategies import binary, builds, just

from serving.errors import ConfigurationError, ServerUnavailable
from serving.server import Access, ServerTls, health_http
from serving.server.health_http import operations_port
from serving.server.health_state import HealthState
from tests.support.certificates import write_certificates

PAGE = b"""# HELP tbe_host_replicas_up Replicas that answer
tbe_host_replicas_up{host="0",model="m",version="1"} 2
tbe_host_replicas_up{host="1",model="m",version="1"} 0
tbe_requests_total{model="m",version="1"} 0
"""
OWN = b"""# HELP tbe_ready Whether the server is ready: 1 or 0
# TYPE tbe_ready gauge
tbe_ready 1
# HELP tbe_restarts_total Restarts of tritonserver
# TYPE tbe_restarts_total counter
tbe_restarts_total 0
"""
PATIENT_S = 60


@contextmanager
def listening(
    health: HealthState | None = None, access: Access | None = None, page: bytes = PAGE
) -> Iterator[tuple[str, int]]:
    """An operations port; its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        access = access or Access()
        health = health or HealthState(server_problem=None, tls=access.tls)
        port = operations_port(listener, health, lambda: page, access)
        with port:
            yield listener.getsockname()


def status_of(url: str, tls: ssl.SSLContext | None = None, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENT_S, context=tls) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def url_of(address: tuple[str, int], path: str, scheme: str = "http") -> str:
    return f"{scheme}://{address[0]}:{address[1]}{path}"


def answer_to(address: tuple[str, int], sent: bytes) -> bytes:
    """All that comes back."""
    with socket.create_connection(address, PATIENT_S) as client:
        client.sendall(sent)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def test_a_server_is_ready_with_its_models_and_alive_all_the_time() -> None:
    health = HealthState()
    with listening(health) as address:
        ready, live = url_of(address, "/readyz"), url_of(address, "/livez")
        assert status_of(ready) == (503, "not ready: starting\n")
        assert status_of(live) == (200, "alive\n")
        health.server_problem = None
        assert status_of(ready) == (200, "ready\n")
        health.model_problems = {"b": "a backend process died; reloading", "a": "it was paused"}
        assert status_of(ready) == (
            503,
            "not ready: model 'a': it was paused\nnot ready: model 'b': a backend process died; reloading\n",
        )
        health.model_problems.clear()
        health.is_stopping = True
        assert status_of(ready) == (503, "not ready: stopping\n")
        assert status_of(live) == (200, "alive\n")


def test_a_supervisor_that_stopped_checking_is_not_alive() -> None:
    with listening(HealthState(server_problem=None, last_supervised=time.monotonic() - 61)) as address:
        status, said = status_of(url_of(address, "/livez"))
        assert (status, said[:40]) == (503, "not alive: tritonserver has not been sup")
    with listening(HealthState(server_problem=None, last_supervised=time.monotonic() - 1)) as address:
        assert status_of(url_of(address, "/livez"))[0] == 200


def test_a_router_with_a_lost_host_stays_ready_and_names_it() -> None:
    with listening() as address:
        assert status_of(url_of(address, "/readyz")) == (200, "ready\n")
        assert status_of(url_of(address, "/readyz?verbose")) == (200, 'ready\nlost: host="1",model="m",version="1"\n')


def test_metrics_are_passed_on_behind_those_of_the_server() -> None:
    with listening() as address:
        with urllib.request.urlopen(url_of(address, "/metrics"), timeout=PATIENT_S) as response:
            assert response.read() == OWN + PAGE
            assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
        head = answer_to(address, b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert head.endswith(b"\r\n\r\n")
        assert b"Content-Length: %d\r\n" % len(OWN + PAGE) in head


def test_server_metrics_are_available_while_tritonserver_is_down() -> None:
    def scrape() -> bytes:
        raise ServerUnavailable("tritonserver: no answer: gone")

    health = HealthState(server_problem="tritonserver died; restarting", restarts=2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        with operations_port(listener, health, scrape, Access()):
            url = url_of(listener.getsockname(), "")
            page = OWN.replace(b"ready 1", b"ready 0").replace(b"total 0", b"total 2")
            assert status_of(f"{url}/metrics") == (200, page.decode())
            health.server_problem = None
            assert status_of(f"{url}/readyz?verbose") == (200, "ready\n")


def test_metrics_report_the_expiry_of_the_served_certificate(pems: Path) -> None:
    """A file that was renewed since is not what is served."""
    health = HealthState(tls=tls_of(pems))
    health.reload_certificate()
    expiry = x509.load_pem_x509_certificate((pems / "server.pem").read_bytes()).not_valid_after_utc.timestamp()
    line = f"\ntbe_certificate_expires_timestamp_seconds {expiry:.0f}\n".encode()
    assert line in health.metrics()
    renewed = write_certificates(pems / "renewed", expires=datetime.now(UTC) + timedelta(days=1), server="127.0.0.1")
    for name in ("server.pem", "server.key"):
        (pems / name).write_bytes((renewed / name).read_bytes())
    assert line in health.metrics()
    health.reload_certificate()
    assert line not in health.metrics()
    (pems / "server.pem").unlink()
    health.reload_certificate()  # tritonserver itself says that it cannot be read


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET /metrics/../livez HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 405),
        (b"GET /livez HTTP/1.1\r\n\r\n", 400),  # without Host
        (b"GET /livez HTTP/1.0\r\n\r\n", 200),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),  # TLS
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", 200),
        (b"GET /livez HTTP/1.1\r\nX: " + b"a" * 17_000, 431),
    ],
)
def test_other_and_malformed_requests_get_their_http_status(sent: bytes, status: int) -> None:
    with listening() as address:
        assert answer_to(address, sent).split(b" ")[1] == b"%d" % status


@given(sent=binary(max_size=200) | builds(bytes.__add__, just(b"GET /livez HTTP/1.1\r\n"), binary(max_size=200)))
def test_the_next_request_is_answered_after_any_input(sent: bytes) -> None:
    with listening() as address:
        with socket.create_connection(address, PATIENT_S) as client, suppress(ConnectionResetError):
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
            assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
        assert status_of(url_of(address, "/livez")) == (200, "alive\n")


def test_a_connection_closed_before_a_request_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with listening() as address:
        assert answer_to_nothing(address) == b""
        assert status_of(url_of(address, "/livez"))[0] == 200
    assert caplog.records == []


def answer_to_nothing(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, PATIENT_S) as client:
        client.shutdown(socket.SHUT_WR)
        return client.recv(100)


@pytest.mark.promise("A request to the operations port takes bounded memory, whatever its length")
@pytest.mark.parametrize("of", ["body", "headers"])
def test_a_request_of_any_length_takes_no_memory(of: str) -> None:
    """Triton 2.51 grew to 3 GB by 17 MiB of chunks of one byte."""
    start = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
    start, piece = {"body": (start + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"), "headers": (start, b"a")}[
        of
    ]
    pieces = piece * 10_000
    with listening() as address, socket.create_connection(address, PATIENT_S) as client:
        tracemalloc.start()
        try:
            client.sendall(start)
            with suppress(OSError):  # it is answered, and hears no more
                for _ in range((17 << 20) // len(pieces)):
                    client.sendall(pieces)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        assert status_of(url_of(address, "/livez"))[0] == 200


@pytest.mark.promise("Held or slow connections to the operations port keep no probe out")
def test_open_connections_do_not_block_probes() -> None:
    with listening() as address, ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address, PATIENT_S)) for _ in range(300)]
        for client in clients[::2]:
            with suppress(OSError):
                client.sendall(b"GET /readyz HTTP/1.1\r\n")
        assert status_of(url_of(address, "/readyz")) == (200, "ready\n")
        # The oldest have ended.
        for client in clients[: 300 - health_http._MOST]:
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""


@pytest.mark.promise("Held or slow connections to the operations port keep no probe out")
def test_slow_and_unread_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_http, "_PATIENCE_S", 0.3)
    with listening(page=b"#" * (64 << 20)) as address, socket.create_connection(address, PATIENT_S) as slow:
        slow.sendall(b"GET /livez HTTP/1.1\r\n")
        with suppress(ConnectionResetError):
            assert slow.recv(1) == b""
        assert any(read_after(address, waited_s) < 64 << 20 for waited_s in (1, 5, 30))  # what the kernel had


def read_after(address: tuple[str, int], waited_s: float) -> int:
    """How many bytes of metrics come to who does not read for a while."""
    got = 0
    with socket.create_connection(address, PATIENT_S) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(waited_s)
        with suppress(ConnectionResetError):
            while piece := client.recv(1 << 20):
                got += len(piece)
    return got


@pytest.fixture
def pems(tmp_path: Path) -> Path:
    return write_certificates(tmp_path, server="127.0.0.1")


def tls_of(pems: Path) -> ServerTls:
    return ServerTls(certificate=pems / "server.pem", private_key=pems / "server.key")


def test_the_port_with_tls_refuses_plain_http(pems: Path) -> None:
    trusts = ssl.create_default_context(cafile=pems / "root.pem")
    access = Access(tls=tls_of(pems), operations_tls=True)
    health = HealthState(server_problem=None, tls=access.tls)
    with listening(health, access) as address:
        assert status_of(url_of(address, "/readyz", "https"), trusts) == (200, "ready\n")
        assert status_of(url_of(address, "/metrics", "https"), trusts) == (200, (health.metrics() + PAGE).decode())
        with pytest.raises((http.client.HTTPException, OSError)):
            status_of(url_of(address, "/readyz"))
    with listening(access=Access(tls=tls_of(pems))) as address:  # gRPC has it, this has not
        assert status_of(url_of(address, "/readyz")) == (200, "ready\n")


def test_unfinished_handshakes_take_a_bounded_number_of_files(pems: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_http, "_MOST_HANDSHAKES", 10)
    monkeypatch.setattr(health_http, "_HANDSHAKE_S", 1.0)
    trusts = ssl.create_default_context(cafile=pems / "root.pem")
    with listening(access=Access(tls=tls_of(pems), operations_tls=True)) as address, ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address, PATIENT_S)) for _ in range(50)]
        for client in clients:  # 40 at once, and the others when their time is over
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
        assert status_of(url_of(address, "/readyz", "https"), trusts) == (200, "ready\n")


def test_the_port_switches_certificates_with_tritonserver(pems: Path) -> None:
    """What the metric says is what both serve."""
    access = Access(tls=tls_of(pems), operations_tls=True)
    health = HealthState(tls=access.tls)
    old = write_certificates(pems / "old", expires=datetime.now(UTC) + timedelta(days=2), server="127.0.0.1")

    def served(address: tuple[str, int]) -> float:
        pem = ssl.get_server_certificate(address, timeout=PATIENT_S)
        return x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc.timestamp()

    with listening(health, access) as address:
        before = health.certificate_expires
        assert served(address) == before
        renewed = write_certificates(pems / "new", expires=datetime.now(UTC) + timedelta(days=1), server="127.0.0.1")
        for name in ("server.pem", "server.key"):
            (pems / name).write_bytes((renewed / name).read_bytes())
        assert served(address) == before
        health.reload_certificate()
        assert served(address) == health.certificate_expires != before
        (pems / "server.pem").write_bytes((old / "server.pem").read_bytes())  # whose key is another
        health.reload_certificate()
        assert served(address) == health.certificate_expires != before


@pytest.mark.promise("With an operations token, metrics require it and probes do not")
def test_metrics_ask_for_the_token_and_probes_do_not() -> None:
    with listening(access=Access(operations_token="s3cret.token")) as address:
        assert status_of(url_of(address, "/readyz"))[0] == status_of(url_of(address, "/livez"))[0] == 200
        wrong: list[dict[str, str]] = [
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "s3cret.token"},
            {"Authorization": "Bearer s3cret.token "[:-2]},
        ]
        for headers in wrong:
            assert status_of(url_of(address, "/metrics"), None, **headers) == (
                401,
                "expected the token: `Authorization: Bearer TOKEN`\n",
            )
        assert status_of(url_of(address, "/metrics"), Authorization="Bearer s3cret.token") == (
            200,
            (OWN + PAGE).decode(),
        )
        response = answer_to(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"WWW-Authenticate: Bearer\r\n" in response


@pytest.mark.parametrize("token", ["", "two words", "a\nb", "ümlaut", "a:b"])
def test_an_invalid_token_is_refused(token: str) -> None:
    with pytest.raises(ConfigurationError, match="--operations-token: expected a file with one line"):
        Access(operations_token=token)
    assert "s3cret" not in repr(Access(operations_token="s3cret"))


def test_tls_needs_a_certificate() -> None:
    with pytest.raises(ConfigurationError, match="--operations-tls: expected --tls-cert and --tls-key beside it"):
        Access(operations_tls=True)


def test_a_missing_h11_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h11", None)
    monkeypatch.setattr(health_http, "find_spec", lambda _: None)
    with (
        pytest.raises(
            ConfigurationError,
            match=r"h11 is not installed, which the operations port needs: `pip install 'tbe-serving\[server\]'`",
        ),
        listening(),
    ):
        pass


def test_a_port_taken_since_the_check_is_reported() -> None:
    with socket.socket() as other, socket.socket() as listener:
        for sock in (other, listener):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        listener.bind(other.getsockname())
        other.listen()
        port = operations_port(listener, HealthState(), lambda: PAGE, Access())
        with pytest.raises(ConfigurationError, match=r"--operations-port \d+: cannot listen on 127\.0\.0\.1"), port:
            pass
