"""Managed collision modules: maps are read from modules and every kind of checkpoint, others are refused by name."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection, MCHManagedCollisionModule

from export import ExportConfig, IdDtype, IdPolicy, WeightDtype, export_model
from export.errors import CheckpointError, ModelError
from export.trained.find_collections import find_collections
from serving.bundle.id_maps import ID_MAPS_FILE
from serving.bundle.load import open_bundle
from serving.engine import Engine
from serving.errors import ConfigurationError
from tests.support import managed_collision_training
from tests.support.checkpoint_files import State, save_dcp, save_safetensors
from tests.support.commands import tbe_export
from tests.support.long_cases import one_in
from tests.support.managed_collision import (
    CPU,
    ROWS,
    SPECS,
    bags_of,
    collection_behind,
    kjt_of,
    managed,
    mch,
    numbers_of,
    untrained,
    zch,
)
from tests.support.models import Spec
from tests.support.sequence_models import sequences as plain
from tests.support.two_processes import run_module

MODULES = "_managed_collision_collection._managed_collision_modules"
RAW_IDS = f"{MODULES}.user._mch_sorted_raw_ids"
SLOTS = f"{MODULES}.user._mch_remapped_ids_mapping"
IDENTITIES = f"{MODULES}.item._hash_zch_identities"
BUCKETS = f"{MODULES}.item._hash_zch_bucket"


def save_state(state: State, path: Path) -> Path:
    torch.save({"model": {f"module.{key}": tensor for key, tensor in state.items()}}, path / "w.pt")
    return path / "w.pt"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(managed(), tmp_path_factory.mktemp("module") / "r", "m")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("specs", [pytest.param(SPECS, id="pooled"), pytest.param(ROWS, id="sequences")])
@pytest.mark.parametrize("saved", one_in(3, [save_dcp, save_state, save_safetensors]))
def test_a_checkpoint_is_exported_as_the_module_is(
    tmp_path: Path, saved: Callable[[State, Path], Path], specs: Sequence[Spec]
) -> None:
    module = managed(specs)
    expected = export_model(module, tmp_path / "module", "m")
    checkpoint = saved(module.state_dict(), tmp_path)
    result = export_model(untrained(specs), tmp_path / "r", "m", checkpoint=checkpoint)
    manifest = open_bundle(result).manifest
    assert manifest.tables == open_bundle(expected).manifest.tables
    for name in (ID_MAPS_FILE, "weights.0.bin"):
        assert (result / name).read_bytes() == (expected / name).read_bytes()


def test_the_order_of_ids_in_a_checkpoint_does_not_matter(tmp_path: Path, expected: Path) -> None:
    """Shards of training are sorted each; loading a module sorts them all."""
    state = managed().state_dict()
    order = torch.randperm(48)
    state |= {key: state[key][order] for key in (RAW_IDS, SLOTS)}
    state.pop(BUCKETS)  # older checkpoints have none
    result = export_model(untrained(), tmp_path / "r", "m", checkpoint=save_state(state, tmp_path))
    assert open_bundle(result).manifest.tables[0].id_map == open_bundle(expected).manifest.tables[0].id_map
    loaded = untrained()
    loaded.load_state_dict(state, strict=False)
    reordered = export_model(loaded, tmp_path / "r", "m", checkpoint=None)
    assert (result / ID_MAPS_FILE).read_bytes() == (reordered / ID_MAPS_FILE).read_bytes()


def test_verify_compares_maps(tmp_path: Path, expected: Path) -> None:
    verify = ("verify", str(expected), "--model", "tests.support.managed_collision:untrained", "--checkpoint")
    state = managed().state_dict()
    assert tbe_export(*verify, str(save_state(state, tmp_path))).exit_code == 0
    state[SLOTS] = state[SLOTS].roll(1)
    done = tbe_export(*verify, str(save_state(state, tmp_path)))
    assert done.exit_code == 1
    assert "table 'user': its map of ids differs from the model" in done.stderr
    assert "table 'item'" not in done.stderr


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        pytest.param(RAW_IDS, None, f"map of the ids of table 'user': expected the key 'model.module.{RAW_IDS}', which is missing", id="missing"),
        pytest.param(RAW_IDS, lambda ids: ids[1:], "raw ids of table 'user': expected shape [48], got [47]", id="size"),
        pytest.param(RAW_IDS, lambda ids: ids.int(), "raw ids of table 'user': expected int64, got torch.int32", id="dtype"),
        pytest.param(SLOTS, lambda slots: slots + 1, "rows of raw ids of table 'user': expected them in [0, 48), got 1 to 48", id="rows"),
        pytest.param(IDENTITIES, None, "map of the ids of table 'item': expected the key", id="no identities"),
        pytest.param(BUCKETS, lambda count: count + 1, "table 'item': expected a checkpoint of 3 buckets, as the module has, got one of 4", id="buckets"),
    ],
)  # fmt: skip
def test_maps_that_cannot_be_used_are_refused_by_name(
    tmp_path: Path, key: str, change: Callable[[Any], Any] | None, message: str
) -> None:
    state = managed().state_dict()
    tensor = state.pop(key)
    if change is not None:
        state[key] = change(tensor)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        export_model(untrained(), tmp_path / "r", "m", checkpoint=save_state(state, tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(ExportConfig(id_policy={"item": IdPolicy.ZERO}), "id_policy: table 'item': its ids are remapped", id="policy"),
        pytest.param(ExportConfig(id_policy={"*": IdPolicy.MODULO}), "expected no policy, got modulo", id="policy of all"),
        pytest.param(ExportConfig(id_dtype=IdDtype.INT32), "id_dtype: expected int64: the ids of table 'user'", id="int32"),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_for_raw_ids_are_refused(
    tmp_path: Path, config: ExportConfig, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        export_model(managed(), tmp_path / "r", "m", config)


class Other(MCHManagedCollisionModule):  # type: ignore[misc]
    pass


class OtherHash(HashZchManagedCollisionModule):  # type: ignore[misc]
    pass


class OtherManaged(ManagedCollisionCollection):  # type: ignore[misc]
    pass


class OverridesSequences(ManagedCollisionEmbeddingCollection):  # type: ignore[misc]
    def forward(self, *args: Any) -> Any:
        return super().forward(*args)


class Overrides(ManagedCollisionEmbeddingBagCollection):  # type: ignore[misc]
    def forward(self, *args: Any) -> Any:
        return super().forward(*args)


def with_user(module: nn.Module) -> Any:
    return collection_behind({"user": module, "item": zch(60), "word": mch(64)})


def of_class(part: Callable[[Any], Any], kind: type) -> Any:
    module = untrained()
    part(module).__class__ = kind
    return module


def in_another_order() -> Any:
    return collection_behind({"word": mch(64), "item": zch(60), "user": mch(48)})


def shared_key() -> Any:
    specs = [Spec("a", 40, 8, "SUM", ("x",)), Spec("b", 30, 8, "SUM", ("x",))]
    return collection_behind({"a": mch(40), "b": mch(30)}, specs)


def hooked() -> Any:
    module = untrained()
    module._managed_collision_collection._managed_collision_modules["user"].register_forward_hook(lambda *_: None)
    return module


def sequences(module: nn.Module, *, need_indices: bool = False) -> Any:
    rows = plain([Spec("t", 40, 8, "NONE", ("x",))], need_indices=need_indices)
    return ManagedCollisionEmbeddingCollection(
        rows, ManagedCollisionCollection({"t": module}, rows.embedding_configs())
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(lambda: sequences(mch(40), need_indices=True), "_embedding_module: need_indices: expected False", id="indices of sequences"),
        pytest.param(lambda: nn.Sequential(sequences(zch(40, disable_fallback=True))), r"0 \(ManagedCollisionEmbeddingCollection\): .* has disable_fallback", id="disable_fallback of sequences"),
        pytest.param(lambda: of_class(lambda m: m, OverridesSequences), "OverridesSequences: expected EmbeddingBagCollection or ", id="own forward of sequences"),
        pytest.param(lambda: of_class(lambda m: m, Overrides), "Overrides: expected EmbeddingBagCollection or ", id="own forward"),
        pytest.param(lambda: of_class(lambda m: m._managed_collision_collection, OtherManaged), r"\(OtherManaged\): expected a ManagedCollisionCollection", id="another collection"),
        pytest.param(lambda: with_user(Other(48, CPU, mch(1)._eviction_policy, 1)), rf"{MODULES}\.user \(Other\): expected an MCHManagedCollisionModule or a HashZch", id="subclass of MCH"),
        pytest.param(lambda: with_user(OtherHash(48, CPU, 1)), r"user \(OtherHash\): expected an MCHManagedCollisionModule or a HashZch", id="subclass of HashZch"),
        pytest.param(lambda: with_user(mch(48, input_hash_func=lambda ids, size: ids % size)), r"user \(MCHManagedCollisionModule\): has an input_hash_func", id="hash function"),
        pytest.param(lambda: with_user(mch(48, output_global_offset=48)), r"user .*: is a shard of a module \(output_global_offset\)", id="shard of MCH"),
        pytest.param(lambda: with_user(zch(48, input_hash_size=-1)), r"user \(HashZchManagedCollisionModule\): has an input_hash_size that is no number", id="negative input_hash_size"),
        pytest.param(lambda: with_user(zch(48, input_hash_size=2**63)), "has an input_hash_size that is no number of ids", id="large input_hash_size"),
        pytest.param(lambda: with_user(zch(48, disable_fallback=True)), "has disable_fallback", id="disable_fallback"),
        pytest.param(lambda: with_user(zch(48, opt_in_prob=20, percent_reserved_slots=10)), "has an opt_in_prob", id="opt_in_prob"),
        pytest.param(lambda: with_user(zch(48, 4, start_bucket=0, end_bucket=2)), "is a shard of a module", id="shard of HashZch"),
        pytest.param(lambda: with_user(zch(48, 2, output_segments=[0, 48, 48])), "has buckets without rows", id="empty bucket"),
        pytest.param(in_another_order, r"expected modules in the order of its tables, \['user', 'item', 'word'\], got \['word'", id="order"),
        pytest.param(shared_key, "expected a table of its own for each feature, 'x' is read by 'a' and 'b'", id="shared key"),
        pytest.param(hooked, r"_managed_collision_modules\.user: has a hook", id="hook"),
    ],
)  # fmt: skip
def test_unsupported_managed_collision_modules_are_refused_by_name(
    build: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        find_collections(build())


def test_a_model_with_a_dense_part_is_exported_with_raw_ids(tmp_path: Path) -> None:
    class Ranker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse = managed()
            self.over = nn.Linear(16 + 32 + 32 + 24, 1)

        def forward(self, features: Any) -> Any:
            return self.over(self.sparse(features)[0].values())

    bundle = export_model(Ranker(), tmp_path / "r", "m")
    assert all(parity.trained is not None for parity in open_bundle(bundle).manifest.parity)
    assert [spec.name for spec in SPECS] == [table.name for table in open_bundle(bundle).manifest.tables]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.long
def test_a_checkpoint_that_several_processes_saved(tmp_path: Path) -> None:
    """Each has sorted its own raw ids. What TorchRec answers with that checkpoint in one process is the oracle."""
    folder = tmp_path / "dcp"
    run_module("tests.support.managed_collision_training", str(folder))
    config = ExportConfig(dtype={"*": WeightDtype.FP32})
    engine = Engine.open(
        export_model(managed_collision_training.whole(), tmp_path / "r", "m", config, checkpoint=folder)
    )
    module = managed_collision_training.whole()
    state = {"model": module.state_dict()}
    load(state, checkpoint_id=folder)
    raw_ids = state["model"][f"sparse.{RAW_IDS}"]
    assert not torch.equal(raw_ids, raw_ids.sort().values)
    module.load_state_dict(state["model"])
    bags = bags_of(np.random.default_rng(0), 50, "x")
    with torch.no_grad():
        expected = numbers_of(module.eval()["sparse"](kjt_of(bags))[0])
    answer: Any = engine.lookup(bags)["x"]
    np.testing.assert_allclose(getattr(answer, "values", answer), expected, rtol=1e-6, atol=1e-5)
    (table,) = engine.bundle.manifest.tables
    assert table.id_map is not None
    assert table.id_map.known > 20
