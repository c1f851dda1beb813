"""Dense inputs of every dtype and shape: in this process, from a server by both clients, JSON lines, and replayed."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export import export_model
from serving.bench.requests import Distribution, random_requests
from serving.bundle.load import open_bundle
from serving.bundle.scores import DenseInput, InputDtype
from serving.client import AsyncLookupClient, LookupClient
from serving.engine import Engine
from serving.errors import InvalidRequest
from serving.model.settings import ServingSettings
from serving.requests.captured import read_captured
from serving.requests.types import Tensors
from tests.support.commands import tbe_export
from tests.support.handwritten_dense_part import with_dense_part
from tests.support.host_faults import until
from tests.support.models import SUM, collection, flat, random_bags
from tests.support.sequence_models import FP32, kjt_of
from tests.support.servers import Running, at_once, running, tbe_serve

INPUTS = (
    DenseInput("batch.price", (2, 3)),
    DenseInput("relation", (), InputDtype.INT64),
    DenseInput("day", (1,), InputDtype.INT32),
    DenseInput("new", (2,), InputDtype.BOOL),
    DenseInput("year", (), InputDtype.INT16),
    DenseInput("zone", (), InputDtype.INT8),
    DenseInput("stars", (), InputDtype.UINT8),
)
OUTPUTS = {"like": (), "relation": (2,), "all": (3, 2)}


class Program(nn.Module):
    """Each input is seen in the answer, integers exactly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_relation = nn.Embedding(50, 28)

    def forward(
        self,
        embeddings: Tensor,
        price: Tensor,
        relation: Tensor,
        day: Tensor,
        new: Tensor,
        year: Tensor,
        zone: Tensor,
        stars: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        like = (embeddings.float() * self.of_relation(relation % 50)).sum(1) + day.view(-1).float()
        like = like + year.float() + zone.float() + stars.float()
        halves = torch.stack([(relation >> 24).float(), (relation & 0xFFFFFF).float()], dim=1)
        every = price.transpose(1, 2) * torch.where(new, 1.0, -1.0).unsqueeze(1)
        return torch.where(new[:, 0], like, -like), halves, every


@dataclass(frozen=True)
class Served:
    server: Running
    bundle: Path
    captured: Path


MODULE = collection(SUM)
PROGRAM = Program()


def expected(ids: Any, dense: Any) -> dict[str, Any]:
    """What the program answers to what the collection itself answers."""
    with torch.no_grad():
        pooled = MODULE(kjt_of(ids)).to_dict()
        embeddings = torch.cat([pooled[name] for name in ids], dim=1)
        outputs = PROGRAM(embeddings, *(torch.from_numpy(dense[dense_input.name]) for dense_input in INPUTS))
    return {name: tensor.numpy() for name, tensor in zip(OUTPUTS, outputs, strict=True)}


def request(seed: int, samples: int) -> tuple[dict[str, Any], dict[str, Any]]:
    random = np.random.default_rng(seed)
    return random_bags(random, SUM, samples), {
        "batch.price": random.random((samples, 2, 3), np.float32),
        "relation": random.integers(0, 2**40, samples),
        "day": random.integers(-5, 5, (samples, 1), np.int32),
        "new": random.random((samples, 2)) < 0.5,
        "year": random.integers(-(2**15), 2**15, samples, np.int16),
        "zone": random.integers(-128, 128, samples, np.int8),
        "stars": random.integers(0, 256, samples, np.uint8),
    }


def assert_right(answer: Any, ids: Any, dense: Any) -> None:
    for name, numbers in expected(ids, dense).items():
        np.testing.assert_allclose(answer[name], numbers, rtol=1e-5, atol=1e-5, err_msg=name)
    halves = answer["relation"].astype(np.int64)
    np.testing.assert_array_equal((halves[:, 0] << 24) + halves[:, 1], dense["relation"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "captured").mkdir()
    serving = ServingSettings(capture=str(folder / "captured"), capture_slow_ms=1e-6)
    bundle = export_model(MODULE, folder / "r", "m", replace(FP32, serving=serving))
    with_dense_part(bundle, PROGRAM, INPUTS, OUTPUTS)
    with running(folder / "r") as server:
        yield Served(server, bundle, folder / "captured" / "m.jsonl")


def test_an_engine_accepts_dense_inputs_of_every_dtype(served: Served) -> None:
    engine = Engine.open(served.bundle)
    for samples in (0, 1, 7):
        ids, dense = request(samples, samples)
        if samples:
            assert_right(engine.score(ids, dense), ids, dense)
        else:
            scores = engine.score(ids, dense)
            assert {name: value.shape for name, value in scores.items()} == {
                "like": (0,),
                "relation": (0, 2),
                "all": (0, 3, 2),
            }
    ids, dense = request(3, 5)
    listed = {name: numbers.tolist() for name, numbers in dense.items()}
    tensors = {name: torch.from_numpy(numbers) for name, numbers in dense.items()}
    for other in (listed, tensors):
        for name, numbers in engine.score(ids, other).items():
            np.testing.assert_array_equal(numbers, engine.score(ids, dense)[name])


def test_a_shared_input_counts_for_all_samples(served: Served) -> None:
    engine = Engine.open(served.bundle)
    ids, dense = request(4, 6)
    shared = {name: numbers[:1] for name, numbers in dense.items()}
    repeated = {name: np.repeat(numbers, 6, axis=0) for name, numbers in shared.items()}
    for name, numbers in engine.score(ids, shared, shared=list(shared)).items():
        np.testing.assert_array_equal(numbers, engine.score(ids, repeated)[name])


def test_both_clients_send_dense_inputs_of_every_dtype(served: Served) -> None:
    with LookupClient(served.server.grpc, "m", 60) as client:
        assert client.info().dense == INPUTS
        requests = [request(seed, seed % 5 + 1) for seed in range(40)]
        answers = at_once([lambda request=request: client.score(*request) for request in requests])  # type: ignore[misc]
        for (ids, dense), answer in zip(requests, answers, strict=True):
            assert_right(answer, ids, dense)
        ids, dense = request(50, 3)
        shared = {**dense, "relation": [2**40 + 1], "new": [[True, False]]}
        scores = client.score(ids, shared, shared=["relation", "new"])
        assert_right(scores, ids, {**dense, "relation": np.full(3, 2**40 + 1), "new": np.array([[True, False]] * 3)})

    async def run() -> None:
        async with AsyncLookupClient(served.server.grpc, "m", 60) as client:
            for (ids, dense), answer in zip(
                requests, await asyncio.gather(*(client.score(*request) for request in requests)), strict=True
            ):
                assert_right(answer, ids, dense)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"relation": [0.5, 1]}, "dense input 'relation': expected integers, which travel as INT64, got float64"),
        ({"day": [[1], [2**31]]}, "dense input 'day': expected integers that fit INT32, got 2147483648"),
        ({"zone": [1, 300]}, "dense input 'zone': expected integers that fit INT8, got 300"),
        ({"stars": [1, -1]}, "dense input 'stars': expected integers that fit UINT8, got -1"),
        ({"new": [[0, 1], [1, 0]]}, "dense input 'new': expected booleans, which travel as BOOL, got int64"),
        ({"relation": [[1, 2], [2, 3]]}, r"dense input 'relation': expected int64 \[2\], a row for each sample, got int64 \[2, 2\]"),
        ({"batch.price": np.ones((2, 6), np.float32)}, r"'batch.price': expected float32 \[2, 2, 3\], .* got float32 \[2, 6\]"),
        ({"price": 1}, "dense input 'price': expected one of 'batch.price', 'relation', 'day', 'new', 'year', 'zone', 'stars'"),
    ],
)  # fmt: skip
def test_invalid_dense_inputs_are_refused_by_name(served: Served, change: dict[str, Any], why: str) -> None:
    ids, dense = request(0, 2)
    engine = Engine.open(served.bundle)
    with LookupClient(served.server.grpc, "m", 60) as client:
        for score in (client.score, engine.score):
            with pytest.raises(InvalidRequest, match=why):
                score(ids, {**dense, **change})


def test_json_lines_have_dense_inputs(served: Served) -> None:
    ids, dense = request(9, 2)
    line = json.dumps({"features": ids, "dense": {name: numbers.tolist() for name, numbers in dense.items()}})
    wrong = json.dumps({"features": ids, "dense": {**json.loads(line)["dense"], "relation": [1.0, 2.0]}})
    answered = tbe_serve("score", "m", "--url", served.server.grpc, stdin=f"{line}\n{wrong}\n")
    assert answered.returncode == 1
    assert "line 2: dense input 'relation': expected integers, which travel as INT64, got float64" in answered.stderr
    assert_right({name: np.array(value) for name, value in json.loads(answered.stdout).items()}, ids, dense)
    single = json.dumps({"features": ids, "dense": {**json.loads(line)["dense"], "relation": [2**40 + 1]}})
    answered = tbe_serve("score", "m", "--shared", "relation", "--url", served.server.grpc, stdin=single)
    scores = {name: np.array(value) for name, value in json.loads(answered.stdout).items()}
    assert_right(scores, ids, {**dense, "relation": np.full(2, 2**40 + 1)})


def test_captured_requests_keep_dense_inputs(served: Served) -> None:
    ids, dense = request(77, 4)
    with LookupClient(served.server.grpc, "m", 60) as client:
        client.score(ids, dense)
    values, _ = flat(ids)

    def captured() -> list[Tensors]:
        return [captured.tensors for captured in read_captured(served.captured) if captured.values == values.tolist()]

    until(lambda: bool(captured()), "the request is captured")
    (record,) = captured()
    for name, numbers in dense.items():
        assert record.dense[name].dtype == numbers.dtype
        np.testing.assert_array_equal(record.dense[name], numbers)
    np.testing.assert_array_equal(Engine.open(served.bundle).outputs(record)["like"], expected(ids, dense)["like"])


def test_inspect_shows_their_dtypes_and_shapes(served: Served) -> None:
    shown = tbe_export("inspect", str(served.bundle)).stdout
    assert (
        "takes embeddings, batch.price [B, 2, 3], relation INT64 [B], day INT32 [B, 1], new BOOL [B, 2], year INT16 [B]"
        in shown
    )


@pytest.mark.long
def test_bench_makes_and_checks_requests_with_dense_inputs(served: Served) -> None:
    bundle = open_bundle(served.bundle)
    (first, *_) = random_requests(
        bundle.manifest, 4, Distribution(), dict.fromkeys(bundle.manifest.keys, 2.0), scores=True
    )
    assert {name: (value.dtype, value.shape) for name, value in first.dense.items()} == {
        dense_input.name: (dense_input.dtype.numpy, (4, *dense_input.shape)) for dense_input in INPUTS
    }
    options = ("--bundle", str(served.bundle), "--scores", "--clients", "2", "--seconds", "0.4", "--repeats", "1")
    answered = tbe_serve("bench", "m", "--url", served.server.grpc, *options, "--warm-up", "0", "--check", "1")
    assert answered.returncode == 0, answered.stderr
    assert "all right" in answered.stdout
