"""What is set for a model is what the server does."""

import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

from serving.client import LookupClient, Retries
from serving.errors import InvalidRequest, ServerUnavailable
from serving.server import run_server
from tests.support.models import exported
from tests.support.servers import FREE, add_gate, gate_closed, metric, tbe_serve, until_answered, wait_for_execution


def test_the_server_enforces_the_limits_of_the_settings(tmp_path: Path) -> None:
    exported(tmp_path, max_request_ids=10, max_request_samples=4, max_call_ids=6, max_call_samples=3)
    with (
        run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server,
        LookupClient(server.grpc, "m", 30) as client,
    ):
        too_many_ids = r"ids: expected at most 10 in a request, got 11: .*--max-request-ids"
        too_many_samples = r"samples: expected at most 4 in a request, got 5"
        with pytest.raises(InvalidRequest, match=too_many_ids):
            client.lookup({"x": [list(range(11))]})
        with pytest.raises(InvalidRequest, match=too_many_samples):
            client.lookup({"x": [[]] * 5})
        assert metric(server, "tbe_rejected_total", model="m", reason="size") == 0  # our client sent neither
        with pytest.raises(triton.InferenceServerException, match=too_many_ids):
            send(server.grpc, list(range(11)), [11])
        with pytest.raises(triton.InferenceServerException, match=too_many_samples):
            send(server.grpc, [], [0] * 5)
        assert client.lookup({"x": [list(range(10))]})["x"].shape == (1, 8)  # more than a call takes: alone
        assert metric(server, "tbe_rejected_total", model="m", reason="size") == 2


def send(address: str, ids: list[int], lengths: list[int]) -> None:
    """A lookup of the key `x` by a client that knows no limits."""
    inputs = []
    for name, numbers, dtype in (("values", ids, np.int64), ("lengths", lengths, np.int32)):
        array = np.array([numbers], dtype)
        inputs.append(triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    with triton.InferenceServerClient(address) as client:
        client.infer("m", inputs, parameters={"features": "x"}, client_timeout=30)


def test_a_queue_has_no_limits_by_default(tmp_path: Path) -> None:
    """With any of them, Triton stalls idle models for up to 500 ms: docs/decisions/0009."""
    config = exported(tmp_path).parent / "config.pbtxt"
    assert "default_queue_policy" not in config.read_text()
    assert tbe_serve("configure", str(config.parent), "--queue-requests", "5").returncode == 0
    assert "default_queue_policy" in config.read_text()
    assert tbe_serve("configure", str(config.parent), "--queue-requests", "0").returncode == 0
    assert "default_queue_policy" not in config.read_text()


@pytest.mark.long
def test_requests_beyond_the_queue_limits_are_refused(tmp_path: Path) -> None:
    bundle = exported(tmp_path, queue_requests=3, queue_timeout_ms=1500)
    add_gate(bundle)
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        single_attempt = Retries(attempts=1)
        with LookupClient(server.grpc, "m", 60, retries=single_attempt) as client, ThreadPoolExecutor(8) as pool:
            until_answered(client.lookup, {"x": [[1]]})  # a busy machine may not connect in time
            with gate_closed(bundle):
                first = pool.submit(client.lookup, {"x": [[1]]})
                wait_for_execution(bundle)
                # One may be prepared beside the one that is answered; three wait; of eight, some find no room.
                lookups = [pool.submit(client.lookup, {"x": [[1]]}) for _ in range(7)]
                wait(lookups, return_when=FIRST_EXCEPTION)
                time.sleep(4)  # longer than those that wait may
            first.result()
            errors = [error for other in lookups if (error := other.exception()) is not None]
        assert {type(error) for error in errors} == {ServerUnavailable}
        full = [error for error in errors if "maximum queue size" in str(error)]
        late = [error for error in errors if "timeout expired" in str(error)]
        assert full
        assert late
        assert len(full) + len(late) == len(errors)
        # Triton counts those that waited too long, not those that found no room.
        assert metric(server, "nv_inference_request_failure", model="m", reason="REJECTED") == len(late)
