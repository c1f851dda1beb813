"""What a real tritonserver refuses: the caller is told why, and nobody else notices."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from export import export_model
from serving.client import LookupClient
from serving.errors import (
    ConfigurationError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    ServerUnavailable,
)
from serving.server import Server, run_server
from tests.support.models import MIXED, SUM, collection, random_bags
from tests.support.servers import FREE, at_once, gate_closed, lens, metric, raw_request, replace_model_py, row

BAD = {
    "id = rows": (row(0, 20), lens(1, 1), "genres", r"feature 'genres': expected an id in \[0, 20\), got 20 for sample 1"),
    "id = -1": (row(-1), lens(1), "user_id", r"feature 'user_id': .* got -1"),
    "id past int32": (row(2**32 + 5), lens(1), "user_id", r"feature 'user_id': .* got 4294967301"),
    "lengths that sum to less": (row(1, 2, 3), lens(1, 1), "user_id,genres", r"feature 'genres': .* got 3 ids for lengths that sum to 2"),
    "lengths that sum to more": (row(1), lens(1, 1), "user_id,genres", r"feature 'genres': expected its bags to take ids \[1, 2\)"),
    "negative length": (row(1), lens(2, -1), "user_id,genres", "feature 'genres': expected lengths >= 0, got -1 for sample 0"),
    "huge lengths": (row(1), lens(2**31 - 1, 2**31 - 1), "user_id,genres", "feature 'user_id': .* got 1 ids for lengths that sum to 4294967294"),
    "unknown feature": (row(1), lens(1), "no_such", "feature 'no_such': expected one of 'user_id'"),
    "feature twice": (row(1, 1), lens(1, 1), "genres,genres", "feature 'genres': expected each feature once, got it twice"),
    "empty features": (row(1), lens(1), "", "features: expected at least one of 'user_id'"),
    "features no text": (row(1), lens(1), 7, "parameter features: expected comma-separated names, got 7"),
    "lengths not divisible": (row(1), lens(1, 0, 0), "user_id,genres", r"lengths: expected a multiple of 2, .*\('user_id', 'genres'\), got 3"),
    "values of wrong dtype": (row(1, dtype=np.int32), lens(1), "user_id", "'values' data-type is 'INT32', but model 'mixed' expects 'INT64'"),
    "lengths of wrong dtype": (row(1), row(1), "user_id", "'lengths' data-type is 'INT64', but model 'mixed' expects 'INT32'"),
    "two rows": (np.ones((2, 1), np.int64), np.ones((2, 1), np.int32), "user_id", r"values: expected shape \[1, n\], got \[2, 1\]"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_request_is_refused_and_its_63_neighbours_are_answered(
    server: Server, client: LookupClient, bad: tuple[Any, Any, Any, str]
) -> None:
    values, lengths, features, message = bad
    request = random_bags(np.random.default_rng(6), MIXED, 3, ["user_id", "words"])
    alone = client.lookup(request)
    calls: list[Callable[[], Any]] = [lambda: client.lookup(request)] * 63
    calls.insert(30, lambda: raw_request(server, values, lengths, features))
    answers = at_once(calls)
    refusal = answers.pop(30)
    assert isinstance(refusal, triton.InferenceServerException)
    assert refusal.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(triton.InferenceServerException, match=message):
        raise refusal
    assert "Traceback" not in refusal.message()
    for answer in answers:
        for name in alone:
            np.testing.assert_array_equal(answer[name], alone[name])


def test_bad_requests_and_ids_left_out_are_counted(server: Server, client: LookupClient) -> None:
    rejected = metric(server, "tbe_rejected_total", model="mixed")
    dropped = metric(server, "tbe_ids_outside_total", model="mixed", table="word")
    ids = metric(server, "tbe_ids_total", model="mixed")
    samples = metric(server, "tbe_samples_total", model="mixed")
    with pytest.raises(InvalidRequest, match="feature 'genres'"):
        client.lookup({"genres": [[20]]})
    answer = client.lookup({"words": [[1, 1000, 2, -1], [3]]})
    assert metric(server, "tbe_rejected_total", model="mixed") == rejected + 1
    assert metric(server, "tbe_ids_outside_total", model="mixed", table="word") == dropped + 2
    assert metric(server, "tbe_ids_total", model="mixed") == ids + 3
    assert metric(server, "tbe_samples_total", model="mixed") == samples + 2
    np.testing.assert_array_equal(answer["words"], client.lookup({"words": [[1, 2], [3]]})["words"])


def test_errors_of_the_client_are_typed(server: Server, client: LookupClient, gated: Path) -> None:
    with pytest.raises(InvalidRequest, match="feature 'nobody': expected one of 'user_id'"):
        client.lookup({"nobody": [[1]]})
    with LookupClient(server.grpc, "nobody", 30) as other, pytest.raises(ModelNotFound, match="model 'nobody'"):
        other.lookup({"genres": [[1]]})
    with (
        LookupClient("127.0.0.1:1", "mixed", 60) as nowhere,
        pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1"),
    ):
        nowhere.lookup({"genres": [[1]]})
    with gate_closed(gated), pytest.raises(DeadlineExceeded):
        LookupClient(server.grpc, "gated").lookup({"genres": [[1]]}, timeout_s=0.5)
    with (
        LookupClient(server.grpc, "weighted", 30) as weighted,
        pytest.raises(InvalidRequest, match="feature 'x': expected a weight for each id"),
    ):
        weighted.lookup({"x": [[1]]})
    with pytest.raises(ConfigurationError, match="timeout_s: expected > 0 and at most 1000000, got 0"):
        LookupClient(server.grpc, "mixed", timeout_s=0)


BROKEN = """
from serving.backend import TritonPythonModel, triton as backend
from serving.lookup.local_ranks import LocalRanks

decode, answer = backend._decode, LocalRanks.answer

def broken_decode(request):
    tensors = decode(request)
    if 13 in tensors.values:
        raise ValueError("secret of decoding")
    return tensors

def broken_answer(self, batches):
    if any(14 in batch.values for batch in batches):
        raise ValueError("secret of looking up")
    return answer(self, batches)

backend._decode, LocalRanks.answer = broken_decode, broken_answer
"""


def test_unexpected_errors_are_logged_and_not_sent_to_clients(tmp_path: Path) -> None:
    bundle = export_model(collection(SUM), tmp_path / "r", "m")
    replace_model_py(bundle, BROKEN)
    with (
        run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server,
        LookupClient(server.grpc, "m", timeout_s=30) as client,
    ):
        good = client.lookup({"x": [[1]]})["x"]
        answers = at_once([partial(client.lookup, {"x": [[id_]]}) for id_ in [1, 1, 13, 1, 1]])
        assert isinstance(answers.pop(2), InternalError)
        for answer in answers:
            np.testing.assert_array_equal(answer["x"], good)
        for id_ in (13, 14):
            with pytest.raises(InternalError, match=r"m': lookup failed: the server's log says why$"):
                client.lookup({"x": [[id_]]})
        np.testing.assert_array_equal(client.lookup({"x": [[1]]})["x"], good)
    log = (tmp_path / "log").read_text()
    assert "secret of decoding" in log
    assert "secret of looking up" in log


def test_a_model_of_another_backend_is_no_lookup_model(tmp_path: Path) -> None:
    bundle = export_model(collection(SUM), tmp_path / "r", "m")
    config = bundle.parent / "config.pbtxt"
    config.write_text(config.read_text().partition("parameters {")[0] + 'backend: "python"\n')
    with (
        run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server,
        LookupClient(server.grpc, "m", 30) as client,
        pytest.raises(InternalError, match="was not made by tbe-export"),
    ):
        client.lookup({"x": [[1]]})
