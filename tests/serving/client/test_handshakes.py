"""TLS handshakes that fail: the error names the option to change."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from serving.client import LookupClient, Tls
from serving.errors import ServerUnavailable
from tests.support.certificates import write_certificates


@contextmanager
def listening(pems: Path | None) -> Iterator[int]:
    """A gRPC server of no method, with the certificate of `pems` or without TLS; its port."""
    server = grpc.server(ThreadPoolExecutor(1))
    if pems is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = (pems / "server.key").read_bytes(), (pems / "server.pem").read_bytes()
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        yield port
    finally:
        server.stop(None)


@pytest.mark.parametrize(
    ("authority", "name", "message"),
    [
        ("other", "server.example", r"not signed by the root certificates .*`--tls-ca`.* of its authority"),
        ("own", "127.0.0.1", r"another name than this address: `--tls-server-name`"),
        (None, "server.example", r"the server has no TLS: leave `--tls-ca`"),
    ],
    ids=["another authority", "another name", "no TLS"],
)
def test_a_handshake_that_fails_says_which_option_to_change(
    tmp_path: Path, authority: str | None, name: str, message: str
) -> None:
    pems = {name: write_certificates(tmp_path / name, server="server.example") for name in ("own", "other")}
    tls = Tls(root_certificates=pems[authority or "own"] / "root.pem", server_name=name)
    with (
        listening(None if authority is None else pems["own"]) as port,
        LookupClient(f"127.0.0.1:{port}", "m", 30, tls=tls) as client,
        pytest.raises(ServerUnavailable, match=message) as error,
    ):
        client.lookup({"x": [[1]]})
    assert ": OK" not in str(error.value)
