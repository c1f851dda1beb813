"""Scores of every dtype, exact: in this process, through a router, by both clients, KServe's HTTP, JSON lines, merged,
and as `bench --check` compares them.
"""

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from export import Sharding, export_model
from serving.bundle.load import open_bundle
from serving.client import AsyncLookupClient, LookupClient
from serving.engine import Engine
from serving.requests.accept import accept
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode
from tests.support.bundle_reader import Reader
from tests.support.commands import tbe_export
from tests.support.hosts import MODEL, fleet
from tests.support.models import Spec, collection, flat
from tests.support.scored_models import EXACT
from tests.support.servers import Running, at_once, metric, running, tbe_serve

KEY = "film"
POOLED = (Spec("films", 20, 8, "SUM", (KEY,)),)
DTYPES = {
    "score": "float32", "half": "float32", "seconds": "float64", "name": "int64", "best": "int64", "day": "int32",
    "year": "int16", "zone": "int8", "stars": "uint8", "is_new": "bool", "both": "bool",
}  # fmt: skip


class Answers(nn.Module):
    """Integers that FP32 has not, and every other dtype; what a model reads off a buffer, or hands on in part."""

    names: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(POOLED)
        self.register_buffer("names", torch.arange(64) * 3 + 2**53 + 1)

    def forward(self, ids: KeyedJaggedTensor, sent: Tensor) -> dict[str, Tensor]:
        pooled = self.bags(ids).values()
        best = pooled.argmax(dim=1)
        return {
            "score": pooled.sum(dim=1),
            "half": pooled[:, :2].half(),
            "seconds": sent[:, 0].double() + 0.5,
            "name": self.names[best],
            "best": best,
            "day": sent[:, 0].int(),
            "year": sent[:, 1].to(torch.int16).unsqueeze(1),
            "zone": (sent[:, 1] % 100).to(torch.int8),
            "stars": (sent % 256).to(torch.uint8),
            "is_new": sent[:, 0] > 1_700_000_000,
            "both": pooled[:, :2] > 0,
        }


def call(seed: int, samples: int) -> tuple[dict[str, list[list[int]]], dict[str, Any]]:
    random = np.random.default_rng(seed)
    bags = {KEY: [random.integers(0, 20, count).tolist() for count in random.integers(0, 4, samples)]}
    days = random.integers(1_699_999_900, 1_700_000_100, samples)
    return bags, {"sent": np.stack([days, random.integers(0, 3_000, samples)], axis=1)}


def keyed(bags: dict[str, list[list[int]]]) -> KeyedJaggedTensor:
    values, lengths = flat(bags)
    return KeyedJaggedTensor([KEY], torch.from_numpy(values), lengths=torch.from_numpy(lengths))


def assert_exact(module: nn.Module, answer: Any, bags: dict[str, list[list[int]]], dense: dict[str, Any]) -> None:
    with torch.no_grad():
        expected = module(keyed(bags), torch.from_numpy(dense["sent"]))
    assert list(answer) == list(DTYPES)
    for name, numbers in expected.items():
        assert answer[name].dtype == DTYPES[name], name
        if numbers.is_floating_point() and name != "seconds":
            np.testing.assert_allclose(answer[name], numbers.float().numpy(), rtol=1e-3 if name == "half" else 1e-6)
        else:
            np.testing.assert_array_equal(answer[name], numbers.numpy(), err_msg=name)


def example() -> tuple[KeyedJaggedTensor, Tensor]:
    bags, dense = call(0, 5)
    return keyed(bags), torch.from_numpy(dense["sent"])


@dataclass(frozen=True)
class Served:
    server: Running
    bundle: Path


MODULE = Answers().eval()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    bundle = export_model(MODULE, folder / "r", "m", EXACT, example=example())
    with running(folder / "r", "--http") as server:
        yield Served(server, bundle)


def test_an_engine_answers_each_dtype_alone_merged_and_for_no_sample(served: Served) -> None:
    with Engine.open(served.bundle) as engine:
        part = engine.bundle.manifest.dense_part
        assert part is not None
        calls = [call(seed, samples) for seed, samples in enumerate((1, 2, 7, 70))]
        for bags, dense in calls:
            assert_exact(MODULE, engine.score(bags, dense), bags, dense)
        requests = [
            replace(encode(bags), outputs=list(DTYPES), dense=encode_dense(part.inputs, dense))
            for bags, dense in calls
        ]
        merged = engine.answer([accept(engine.schema, request) for request in requests]).outcomes()
        for (bags, dense), outputs in zip(calls, merged, strict=True):
            assert_exact(MODULE, outputs, bags, dense)
        bags, dense = call(0, 0)
        assert {name: str(value.dtype) for name, value in engine.score(bags, dense).items()} == DTYPES
        sent = call(5, 3)
        answer = engine.score(*sent)
        sent[1]["sent"][:] = 0
        assert_exact(MODULE, answer, *call(5, 3))  # it shares no memory with the request


def test_both_clients_and_json_lines_get_each_output_dtype(served: Served) -> None:
    requests = [call(seed, seed % 5 + 1) for seed in range(20)]
    with LookupClient(served.server.grpc, "m", 60) as client:
        assert {name: str(dtype) for name, dtype in client.info().score_dtypes.items()} == DTYPES
        answers = at_once([lambda request=request: client.score(*request) for request in requests])  # type: ignore[misc]
    for request, answer in zip(requests, answers, strict=True):
        assert_exact(MODULE, answer, *request)

    async def run() -> None:
        async with AsyncLookupClient(served.server.grpc, "m", 60) as client:
            for request, answer in zip(
                requests, await asyncio.gather(*(client.score(*one) for one in requests)), strict=True
            ):
                assert_exact(MODULE, answer, *request)

    asyncio.run(run())
    bags, dense = requests[4]
    line = json.dumps({"features": bags, "dense": {"sent": dense["sent"].tolist()}})
    printed = tbe_serve("score", "m", "--url", served.server.grpc, stdin=line)
    assert printed.returncode == 0, printed.stderr
    report = json.loads(printed.stdout)
    assert '"is_new": [true' in printed.stdout or '"is_new": [false' in printed.stdout
    assert all(type(number) is int for number in report["name"])
    assert_exact(MODULE, {name: np.array(value, DTYPES[name]) for name, value in report.items()}, bags, dense)
    table = tbe_serve("score", "m", "--table", "--url", served.server.grpc, stdin=line)
    assert table.returncode == 0, table.stderr


def test_any_client_of_the_protocol_gets_each_output_dtype(served: Served) -> None:
    bags, dense = call(3, 4)
    values, lengths = flat(bags)
    inputs = (
        ("values", "INT64", values[None]),
        ("lengths", "INT32", lengths[None]),
        ("sent", "INT64", dense["sent"][None]),
    )
    body = {
        "inputs": [
            {"name": name, "datatype": dtype, "shape": array.shape, "data": array.ravel().tolist()}
            for name, dtype, array in inputs
        ],
        "outputs": [{"name": name} for name in DTYPES],
    }
    url = f"http://{served.server.http}/v2/models/m/infer"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=60) as response:
        outputs = json.load(response)["outputs"]
    arrays = {
        output["name"]: np.array(output["data"], DTYPES[output["name"]]).reshape(output["shape"][1:])
        for output in outputs
    }
    assert_exact(MODULE, {name: arrays[name] for name in DTYPES}, bags, dense)
    said = {"float32": "FP32", "float64": "FP64", "bool": "BOOL"}
    assert {output["name"]: output["datatype"] for output in outputs} == {
        name: said.get(dtype, dtype.upper()) for name, dtype in DTYPES.items()
    }


@pytest.mark.long
def test_bench_and_inspect_support_each_output_dtype(served: Served) -> None:
    options = ("--bundle", str(served.bundle), "--scores", "--clients", "1", "--seconds", "0.2", "--repeats", "1")
    answered = tbe_serve("bench", "m", "--url", served.server.grpc, *options, "--warm-up", "0", "--check", "1")
    assert answered.returncode == 0, answered.stderr
    assert "all right" in answered.stdout
    shown = tbe_export("inspect", str(served.bundle)).stdout
    assert Reader(served.bundle).digest("schema_digest") in (served.bundle.parent / "config.pbtxt").read_text()
    assert re.search(r"name .* INT64 \[B\] ", shown)


@pytest.mark.long
def test_a_router_answers_each_output_dtype(tmp_path: Path) -> None:
    config = replace(EXACT, sharding=Sharding(ranks=2, ranks_per_host=1, types={"*": "row_wise"}))
    config = replace(config, sharding=replace(config.sharding, hosts_as_models=True))
    router = export_model(MODULE, tmp_path / "r", MODEL, config, example=example())
    with fleet(tmp_path, router) as served, LookupClient(served.router.grpc, MODEL, 20) as client:
        bags, dense = call(3, 4)
        assert_exact(MODULE, client.score(bags, dense), bags, dense)


def test_the_scale_of_each_score_is_a_metric(served: Served) -> None:
    """docs/protocol.md promises merged scores to 10⁻⁵ of it."""
    part = open_bundle(served.bundle).manifest.dense_part
    assert part is not None
    for output in part.outputs:
        scale = metric(served.server, "tbe_score_scale", output=output.name, version="1")
        assert scale == pytest.approx(output.parity.scale)
