"""Trained weights from every kind of file that people save them in; sharded ones made by a real two-process training."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from export import ExportConfig, WeightDtype, export_model
from export.errors import CheckpointError
from export.trained.checkpoint import open_checkpoint
from export.trained.model_weights import open_weights
from export.trained.tables import collect_tables
from serving.client import LookupClient
from serving.engine import Engine
from serving.server import Ports, run_server
from tests.support import oracle
from tests.support.long_cases import one_in
from tests.support.models import collection, random_bags, table_of
from tests.support.sharded_training import SHARDED
from tests.support.two_processes import run_module


def save_state(module: nn.Module, path: Path) -> None:
    torch.save(module.state_dict(), path)


def save_nested(module: nn.Module, path: Path) -> None:
    wrapped = {"model": {f"module.{key}": tensor for key, tensor in module.state_dict().items()}, "step": 3}
    torch.save(wrapped, path)


def save_safetensors(module: nn.Module, path: Path) -> None:
    save_file(module.state_dict(), path)


def save_half(module: nn.Module, path: Path) -> None:
    torch.save({key: tensor.half() for key, tensor in module.state_dict().items()}, path)


@pytest.mark.parametrize(
    ("save", "name", "exact"),
    one_in(
        2,
        [
            pytest.param(save_state, "w.pt", True, id="state dict"),
            pytest.param(save_nested, "w.pt", True, id="nested, with a wrapper's prefix"),
            pytest.param(save_safetensors, "w.safetensors", True, id="safetensors"),
            pytest.param(save_half, "w.pt", False, id="fp16"),
        ],
    ),
)
def test_a_checkpoint_gives_the_bytes_that_the_module_gives(
    tmp_path: Path, save: Callable[[nn.Module, Path], None], name: str, exact: bool
) -> None:
    module = collection()
    save(module, tmp_path / name)
    with torch.device("meta"):
        empty = collection()
    from_checkpoint = export_model(empty, tmp_path / "r", "m", checkpoint=tmp_path / name)
    from_module = export_model(module, tmp_path / "r", "m")
    same = (from_checkpoint / "weights.0.bin").read_bytes() == (from_module / "weights.0.bin").read_bytes()
    assert same == exact


def break_shape(module: nn.Module) -> dict[str, Any]:
    return module.state_dict() | {"embedding_bags.item.weight": torch.zeros(3, 32)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(lambda _: {}, "table 'user': expected the key 'embedding_bags.user.weight', which is missing, .*found nothing", id="empty"),
        pytest.param(lambda m: m.state_dict() | {"embedding_bags": {"user.weight": torch.zeros(50, 24)}}, "has 'embedding_bags.user.weight' twice", id="twice"),
        pytest.param(break_shape, r"table 'item': expected shape \[300, 32\], got \[3, 32\]", id="shape"),
        pytest.param(lambda m: {k: v.to(torch.int32) for k, v in m.state_dict().items()}, "table 'user': expected float32, float16 or bfloat16, got torch.int32", id="dtype"),
        pytest.param(lambda _: print, "expected tensors and plain containers alone", id="a pickled function"),
    ],
)  # fmt: skip
def test_a_checkpoint_without_the_tables_is_refused_by_name(
    tmp_path: Path, content: Callable[[nn.Module], Any], message: str
) -> None:
    torch.save(content(collection()), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=message) as refused:
        export_model(collection(), tmp_path / "r", "m", checkpoint=tmp_path / "w.pt")
    assert "w.pt" in str(refused.value)
    assert not (tmp_path / "r").exists()


def test_a_missing_checkpoint_and_a_module_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.pt: expected a file, or a folder with .*, found nothing"):
        export_model(collection(), tmp_path / "r", "m", checkpoint=tmp_path / "none.pt")
    with torch.device("meta"):
        empty = collection()
    with pytest.raises(CheckpointError, match="meta device and has no weights: give a checkpoint"):
        export_model(empty, tmp_path / "r", "m")


# --- sharded over processes, and over files


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder that two processes saved."""
    folder = tmp_path_factory.mktemp("sharded") / "checkpoint"
    run_module("tests.support.sharded_training", str(folder))
    return folder


@pytest.fixture(scope="module")
def trained(sharded: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The same tables as torch's own converter reads them."""
    converted = sharded.parent / "converted.pt"
    dcp_to_torch_save(sharded, converted)
    state = torch.load(converted, weights_only=True)["model"]
    return {spec.name: state[f"sparse.embedding_bags.{spec.name}.weight"].numpy() for spec in SHARDED}


def test_a_checkpoint_of_two_processes_is_read_by_one(
    sharded: Path, trained: dict[str, npt.NDArray[np.float32]]
) -> None:
    module = nn.ModuleDict({"sparse": collection(SHARDED)})
    collected = collect_tables(module)
    checkpoint = open_weights(module, collected, sharded)
    initial = collection(SHARDED).state_dict()
    for table in collected.tables:
        checkpoint.check(table)
        for start, stop in [(0, table.rows), (0, 1), (table.rows - 1, table.rows), (7, 29)]:
            np.testing.assert_array_equal(checkpoint.rows(table, start, stop), trained[table.name][start:stop])
        assert not np.array_equal(
            trained[table.name], initial[f"embedding_bags.{table.name}.weight"]
        )  # it was trained


@pytest.mark.long
def test_trained_by_two_exported_by_one_and_served(
    sharded: Path, trained: dict[str, npt.NDArray[np.float32]], tmp_path: Path
) -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"sparse": collection(SHARDED)})
    export_model(module, tmp_path / "r", "m", checkpoint=sharded)
    bags = random_bags(np.random.default_rng(0), SHARDED, 40)
    with (
        run_server(tmp_path / "r", Ports(grpc=0, http=0, operations=0), log=tmp_path / "log") as server,
        LookupClient(server.grpc, "m", timeout_s=30) as client,
    ):
        answer = client.lookup(bags)
    for feature, rows in answer.items():
        spec = table_of(SHARDED)[feature]
        bound = oracle.row_range_bound(trained[spec.name], "INT8")[:, np.newaxis].repeat(spec.dim, axis=1)
        error = np.abs(rows - oracle.pool(trained[spec.name], bags[feature], spec.pooling))
        assert (error <= oracle.pool(bound, bags[feature], spec.pooling) + 1e-5).all()


def test_a_damaged_checkpoint_folder_is_refused(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "c"))
    (data,) = folder.glob("__1_0.distcp")
    content = data.read_bytes()
    data.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: expected [0-9,]+ bytes, found 100"):
        open_checkpoint(folder)
    data.unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp"):
        open_checkpoint(folder)
    (folder / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"\.metadata: expected the metadata of torch\.distributed\.checkpoint"):
        open_checkpoint(folder)


class Harmful:
    """Unpickles by touching a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_metadata_that_is_code_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "harmed")))
    with pytest.raises(CheckpointError, match="is not allowed in a checkpoint's metadata"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("target", ["folder", "index"])
def test_a_sharded_set_of_safetensors(tmp_path: Path, target: str) -> None:
    module = collection()
    state = module.state_dict()
    places = {
        key: f"model-{number:05d}-of-00002.safetensors" for key, number in zip(state, (1, 2, 1, 2), strict=True)
    }
    for name in set(places.values()):
        save_file({key: state[key] for key in state if places[key] == name}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    exact = ExportConfig(dtype={"*": WeightDtype.FP32})
    checkpoint = tmp_path if target == "folder" else index
    with torch.device("meta"):
        empty = collection()
    bundle = export_model(empty, tmp_path / "r" / "r", "m", exact, checkpoint=checkpoint)
    answer = Engine.open(bundle).lookup({"user_id": [[7]], "genres": [[3]]})
    np.testing.assert_array_equal(answer["user_id"][0], state["embedding_bags.user.weight"][7])
    np.testing.assert_array_equal(answer["genres"][0], state["embedding_bags.genre.weight"][3])


def test_views_and_transposed_tensors_of_a_state_dict_are_read_right(tmp_path: Path) -> None:
    """A saved tensor may be a view: other strides, an offset, a storage that it shares."""
    base = torch.randn(32, 700)
    state = collection().state_dict() | {"embedding_bags.item.weight": base[:, 300:600].T}
    torch.save(state, tmp_path / "w.pt")
    checkpoint = open_checkpoint(tmp_path / "w.pt")
    item = next(table for table in collect_tables(collection()).tables if table.name == "item")
    np.testing.assert_array_equal(checkpoint.rows(item, 100, 200), base[:, 400:500].T)
