"""Feature processors: position weights are read from modules and every kind of checkpoint, others are refused by name."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor
from torchrec.modules.feature_processor_ import FeatureProcessor, PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection, FeatureProcessorDictWrapper

from export import export_model
from export.config import ExportConfig
from export.errors import CheckpointError, ModelError
from export.pipeline import plan_model
from export.trained.find_collections import find_collections
from export.trained.model_weights import open_weights
from export.trained.tables import collect_tables
from serving.bundle.load import open_bundle
from serving.bundle.manifest import Capability
from tests.support.checkpoint_files import State, save_dcp, save_safetensors
from tests.support.commands import tbe_export
from tests.support.position_weights import LONGEST, positioned


def save_state(state: State, path: Path) -> Path:
    torch.save({"model": {f"module.{key}": tensor for key, tensor in state.items()}}, path / "w.pt")
    return path / "w.pt"


def save_strided(state: State, path: Path) -> Path:
    """Vectors that are every third number of a longer one."""
    spread = {key: torch.stack([value, value + 1, value + 2], dim=-1)[..., 0] for key, value in state.items()}
    return save_state(spread, path)


def save_bfloat16(state: State, path: Path) -> Path:
    return save_state({key: tensor.bfloat16() for key, tensor in state.items()}, path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("by_key", [True, False])
@pytest.mark.parametrize("saved", [save_state, save_strided, save_bfloat16, save_safetensors, save_dcp])
def test_every_kind_of_checkpoint_has_position_weights(
    tmp_path: Path, saved: Callable[[State, Path], Path], by_key: bool
) -> None:
    module = positioned(by_key=by_key)
    state = module.state_dict()
    trained = collect_tables(module)
    checkpoint = open_weights(module, trained, saved(state, tmp_path))
    for table in trained.tables:
        checkpoint.check(table)
        assert table.position_weights is not None
        assert [position_weight.count for position_weight in table.position_weights] == [
            LONGEST[key] for key in table.keys
        ]
        for weights in table.position_weights:
            assert weights.key is not None
            expected = state[weights.key].bfloat16().float() if saved is save_bfloat16 else state[weights.key]
            assert torch.equal(checkpoint.numbers("x", weights.key, (weights.count,)), expected)


def test_a_checkpoint_is_exported_and_verified_as_the_module_is(tmp_path: Path) -> None:
    checkpoint = save_state(positioned().state_dict(), tmp_path)
    with torch.device("meta"):
        empty = positioned()
    result = export_model(empty, tmp_path / "r", "m", checkpoint=checkpoint)
    expected = export_model(positioned(), tmp_path / "r", "m")
    assert open_bundle(result).manifest.features == open_bundle(expected).manifest.features
    assert all(feature.position_weights for feature in open_bundle(result).manifest.features)
    assert plan_model(empty, ExportConfig()).requires == (Capability.POSITION_WEIGHTS,)
    verify = ("verify", str(result), "--model", "tests.support.position_weights:by_module", "--checkpoint")
    assert tbe_export(*verify, str(checkpoint)).exit_code == 0
    state = positioned().state_dict()
    state["_feature_processors.words.position_weight"][3] += 1
    done = tbe_export(*verify, str(save_state(state, tmp_path)))
    assert done.exit_code == 1
    assert "feature 'words': its position weights differ from the model" in done.stderr


WORDS = "_feature_processors.words.position_weight"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        pytest.param(None, f"position weights of feature 'words': expected the key 'model.module.{WORDS}', which is missing", id="missing"),
        pytest.param(torch.ones(29), "position weights of feature 'words': expected shape [30], got [29]", id="size"),
        pytest.param(torch.full((30,), torch.nan), "feature 'words': holds NaN or infinity", id="NaN"),
        pytest.param(torch.ones(30, dtype=torch.int64), "expected float32, float16 or bfloat16, got torch.int64", id="dtype"),
    ],
)  # fmt: skip
def test_unusable_position_weights_are_refused_by_name(tmp_path: Path, weights: Tensor | None, message: str) -> None:
    state = positioned().state_dict()
    state.pop(WORDS)
    if weights is not None:
        state[WORDS] = weights
    with pytest.raises(CheckpointError, match=re.escape(message)):
        export_model(positioned(), tmp_path / "r", "m", checkpoint=save_state(state, tmp_path))


class Halves(FeatureProcessor):  # type: ignore[misc]
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        return features


class Doubles(PositionWeightedModule):  # type: ignore[misc]
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        return super().forward(super().forward(features))


def other(processor: nn.Module) -> Any:
    module = positioned()
    module._feature_processors["words"] = processor
    return module


def wrapped() -> Any:
    module = positioned()
    wrapper = FeatureProcessorDictWrapper(module._feature_processors)
    return FeatureProcessedEmbeddingBagCollection(module._embedding_bag_collection, wrapper)


def pre_processed() -> Any:
    module = positioned()
    module._feature_processors["words"]._pre_processed = True
    return module


def hooked() -> Any:
    module = positioned()
    module._feature_processors["words"].register_forward_hook(lambda *_: None)
    return module


class Overrides(FeatureProcessedEmbeddingBagCollection):  # type: ignore[misc]
    def forward(self, features: Any) -> Any:
        return super().forward(features)


def subclass() -> Any:
    module = positioned()
    module.__class__ = Overrides
    return module


def with_padding() -> Any:
    module = positioned()
    module._embedding_bag_collection.embedding_bags["user"].padding_idx = 0
    return module


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(lambda: other(Halves()), r"_feature_processors\.words \(Halves\): expected a PositionWeightedModule: other", id="another"),
        pytest.param(lambda: other(Doubles(30)), r"_feature_processors\.words \(Doubles\): expected a PositionWeightedModule", id="subclass"),
        pytest.param(lambda: other(PositionWeightedModule(0)), r"words \(PositionWeightedModule\): expected a weight for one position", id="no weights"),
        pytest.param(wrapped, r"_feature_processors \(FeatureProcessorDictWrapper\): expected a PositionWeightedModuleCollection", id="wrapped"),
        pytest.param(pre_processed, r"words \(PositionWeightedModule\): takes positions from the weights of a request", id="pre-processed"),
        pytest.param(hooked, r"_feature_processors\.words: has a hook", id="hook"),
        pytest.param(subclass, "Overrides: expected EmbeddingBagCollection or ", id="own forward"),
        pytest.param(with_padding, r"_embedding_bag_collection: embedding_bags\.user: expected a plain nn.EmbeddingBag", id="padding"),
    ],
)  # fmt: skip
def test_other_feature_processors_are_refused_by_name(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_collections(build())
