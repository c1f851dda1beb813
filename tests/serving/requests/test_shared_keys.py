"""A KJT key that several tables read: sent once, checked once, answered by each table."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from export import ExportConfig, IdPolicy, WeightDtype, export_model
from serving.bundle.tensor_names import EMBEDDINGS
from serving.client import LookupClient
from serving.commands.status import ask_every_table
from serving.engine import Engine
from serving.errors import InvalidRequest
from serving.requests.types import Tensors
from serving.server import Ports, run_server

KEYS = ["x", "y", "z"]


def collection() -> EmbeddingBagCollection:
    torch.manual_seed(3)
    tables = {"a": (20, ["y", "x"]), "b": (50, ["x"]), "c": (30, ["z", "x"])}
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=keys)
            for name, (rows, keys) in tables.items()
        ],
        is_weighted=True,
    )


def kjt(samples: int = 5) -> KeyedJaggedTensor:
    random = np.random.default_rng(1)
    lengths = random.integers(0, 4, 3 * samples)
    total = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=KEYS,
        values=torch.from_numpy(random.integers(0, 20, total)),
        lengths=torch.from_numpy(lengths.astype(np.int32)),
        weights=torch.from_numpy(random.normal(size=total).astype(np.float32)),
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = ExportConfig(dtype={"*": WeightDtype.FP32}, id_policy={"a": IdPolicy.ZERO})
    return export_model(collection(), tmp_path_factory.mktemp("shared") / "r", "m", config)


@pytest.fixture(scope="module")
def client(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LookupClient]:
    log = tmp_path_factory.mktemp("server") / "log"
    with (
        run_server(bundle.parents[1], Ports(grpc=0, http=0, operations=0), log=log) as server,
        LookupClient(server.grpc, "m", 30.0) as opened,
    ):
        yield opened


def test_the_models_own_kjt_is_answered_as_by_torchrec(client: LookupClient) -> None:
    expected = collection()(kjt()).to_dict()
    answer = client.lookup(kjt())
    assert list(answer) == ["x@a", "x@b", "x@c", "y", "z"]
    for name, rows in answer.items():
        np.testing.assert_allclose(rows, expected[name].detach().numpy(), rtol=1e-5, atol=1e-6)
    assert client.info().keys == {"y": ("y",), "x": ("x@a", "x@b", "x@c"), "z": ("z",)}
    assert client.info().weighted == ("y", "x", "z")
    assert ask_every_table(client).version == 1


def test_each_tables_id_policy_applies_to_its_copy_of_the_ids(client: LookupClient) -> None:
    """25 is outside of a, which skips it, and inside of b and c."""
    rows = {table.name: table for table in collection().embedding_bag_configs()}
    assert rows["a"].num_embeddings <= 25 < rows["c"].num_embeddings
    answer = client.lookup({"x": ([25, 3], [2], [1.0, 1.0])})
    bags = {name: bag.weight.detach().numpy() for name, bag in collection().embedding_bags.items()}
    np.testing.assert_allclose(answer["x@a"][0], bags["a"][3], rtol=1e-6)
    np.testing.assert_allclose(answer["x@b"][0], bags["b"][25] + bags["b"][3], rtol=1e-6)
    with pytest.raises(InvalidRequest, match=r"feature 'x@c': expected an id in \[0, 30\), got 40"):
        client.lookup({"x": ([40], [1], [1.0])})
    with pytest.raises(InvalidRequest, match="feature 'x@a': expected one of 'y', 'x', 'z'"):
        client.lookup({"x@a": ([1], [1], [1.0])})


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        pytest.param([2, -1, 2], "feature 'x': expected lengths >= 0, got -1", id="negative"),
        pytest.param([1, 1, 2], r"feature 'z': expected its bags to take ids \[2, 4\)", id="more than ids"),
        pytest.param([1, 1, 0], r"feature 'z': .* got 3 ids for lengths that sum to 2", id="fewer than ids"),
        pytest.param([2**31 - 1, 2**31 - 1, 5], "feature 'y': expected its bags", id="wraps around"),
        pytest.param([1, 1], "lengths: expected a multiple of 3", id="a key missing"),
    ],
)
def test_wrong_lengths_are_refused_before_ids_are_copied(bundle: Path, lengths: list[int], message: str) -> None:
    ids, weights = np.zeros(3, np.int64), np.ones(3, np.float32)
    with pytest.raises(InvalidRequest, match=message):
        Engine.open(bundle).outputs(Tensors(None, ids, np.array(lengths, np.int32), weights))[EMBEDDINGS]


def test_a_request_without_samples_is_answered_without_rows(bundle: Path, client: LookupClient) -> None:
    ids, lengths, weights = np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32)
    request = dict.fromkeys(KEYS, (ids, lengths, weights))
    for answer in (Engine.open(bundle).lookup(request), client.lookup(request)):
        assert len(answer) == 5  # x is read by three tables
        assert {rows.shape for rows in answer.values()} == {(0, 8)}
