"""Who should not get in does not: closed protocols, TLS, keys, and bundles that somebody else made or changed."""

import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from export import export_model
from serving.bundle.manifest import MANIFEST
from serving.client import LookupClient, Retries, Tls
from serving.errors import AccessDenied, ServerUnavailable, ServingError
from serving.server import Access, Control, Server, run_server
from serving.server.run_file import find_run_file
from serving.triton.command_line import KEY_HEADER
from tests.support.certificates import write_certificates
from tests.support.commands import tbe_export
from tests.support.long_cases import one_in
from tests.support.models import SUM, collection
from tests.support.servers import (
    FREE,
    FREE_PORTS,
    listens,
    refused_run,
    replace_model_py,
    running,
    stubs,
    tbe_serve,
    wait_for_answer,
)

ASKED = {"x": [[1]]}


def answers(url: str, tls: Tls | None = None) -> int:
    """The version that answers."""
    with LookupClient(url, "m", 30, tls=tls) as client:
        return client.lookup(ASKED).version


# --- what is closed


@pytest.fixture(scope="module")
def closed(one_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    log = tmp_path_factory.mktemp("closed") / "log"
    access = Access(http=True)
    with run_server(one_model, FREE, access=access, log=log, options=("--log-verbose=1",)) as server:
        yield server, log


CLOSED_OVER_GRPC = {
    "load": lambda client: client.load_model("m"),
    "load with a config": lambda client: client.load_model("m", config='{"backend": "python"}'),
    "load with files": lambda client: client.load_model("m", config="{}", files={"file:1/model.py": b"import os"}),
    "unload": lambda client: client.unload_model("m"),
    "index": lambda client: client.get_model_repository_index(),
    "register shared memory": lambda client: client.register_system_shared_memory("x", "/x", 8),
    "shared memory": lambda client: client.get_system_shared_memory_status(),
    "unregister shared memory": lambda client: client.unregister_system_shared_memory(),
    "CUDA shared memory": lambda client: client.get_cuda_shared_memory_status(),
    "set traces": lambda client: client.update_trace_settings(settings={"trace_file": "/tmp/x"}),
    "traces": lambda client: client.get_trace_settings(),
    "set logs": lambda client: client.update_log_settings({"log_file": "/tmp/x"}),
    "logs": lambda client: client.get_log_settings(),
}


@pytest.mark.promise("Without the server's key a client can call lookups and read-only model information alone")
@pytest.mark.parametrize("name", CLOSED_OVER_GRPC)
def test_over_grpc_only_lookups_are_open(closed: tuple[Server, Path], name: str) -> None:
    server, _ = closed
    with (
        triton.InferenceServerClient(server.grpc) as client,
        pytest.raises(InferenceServerException, match="protocol is restricted") as refused,
    ):
        CLOSED_OVER_GRPC[name](client)
    assert refused.value.status() == "StatusCode.UNAVAILABLE"
    assert server.key not in str(refused.value)


@pytest.mark.promise("Without the server's key a client can call lookups and read-only model information alone")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v2/repository/index", b"{}"),
        ("v2/repository/models/m/load", b"{}"),
        ("v2/repository/models/m/unload", b"{}"),
        ("v2/systemsharedmemory/region/x/register", b'{"key": "/x", "offset": 0, "byte_size": 8}'),
        ("v2/systemsharedmemory/status", None),
        ("v2/cudasharedmemory/status", None),
        ("v2/trace/setting", b'{"trace_file": "/tmp/x"}'),
        ("v2/models/m/trace/setting", b'{"trace_file": "/tmp/x"}'),
        ("v2/logging", b'{"log_file": "/tmp/x"}'),
        ("v2/logging", None),
    ],
)
def test_over_http_only_lookups_are_open(closed: tuple[Server, Path], path: str, body: bytes | None) -> None:
    server, _ = closed
    for key in (None, "guess", server.key[:-1], server.key.upper() + "0"):
        headers = {} if key is None else {"tbe-serving-key": key}
        request = urllib.request.Request(f"http://{server.http}/{path}", data=body, headers=headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        assert refused.value.code == 403


def test_the_ports_for_lookups_are_open(closed: tuple[Server, Path]) -> None:
    server, _ = closed
    assert answers(server.grpc) == 1
    for path in ("v2/health/ready", "v2/models/m/config", "v2/models/m/stats", "v2/models/m"):
        with urllib.request.urlopen(f"http://{server.http}/{path}", timeout=10) as response:
            assert response.status == 200


def test_the_key_opens_the_restricted_protocols(closed: tuple[Server, Path]) -> None:
    server, _ = closed
    with triton.InferenceServerClient(server.grpc) as client:
        headers = {f"triton-grpc-protocol-{KEY_HEADER}": server.key}
        assert client.get_model_repository_index(headers=headers).models[0].name == "m"
        assert client.get_system_shared_memory_status(headers=headers) is not None
    assert server.control(10).ready("m") == (1,)
    with pytest.raises(AccessDenied, match=r"restricted.*keeps the key for its own user"):
        Control(address=server.control_address, key="guess", timeout_s=10).index()


@pytest.mark.promise("The server's key is in no command line and no log")
def test_the_key_is_in_no_command_line_and_no_log(closed: tuple[Server, Path]) -> None:
    server, log = closed
    process = psutil.Process(server.process.pid)
    processes = [process, *process.children(recursive=True)]
    assert len(processes) > 1
    for started in processes:
        assert server.key not in " ".join(started.cmdline())
        assert server.key not in " ".join(started.environ().values())
    assert f"tbe-serving-key={'*' * len(server.key)}" in " ".join(process.cmdline())
    assert server.key not in log.read_text()
    assert server.warnings == (
        "tritonserver 2.51.0 lacks security fixes: allow access from this machine only, or run 2.68 (26.04) or later",
    )


# --- tbe-serve run


def test_run_refuses_other_addresses_without_tls(one_model: Path) -> None:
    done = refused_run(str(one_model), "--host", "0.0.0.0")
    assert done.returncode == 1
    assert "--host 0.0.0.0: others could listen in: expected --tls-cert and --tls-key, or --insecure" in done.stderr
    done = refused_run(str(one_model), "--tls-client-ca", "root.pem")
    assert done.returncode == 1
    assert "--tls-cert, --tls-key: expected both" in done.stderr


@pytest.mark.promise("The operations port listens on this machine alone unless the operator says where")
@pytest.mark.parametrize("opened", one_in(2, [False, True]))
def test_metrics_listen_on_loopback_unless_configured(one_model: Path, opened: bool) -> None:
    """127.0.0.2 stands for an address that others reach: who listens on 0.0.0.0 listens there, too."""
    with running(
        one_model, "--host", "0.0.0.0", "--insecure", *(("--operations-host", "0.0.0.0") if opened else ())
    ) as server:
        grpc_port, metrics_port = (int(address.rpartition(":")[2]) for address in (server.grpc, server.operations))
        assert listens("127.0.0.2", grpc_port)
        assert listens("127.0.0.1", metrics_port)
        assert listens("127.0.0.2", metrics_port) == opened


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_certificates(tmp_path_factory.mktemp("pems"), server="127.0.0.1", client="client.test")


@pytest.mark.promise("With mutual TLS a client without a certificate is refused")
def test_a_server_with_mutual_tls_is_looked_up_switched_and_recovered(tmp_path: Path, pems: Path) -> None:
    repository = tmp_path / "r"
    bundle = export_model(collection(SUM), repository, "m")
    tls = ("--tls-cert", str(pems / "server.pem"), "--tls-key", str(pems / "server.key"))
    trusted = Tls(
        root_certificates=pems / "root.pem", certificate_chain=pems / "client.pem", private_key=pems / "client.key"
    )
    as_client = (
        "--tls-ca", str(pems / "root.pem"), "--tls-cert", str(pems / "client.pem"), "--tls-key", str(pems / "client.key"),
    )  # fmt: skip
    with running(repository, *tls, "--tls-client-ca", str(pems / "root.pem")) as server:
        assert answers(server.grpc, trusted) == 1
        done = tbe_serve("health", "m", "--url", server.grpc, *as_client)
        assert (done.returncode, done.stdout) == (0, "m: version 1 answers\n"), done.stderr
        for options in ((), as_client[:2]):  # in the clear; without a certificate of its own
            done = tbe_serve("health", "m", "--url", server.grpc, "--timeout-s", "2", *options)
            assert done.returncode == 1
        for wrong in (None, Tls(root_certificates=pems / "root.pem")):
            with (
                LookupClient(server.grpc, "m", 5, tls=wrong, retries=Retries(attempts=1)) as client,
                pytest.raises(ServerUnavailable, match="or wants TLS, or another certificate of its caller"),
            ):
                client.lookup(ASKED)
        bench = ("bench", "m", "--url", server.grpc, "--bundle", str(bundle), "--clients", "1", "--samples", "2")
        done = tbe_serve(*bench, "--seconds", "0.3", "--repeats", "1", *as_client)
        assert done.returncode == 0, done.stderr
        export_model(collection(SUM), repository, "m")
        assert tbe_serve("load", "m", "--url", server.grpc).stdout == "m: version 1 → 2\n"
        for stub in stubs(server.triton, "m"):  # version 1's may not have ended yet
            stub.kill()
        with LookupClient(server.grpc, "m", 60, tls=trusted) as client:
            wait_for_answer(client)
            assert client.lookup(ASKED).version == 2
        run_file = find_run_file(server.grpc)
        assert run_file is not None
        server.process.terminate()
        assert server.process.stderr is not None
        said = server.process.stderr.read()
        assert "lacks security fixes" in said
        assert "serves again after" in said
        assert run_file.key not in said
    assert find_run_file(server.grpc) is None


# --- signed bundles

EVIL = """
from pathlib import Path
Path({mark!r}).touch()
from serving.backend import TritonPythonModel
"""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", folder / "key.pem"], check=True)
    subprocess.run(
        ["openssl", "pkey", "-in", folder / "key.pem", "-pubout", "-out", folder / "trusted.pem"], check=True
    )
    return folder


def publish_signed(repository: Path, key: Path) -> None:
    """By the command, as a user would."""
    options = ("--repository", str(repository), "--signing-key", str(key))
    done = tbe_export("model", "--model", "tests.support.models:summed", "--name", "m", *options)
    assert done.exit_code == 0, done.stderr


def test_only_signed_bundles_are_served_and_no_other_code_is_run(tmp_path: Path, keys: Path) -> None:
    repository, mark = tmp_path / "r", tmp_path / "somebody else's code ran"
    publish_signed(repository, keys / "key.pem")
    with running(repository, "--trusted-keys", str(keys / "trusted.pem")) as server:
        assert answers(server.grpc) == 1
        second = export_model(collection(SUM), repository, "m", signing_key=keys / "key.pem")
        assert tbe_serve("load", "m", "--url", server.grpc).stdout == "m: version 1 → 2\n"
        evil = export_model(collection(SUM), repository, "m")
        replace_model_py(evil, EVIL.format(mark=str(mark)))
        done = tbe_serve("load", "m", "--url", server.grpc)
        assert (done.returncode, done.stdout) == (1, "m: still serves version 2\n")
        assert "manifest.sig: cannot be read" in done.stderr
        assert not mark.exists()
        # Whoever has the key and asks Triton itself finds nothing there.
        run_file = find_run_file(server.grpc)
        assert run_file is not None
        unsigned = export_model(collection(SUM), repository, "m")
        with pytest.raises(ServingError):
            Control(address=run_file.control, key=run_file.key, timeout_s=60).load("m", (int(unsigned.name),))
        assert answers(server.grpc) == 2
    done = refused_run(str(repository), *FREE_PORTS, "--trusted-keys", str(keys / "trusted.pem"))
    assert done.returncode == 1
    assert f"{unsigned}/manifest.sig: cannot be read" in done.stderr
    assert not mark.exists()
    # A signature does not help who changes what was signed.
    manifest = second / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b"SUM", b"MEAN"))
    assert tbe_serve("configure", str(repository / "m"), "--version", "2").returncode == 0
    done = refused_run(str(repository), *FREE_PORTS, "--trusted-keys", str(keys / "trusted.pem"))
    assert done.returncode == 1
    assert "config.sig: expected a signature by a key of" in done.stderr
    again = tbe_serve("configure", str(repository / "m"), "--signing-key", str(keys / "key.pem"))
    assert again.returncode == 0
    done = refused_run(str(repository), *FREE_PORTS, "--trusted-keys", str(keys / "trusted.pem"))
    assert done.returncode == 1
    assert "manifest.sig: expected a signature by a key of" in done.stderr


# --- damaged bundles


@pytest.mark.promise("A damaged bundle is refused by name before it serves")
def test_a_flipped_bit_of_weights_is_refused_and_other_models_serve(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    export_model(collection(SUM), repository, "m")
    bundle = export_model(collection(SUM), repository, "m")
    content = bytearray((bundle / "weights.0.bin").read_bytes())
    content[100] ^= 1
    (bundle / "weights.0.bin").write_bytes(content)
    model = str(repository / "m")
    done = tbe_serve("run", str(repository), *FREE_PORTS)
    assert done.returncode == 1
    assert "weights.0.bin: expected SHA-256" in done.stderr
    assert "Traceback" not in done.stderr
    assert tbe_serve("configure", model, "--version", "1", "--instances", "2").returncode == 0
    with run_server(repository, FREE, log=tmp_path / "log") as server:
        done = tbe_serve("load", "m", "--version", "2", "--url", server.grpc)
        assert (done.returncode, done.stdout) == (1, "m: still serves version 1\n")
        assert "weights.0.bin: expected SHA-256" in done.stderr
        assert answers(server.grpc) == 1
        # Who would rather start at once takes what is there.
        assert tbe_serve("configure", model, "--version", "newest", "--no-verify-weights").returncode == 0
        assert tbe_serve("load", "m", "--url", server.grpc).stdout == "m: version 1 → 2\n"


def test_a_secret_is_not_in_an_error_of_grpc(closed: tuple[Server, Path]) -> None:
    server, _ = closed
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/inference.GRPCInferenceService/RepositoryIndex")(b"", timeout=10)
    assert "expecting header 'triton-grpc-protocol-tbe-serving-key'" in refused.value.details()
    assert server.key not in refused.value.details()
