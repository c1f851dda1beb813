"""The user side once, from a server: by both clients, any other, JSON lines, and merged."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from torchrec import KeyedJaggedTensor

from export import export_model
from serving.client import AsyncLookupClient, LookupClient, Retries
from serving.errors import InternalError
from serving.model.config_file import read_config, write_config
from serving.server import Server, run_server
from tests.serving.test_once import FP32
from tests.support.long_cases import one_in
from tests.support.models import Bags, flat, random_bags
from tests.support.scored_models import EXACT, Centred, dlrm_dcn, own_scores, random_request, trained
from tests.support.sequence_models import POOLED, ROWS, Mixed
from tests.support.servers import FREE, at_once, tbe_serve
from tests.support.shared import assert_scores, pairs, repeated


@pytest.fixture(scope="module")
def modules() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"m": Mixed(), "dcn": trained(dlrm_dcn()), "centred": Centred().eval()}


@pytest.fixture(scope="module")
def server(modules: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("once")
    for name, module in modules.items():
        export_model(module, folder / "r", name, FP32 if name == "m" else EXACT)
    with run_server(folder / "r", FREE, log=folder / "log") as server:
        yield server


def test_a_client_that_shares_nothing_with_ours(server: Server, modules: Any) -> None:
    bags: dict[str, Bags] = {"user_id": [[1, 2]], "genres": [[3], [], [4, 5]], "recent": [[6, 7]]}
    values, lengths = flat(bags)
    inputs = []
    for name, kind, array in (("values", "INT64", values), ("lengths", "INT32", lengths)):
        inputs.append(triton.InferInput(name, [1, array.size], kind))
        inputs[-1].set_data_from_numpy(array[np.newaxis])
    parameters = {"features": "user_id,genres,recent", "once": "user_id,recent"}
    with triton.InferenceServerClient(server.grpc) as client:
        outputs = {
            output["name"]: output["dims"]
            for output in client.get_model_config("m", as_json=True)["config"]["output"]
        }
        assert outputs == {"embeddings": ["-1", "-1"], "sequences": ["-1"], "once": ["-1", "-1"]}
        response = client.infer("m", inputs, parameters=parameters)
        only = client.infer("m", inputs, parameters=parameters, outputs=[triton.InferRequestedOutput("once")])
        with pytest.raises(triton.InferenceServerException, match="expected 3 for the keys that come once"):
            client.infer("m", inputs, parameters={**parameters, "once": parameters["features"]})
        with pytest.raises(triton.InferenceServerException, match="parameter once: expected comma-separated names"):
            client.infer("m", inputs, parameters={**parameters, "once": 1})
    users, genres = (modules["m"].pooled.embedding_bags[name].weight.detach().numpy() for name in ("user", "genre"))
    items = modules["m"].rows.embeddings["item"].weight.detach().numpy()
    np.testing.assert_allclose(response.as_numpy("once"), [[users[1] + users[2]]], rtol=1e-6)
    np.testing.assert_array_equal(only.as_numpy("once"), response.as_numpy("once"))
    assert [output.name for output in only.get_response().outputs] == ["once"]
    sums = [genres[3], np.zeros(8), (genres[4] + genres[5]) / 2]
    np.testing.assert_allclose(response.as_numpy("embeddings"), [sums], rtol=1e-6)
    np.testing.assert_array_equal(response.as_numpy("sequences"), [items[[6, 7]].ravel()])


def test_both_clients(server: Server) -> None:
    random = np.random.default_rng(0)
    user, items = random_bags(random, (*POOLED, *ROWS), 1), random_bags(random, (*POOLED, *ROWS), 20)
    shared = ["recent", "user_id"]
    bags = {key: user[key] if key in shared else items[key] for key in ("recent", "genres", "words", "user_id")}
    whole = repeated(bags, shared, 20)
    values, lengths = flat(bags)
    kjt = KeyedJaggedTensor(
        [*bags],
        torch.from_numpy(values),
        lengths=torch.from_numpy(lengths),
        stride_per_key_per_rank=[[1 if key in shared else 20] for key in bags],
    )

    async def by_asyncio() -> Any:
        async with AsyncLookupClient(server.grpc, "m", 20) as client:
            return await client.lookup(bags, shared=shared)

    with LookupClient(server.grpc, "m", 20) as client:
        expected = client.lookup(whole)
        for answer in (
            client.lookup(bags, shared=shared),
            client.lookup(kjt, shared=shared),
            asyncio.run(by_asyncio()),
        ):
            assert list(answer) == list(bags)
            for key in ("genres", "user_id"):
                assert len(answer[key]) == (1 if key in shared else 20)
                np.testing.assert_array_equal(np.broadcast_to(answer[key], expected[key].shape), expected[key])
            np.testing.assert_array_equal(answer["recent"].rows(0), expected["recent"].rows(19))
            np.testing.assert_array_equal(answer["words"].values, expected["words"].values)


def test_by_json_lines(server: Server, modules: Any) -> None:
    line = {"user_id": [[1]], "genres": [[3], [4, 5]], "recent": [[6, 7]]}
    shared = ("--shared", "user_id", "--shared", "recent")
    done = tbe_serve("lookup", "m", "--url", server.grpc, *shared, stdin=json.dumps(line))
    report = json.loads(done.stdout)
    users = modules["m"].pooled.embedding_bags["user"].weight.detach().numpy()
    items = modules["m"].rows.embeddings["item"].weight.detach().numpy()
    np.testing.assert_array_equal(np.float32(report["user_id"]), users[[1]])
    np.testing.assert_array_equal(np.float32(report["recent"]), [items[[6, 7]]])
    assert len(report["genres"]) == 2
    table = tbe_serve("lookup", "m", "--url", server.grpc, "--table", *shared, stdin=json.dumps(line)).stdout
    assert [row.split("│")[1:3] for row in table.splitlines() if row.startswith("│")] == [
        [" all    ", " user_id "],
        *[[" all    ", " recent  "]] * 2,
        [" 0      ", " genres  "],
        [" 1      ", " genres  "],
    ]
    done = tbe_serve("lookup", "m", "--url", server.grpc, stdin=json.dumps(line))
    assert (
        "'genres': expected as many samples as 'user_id' has, 1, got 2: if all samples share one of them, name it"
        in done.stderr
    )

    bags, dense, shared_keys, expected = pairs(modules["dcn"], 1, 3)
    sent = json.dumps({"features": bags, "dense": {name: rows.tolist() for name, rows in dense.items()}})
    named = (word for name in shared_keys for word in ("--shared", name))
    done = tbe_serve("score", "dcn", "--url", server.grpc, *named, stdin=sent)
    np.testing.assert_allclose(json.loads(done.stdout)["scores"], expected["scores"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", one_in(2, ["dcn", "centred"]))
def test_64_ranking_requests_at_once(name: str, server: Server, modules: Any) -> None:
    """Of other sizes each, beside requests for scores where nothing comes once."""
    sizes = np.random.default_rng(0).integers(1, 20, 64).tolist()
    requests = [pairs(modules[name], seed, size) for seed, size in enumerate(sizes)]
    plain = [random_request(modules[name], np.random.default_rng(seed), 3) for seed in range(16)]
    with LookupClient(server.grpc, name, 30, retries=Retries(attempts=1)) as client:
        answers = at_once(
            [
                *(lambda a=request: client.score(a[0], a[1], shared=a[2]) for request in requests),
                *(lambda a=request: client.score(*a) for request in plain),
            ]
        )
    for answer, (*_, expected) in zip(answers, requests, strict=False):
        assert_scores(answer, expected)
    for answer, (bags, dense) in zip(answers[64:], plain, strict=True):
        assert_scores(answer, own_scores(modules[name], bags, dense))


@pytest.mark.long
def test_a_model_of_an_earlier_export_is_not_asked(tmp_path: Path) -> None:
    """An earlier server takes no notice of the parameter: its lengths could add up otherwise."""
    export_model(Mixed(), tmp_path / "r", "m", FP32)
    config = read_config(tmp_path / "r/m")
    (index,) = (number for number, output in enumerate(config.output) if output.name == "once")
    del config.output[index]
    write_config(tmp_path / "r/m", config)
    with (
        run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server,
        LookupClient(server.grpc, "m", 60) as client,
    ):
        assert not client.info().takes_shared
        with pytest.raises(InternalError, match="without shared features: its config has no output 'once'"):
            client.lookup({"user_id": [[1]]}, shared=["user_id"])
