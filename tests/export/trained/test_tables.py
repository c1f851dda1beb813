"""Tables and features of any module: found, named apart, answered as TorchRec answers them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from export import ExportConfig, WeightDtype, export_model
from export.errors import ModelError
from serving.engine import Engine
from tests.support.folder_contents import files


class Deep(nn.Module):
    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(collection)
        self.dense = nn.Linear(2, 2)


def config(name: str, *features: str, **more: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=8, feature_names=list(features), **more)


def one_row(module: nn.Module, table: str, row: int) -> npt.NDArray[np.float32]:
    """A row of the one table whose key ends in `table`."""
    (key,) = [key for key in module.state_dict() if key.endswith(f"{table}.weight")]
    weights: npt.NDArray[np.float32] = module.state_dict()[key][row].numpy()
    return weights


def test_all_collections_are_served(tmp_path: Path) -> None:
    """Nested, with a table and a feature of the same name in two of them, one of them fused, one weighted."""
    fused = FusedEmbeddingBagCollection(
        [config("same", "x")], torch.optim.SGD, {"lr": 0.1}, device=torch.device("cpu")
    )
    module = nn.ModuleDict(
        {
            "one": Deep(EmbeddingBagCollection(tables=[config("same", "x"), config("two", "x", "y")])),
            "fused": fused,
            "weighted": EmbeddingBagCollection(tables=[config("third", "z")], is_weighted=True),
        }
    )
    exact = ExportConfig(dtype={"*": WeightDtype.FP32, "fused.*": WeightDtype.FP16})
    answer = Engine.open(export_model(module, tmp_path / "r", "m", exact)).lookup(
        {
            "x": [[3]],
            "y": [[4]],
            "z": ([5, 6], [2], [0.5, -2.0]),
        }
    )
    assert list(answer) == ["x@one.inner.0.same", "x@two", "x@fused.same", "y", "z"]
    np.testing.assert_array_equal(answer["x@one.inner.0.same"][0], one_row(module["one"], "same", 3))
    np.testing.assert_array_equal(answer["x@two"][0], one_row(module, "two", 3))
    np.testing.assert_allclose(answer["x@fused.same"][0], one_row(fused, "same", 3), rtol=2**-10)
    np.testing.assert_array_equal(answer["y"][0], one_row(module, "two", 4))
    expected = 0.5 * one_row(module, "third", 5) - 2 * one_row(module, "third", 6)
    np.testing.assert_allclose(answer["z"][0], expected, rtol=1e-6)


def test_a_key_of_several_tables(tmp_path: Path) -> None:
    """By the model's own KJT; the answers of a key are side by side."""
    ebc = EmbeddingBagCollection(tables=[config("a", "x", "y"), config("b", "z", "x")])
    exact = ExportConfig(dtype={"*": WeightDtype.FP32})
    engine = Engine.open(export_model(ebc, tmp_path / "r", "m", exact))
    kjt = KeyedJaggedTensor.from_lengths_sync(
        ["x", "y", "z"], torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([2, 0, 1, 1, 0, 2])
    )
    expected = ebc(kjt).to_dict()
    answer = engine.lookup(kjt)
    assert list(answer) == ["x@a", "x@b", "y", "z"]
    assert answer.keys() == expected.keys()
    for name, rows in answer.items():
        np.testing.assert_allclose(rows, expected[name].detach().numpy(), rtol=1e-6)
    alone = engine.lookup({"z": [[5, 6], []], "x": [[1, 2], []]})
    assert list(alone) == ["z", "x@a", "x@b"]
    np.testing.assert_array_equal(alone["x@b"][0], answer["x@b"][0])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(lambda: nn.Linear(2, 2), "Linear: expected an EmbeddingBagCollection or EmbeddingCollection in it, found none", id="no tables"),
        pytest.param(lambda: EmbeddingBagCollection(tables=[config("a", "x,y")]), "feature 'x,y': expected a name without commas", id="comma"),
        pytest.param(lambda: EmbeddingBagCollection(tables=[config("a", "x\n")]), r"feature 'x\\n': expected a name without commas", id="control"),
        pytest.param(lambda: EmbeddingBagCollection(tables=[config("a", "x\ud800")]), r"feature 'x\\ud800': expected a name .* in UTF-8", id="surrogate"),
        pytest.param(lambda: EmbeddingBagCollection(tables=[config("a\udcff", "x")]), r"table 'a\\udcff': expected a name .* in UTF-8", id="surrogate in a table"),
        pytest.param(lambda: EmbeddingBagCollection(tables=[config("a,b", "x")]), "table 'a,b': expected a name without commas", id="comma in a table"),
        pytest.param(lambda: EmbeddingBagCollection(tables=[config("a", "x", "x")]), "feature 'x@a': expected different names, got 2 features", id="a key twice"),
        pytest.param(lambda: EmbeddingBagCollection(tables=[config("a", "f", "f@b"), config("b", "f")]), "feature 'f@b': expected different names, got 2 features", id="a name that is made"),
        pytest.param(lambda: EmbeddingBagCollection(tables=[config("a", "x", num_embeddings_post_pruning=5)]), "table 'a': .* pruned", id="pruned"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, build: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        export_model(build(), tmp_path / "r", "m")
    assert files(tmp_path) == {}
