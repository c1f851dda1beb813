"""A model that does not serve just now, as clients see it: its words are real, and it is waited for."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from export import ExportConfig, export_model
from serving.client import AsyncLookupClient, LookupClient, Retries
from serving.errors import ModelNotFound, ModelUnavailable, ServerUnavailable, ServingError, SharedMemoryFull
from serving.model.config_file import read_config
from serving.server import run_server
from serving.triton.error_messages import error_of
from tests.support.models import SUM, collection
from tests.support.servers import FREE, at_once, running, stubs, tbe_serve

ONCE = Retries(attempts=1)
# Between two lookups of a client: the server has the same cores.
PAUSE_S = 0.01


@contextmanager
def looking_up(address: str) -> Iterator[list[ServingError]]:
    """Lookups by both clients until the block ends; the errors that they got until then."""
    errors: list[ServingError] = []
    over = threading.Event()

    def one() -> None:
        with LookupClient(address, "m", 60) as client:
            while not over.wait(PAUSE_S):
                try:
                    client.lookup({"x": [[1]]})
                except ServingError as error:
                    errors.append(error)

    async def other() -> None:
        async with AsyncLookupClient(address, "m", 60) as client:
            while not over.is_set():
                await asyncio.sleep(PAUSE_S)
                try:
                    await client.lookup({"x": [[1]]})
                except ServingError as error:
                    errors.append(error)

    threads = [threading.Thread(target=one), threading.Thread(target=lambda: asyncio.run(other()))]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.promise("Lookups wait within their deadline while their model is reloaded")
def test_lookups_wait_for_a_reloading_model(one_model: Path, tmp_path: Path) -> None:
    with (
        run_server(one_model, FREE, log=tmp_path / "log") as server,
        LookupClient(server.grpc, "m", 60, retries=ONCE) as impatient,
        looking_up(server.grpc) as errors,
    ):
        control = server.control(60)
        impatient.lookup({"x": [[1]]})
        control._call("v2/repository/models/m/unload", {})
        unloaded = r"'m' has no available versions: .* was unloaded, .*: try again, unless it was unloaded$"
        with pytest.raises(ModelUnavailable, match=unloaded) as caught:
            _until_refused(impatient)
        assert caught.value.retryable
        control.load("m")
        impatient.lookup({"x": [[1]]})
    assert errors == []


@pytest.mark.long
def test_a_version_that_keeps_serving_is_not_reported_as_unavailable(tmp_path: Path) -> None:
    """Triton loads it anew beside another, and names the first that it could not load."""
    for _ in range(2):
        export_model(collection(SUM), tmp_path / "r", "m", ExportConfig())
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log", pins={"m": (1,)}) as server:
        control = server.control(60)
        (tmp_path / "r" / "m" / "1" / "program.pt").write_bytes(b"no program")
        with pytest.raises(ServingError) as refused:
            control.load("m", (2, 1))
        assert control.ready("m") == (1,)
        (tmp_path / "r" / "m" / "2" / "program.pt").unlink()
        with pytest.raises(ServingError) as refused_too:
            control.load("m", (2,))
    assert ": version 1 cannot be reloaded, and continues to serve: /" in str(refused.value)
    assert ": version 2 cannot be loaded: /" in str(refused_too.value)


@pytest.mark.promise("Texts of other servers are escaped and truncated before they are shown or logged")
def test_server_messages_are_escaped_and_truncated() -> None:
    said = str(error_of("UNAVAILABLE", "\x1b[2J\r\n" + 10**6 * "x"))
    assert said.startswith("\\x1b[2J\\r\\nxxx")
    assert said.isprintable()
    assert len(said) == 1000


def _until_refused(client: LookupClient) -> None:
    """Look up until it fails: an unload goes on after it was asked for."""
    for _ in range(1000):
        client.lookup({"x": [[1]]})
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.promise("Lookups wait within their deadline while their model is reloaded")
def test_lookups_wait_for_a_model_whose_process_died(one_model: Path) -> None:
    with (
        running(one_model) as server,
        looking_up(server.grpc) as errors,
        LookupClient(server.grpc, "m", 60) as client,
    ):
        client.lookup({"x": [[1]]})
        for process in stubs(server.triton, "m"):
            process.kill()
        client.lookup({"x": [[1]]})
    assert errors == []


@pytest.mark.long
def test_a_model_whose_config_has_an_empty_parameter_is_served_as_before(one_model: Path, tmp_path: Path) -> None:
    """As they were published once; `configure` leaves it out."""
    model = copytree(one_model / "m", tmp_path / "r" / "m")
    with (model / "config.pbtxt").open("a") as file:
        file.write('parameters { key: "weighted" value { string_value: "" } }\n')
    with (
        run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server,
        LookupClient(server.grpc, "m", 60) as client,
    ):
        assert client.info().weighted == ()
        before = client.lookup({"x": [[1]]})["x"]
        assert server.control(60).load("m", (1,)) == (1,)  # its config goes through JSON
        np.testing.assert_array_equal(client.lookup({"x": [[1]]})["x"], before)
        assert server.control(60).load("m") == (1,)
    assert "weighted" in read_config(model).parameters
    assert tbe_serve("configure", str(model), "--merged-requests", "8").returncode == 0
    assert "weighted" not in read_config(model).parameters


NO_LISTENER = "UNKNOWN: ipv4:127.0.0.1:8003: Failed to connect to remote host: Connection refused"


@pytest.mark.parametrize("start", ["failed to connect to all addresses", "connections to all backends failing"])
def test_a_refused_connection_says_how_to_start_a_server(start: str) -> None:
    error = error_of("UNAVAILABLE", f"{start}; last error: {NO_LISTENER}")
    assert type(error) is ServerUnavailable
    assert str(error).endswith("no server listens there: check the address, or start one with `tbe-serve run`")


def test_a_refused_host_connection_says_nothing_about_the_callers_server() -> None:
    message = f"tables 'item': host 1 (movies-host-1 version 7 at 10.0.0.7:8001): {NO_LISTENER}"
    assert str(error_of("UNAVAILABLE", message)) == message


def test_a_missing_model_or_version_is_not_found(one_model: Path, tmp_path: Path) -> None:
    with run_server(one_model, FREE, log=tmp_path / "log") as server, grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for request in (pb.ModelConfigRequest(name="nobody"), pb.ModelConfigRequest(name="m", version="7")):
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelConfig(request, timeout=60)
            error = error_of(caught.value.code().name, caught.value.details())
            assert type(error) is ModelNotFound
            assert "is not found" in str(error)


@pytest.mark.promise("A full /dev/shm fails only requests that may be retried")
def test_lookups_without_memory_beside_a_huge_one_may_be_retried(one_model: Path, tmp_path: Path) -> None:
    ids = np.zeros(4_000_000, np.int64)  # 32 MB of ids
    huge = {"x": (ids, np.array([ids.size]))}
    with (
        run_server(one_model, FREE, log=tmp_path / "log", shm_bytes=16 << 20) as server,
        LookupClient(server.grpc, "m", 60, retries=ONCE) as client,
        LookupClient(server.grpc, "m", 60) as patient,
    ):
        right = client.lookup({"x": [[1]]})["x"]
        outcomes = at_once([lambda: client.lookup(huge)] * 4 + [lambda: patient.lookup({"x": [[1]]})] * 12)
        for outcome in outcomes[:4]:
            assert isinstance(outcome, SharedMemoryFull)
            assert outcome.retryable
            assert str(outcome).endswith("send less at once, or raise --shm-mib: try again")
        for outcome in outcomes[4:]:
            if not isinstance(outcome, SharedMemoryFull):  # it was tried thrice, each time beside a huge one
                np.testing.assert_array_equal(outcome["x"], right)
        np.testing.assert_array_equal(client.lookup({"x": [[1]]})["x"], right)
