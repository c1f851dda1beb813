"""Scores over gRPC: merged with others, and beside lookups and requests that are refused."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from export import export_model
from serving.client import LookupClient, Retries
from serving.errors import InternalError, InvalidRequest
from serving.server import Server, run_server
from tests.export.scores.test_in_place import WritesByModule
from tests.support.models import flat
from tests.support.scored_models import (
    EXACT,
    WIDTH,
    Centred,
    Relative,
    Surges,
    dlrm_dcn,
    own_scores,
    random_request,
    trained,
    two_tower,
)
from tests.support.servers import FREE, at_once, metric

MODELS: dict[str, nn.Module] = {}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("scores")
    torch.manual_seed(0)
    MODELS.update(
        dcn=trained(dlrm_dcn()), towers=trained(two_tower()), centred=Centred().eval(), writes=WritesByModule().eval()
    )
    MODELS.update(surges=Surges().eval(), relative=Relative().eval(), looks_up=LooksUp().eval())
    widths = {name: {"dense_features": WIDTH} for name in ("writes", "surges", "relative", "looks_up")}
    for name, module in MODELS.items():
        export_model(module, folder / "r", name, replace(EXACT, dense_widths=widths.get(name, {})))
    with run_server(folder / "r", FREE, log=folder / "log") as server:
        yield server


class LooksUp(Centred):
    """A dense input says which row of a small table is added: others than its 10 rows fail."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(10, 1)

    def forward(self, ids: KeyedJaggedTensor, dense_features: Tensor) -> Tensor:  # type: ignore[override]
        logits: Tensor = self.over(self.bags(ids).values()) + self.kinds(dense_features[:, 0].long())
        return logits


def request_for(name: str, seed: int, samples: int = 7) -> tuple[Any, Any, Any]:
    bags, dense = random_request(MODELS[name], np.random.default_rng(seed), samples)
    return bags, dense, own_scores(MODELS[name], bags, dense)


def assert_same(scores: Any, expected: Any) -> None:
    assert list(scores) == list(expected)
    for name, numbers in expected.items():
        assert scores[name].shape == numbers.shape
        np.testing.assert_allclose(scores[name], numbers, rtol=0, atol=1e-6 * max(1, np.abs(numbers).max()))


@pytest.mark.parametrize("name", ["surges", "relative"])
def test_requests_to_a_model_that_mixes_samples_get_their_own_scores(server: Server, name: str) -> None:
    """Dense inputs are of all sizes, and 16 clients ask at once, so that requests are merged."""
    scales = np.random.default_rng(0).choice([1e-3, 1.0, 1e3, 1e6], 16 * 4)
    requests = []
    for seed, scale in enumerate(scales.tolist()):
        bags, dense = random_request(MODELS[name], np.random.default_rng(seed), 3)
        dense = {key: (scale * (numbers - 0.5)).astype(np.float32) for key, numbers in dense.items()}
        requests.append((bags, dense, own_scores(MODELS[name], bags, dense)))
    with LookupClient(server.grpc, name, 30, retries=Retries(attempts=1)) as client:
        client.info()
        for _ in range(10):  # until some have waited for one another
            before = metric(server, "tbe_calls_total", model=name)
            answers = at_once([partial(client.score, bags, dense) for bags, dense, _ in requests])
            calls = metric(server, "tbe_calls_total", model=name) - before
            for answer, (_, _, expected) in zip(answers, requests, strict=True):
                assert_same(answer, expected)
            if calls < len(requests):
                break
        assert calls < len(requests)


def test_a_request_that_a_model_cannot_score_fails_alone(server: Server) -> None:
    requests = [request_for("looks_up", seed) for seed in range(32)]
    for _, dense, _ in requests[::8]:
        dense["dense_features"][3, 0] = 10
    with LookupClient(server.grpc, "looks_up", 30, retries=Retries(attempts=1)) as client:
        client.info()
        answers = at_once([partial(client.score, bags, dense) for bags, dense, _ in requests])
    for number, (answer, (_, _, expected)) in enumerate(zip(answers, requests, strict=True)):
        if number % 8:
            assert_same(answer, expected)
        else:
            assert isinstance(answer, InternalError)


@pytest.mark.parametrize("name", ["dcn", "towers", "centred"])
def test_64_requests_at_once_get_the_model_s_own_scores(server: Server, name: str) -> None:
    """Of other sizes each. Lookups of some features, requests that are refused, and inputs that are no numbers go
    among them.
    """
    sizes = np.random.default_rng(0).integers(1, 20, 64).tolist()
    requests = [request_for(name, seed, size) for seed, size in enumerate(sizes)]
    with LookupClient(server.grpc, name, 30, retries=Retries(attempts=1)) as client:
        lookups = [partial(client.lookup, dict(list(bags.items())[-1:])) for bags, _, _ in requests[:16]]
        bad = [
            partial(client.score, {key: [[-1]] for key in bags}, {key: numbers[:1] for key, numbers in dense.items()})
            for bags, dense, _ in requests[:8]
        ]
        nothing = [
            partial(client.score, bags, {key: np.full_like(numbers, np.nan) for key, numbers in dense.items()})
            for bags, dense, _ in requests[:8]
            if dense
        ]
        scores = [partial(client.score, bags, dense) for bags, dense, _ in requests]
        before = metric(server, "tbe_calls_total", model=name)
        answers = at_once([*scores, *lookups, *bad, *nothing])
        assert metric(server, "tbe_calls_total", model=name) - before < 88
        alone = [client.lookup(dict(list(bags.items())[-1:])) for bags, _, _ in requests[:16]]
    for answer, (_, _, expected) in zip(answers, requests, strict=False):
        assert_same(answer, expected)
    for answer, expected in zip(answers[64:], alone, strict=False):
        assert list(answer) == list(expected)
        for key, rows in expected.items():
            np.testing.assert_array_equal(answer[key], rows)
    assert [type(answer) for answer in answers[80:88]] == [InvalidRequest] * 8
    assert all(np.isnan(answer["scores"]).all() for answer in answers[88:])


DTYPES = {"int64": "INT64", "int32": "INT32", "float32": "FP32", "float64": "FP64"}


def infer(server: Server, name: str, arrays: dict[str, Any], outputs: list[str] | None, **parameters: str) -> Any:
    """By a client that shares nothing with ours."""
    inputs = []
    for key, array in arrays.items():
        inputs.append(triton.InferInput(key, [1, *array.shape], DTYPES[str(array.dtype)]))
        inputs[-1].set_data_from_numpy(array[np.newaxis])
    requested = None if outputs is None else [triton.InferRequestedOutput(output) for output in outputs]
    with triton.InferenceServerClient(server.grpc) as client:
        return client.infer(name, inputs, outputs=requested, parameters=parameters)


def test_a_kserve_client_gets_the_outputs_that_it_asks_for(server: Server) -> None:
    bags, dense, expected = request_for("dcn", 3)
    values, lengths = flat(bags)
    arrays = {"values": values, "lengths": lengths, **dense}
    features = ",".join(bags)
    only = infer(server, "dcn", arrays, ["scores"], features=features)
    assert [output.name for output in only.get_response().outputs] == ["scores"]
    assert only.as_numpy("scores").shape == (1, 7, 1)
    assert_same({"scores": only.as_numpy("scores")[0]}, expected)
    every = infer(server, "dcn", arrays, None, features=features)
    assert {output.name for output in every.get_response().outputs} == {"embeddings", "scores"}
    del arrays["dense_features"]
    looked_up = infer(server, "dcn", arrays, ["embeddings"], features=features)
    np.testing.assert_array_equal(looked_up.as_numpy("embeddings"), every.as_numpy("embeddings"))


def test_embeddings_beside_scores_are_those_of_the_tables(server: Server) -> None:
    """Though the model writes to what it takes."""
    bags, dense, expected = request_for("writes", 5)
    values, lengths = flat(bags)
    both = infer(server, "writes", {"values": values, "lengths": lengths, **dense}, None, features=",".join(bags))
    assert_same({"scores": both.as_numpy("scores")[0]}, expected)
    with LookupClient(server.grpc, "writes", 60) as client:
        rows = client.lookup({name: bags[name] for name in client.info().dims})
    np.testing.assert_array_equal(both.as_numpy("embeddings")[0], np.concatenate(list(rows.values()), axis=1))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dense_features": None}, r"'dense_features': expected float32 \[7, 13\], a row for each sample, got none"),
        ({"dense_features": np.zeros((6, 13), np.float32)}, r"a row for each sample, got float32 \[6, 13\]"),
        ({"dense_features": np.zeros((7, 12), np.float32)}, "dense_features"),
        ({"dense_features": np.zeros((7, 13))}, "dense_features"),
        ({"other": np.zeros((7, 13), np.float32)}, "other"),
        ({"values": None}, r"values: expected shape \[1, n\], got none"),
        ({"lengths": None}, r"lengths: expected shape \[1, n\], got none"),
    ],
    ids=["none", "samples", "width", "dtype", "another", "no ids", "no lengths"],
)
def test_dense_inputs_that_are_wrong_are_refused_by_name(server: Server, change: dict[str, Any], why: str) -> None:
    bags, dense, expected = request_for("dcn", 3)
    values, lengths = flat(bags)
    arrays = {"values": values, "lengths": lengths, **dense} | change
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(triton.InferenceServerException, match=why):
        infer(server, "dcn", arrays, ["scores"], features=",".join(bags))
    with LookupClient(server.grpc, "dcn", 60) as client:
        assert_same(client.score(bags, dense), expected)


def test_scores_need_all_features(server: Server) -> None:
    bags, dense, _ = request_for("dcn", 3)
    del bags["f2"]
    with (
        LookupClient(server.grpc, "dcn", 60) as client,
        pytest.raises(InvalidRequest, match=r"feature 'f2': expected all"),
    ):
        client.score(bags, dense)


def test_outputs_are_answered_in_the_requested_order(server: Server) -> None:
    bags, dense, expected = request_for("towers", 4)
    with LookupClient(server.grpc, "towers", 60) as client:
        assert client.info().scores == {"match": (), "queries": (8,)}
        scores = client.score(bags, dense, outputs=["queries", "match"])
        assert list(scores) == ["queries", "match"]
        assert_same(scores, {name: expected[name] for name in scores})
        assert_same(client.score(bags, dense, outputs=["match"]), {"match": expected["match"]})
        with pytest.raises(InvalidRequest, match=r"output 'scores': expected one of 'match', 'queries'"):
            client.score(bags, dense, outputs=["scores"])
        assert not client.score({key: [] for key in bags})["match"].size
