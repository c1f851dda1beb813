"""Raw ids: TorchRec's ManagedCollisionEmbedding(Bag)Collection, run eagerly in eval on a KJT, is the oracle."""

from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export import ExportConfig, Sharding, WeightDtype, export_model
from export.errors import ModelError
from export.trained.managed_collision import looking_up
from serving.bundle.load import open_bundle
from serving.bundle.manifest import Capability
from serving.engine import Engine
from serving.errors import InvalidRequest
from tests.support.commands import tbe_export
from tests.support.long_cases import fewer_examples, one_in
from tests.support.managed_collision import (
    KEYS,
    POLICIES,
    ROWS,
    SPECS,
    assert_equal,
    assert_right,
    bags_of,
    collection_behind,
    kjt_of,
    managed,
    mch,
    right,
    trained,
    zch,
)
from tests.support.models import Spec, collection

FP32 = ExportConfig(dtype={"*": WeightDtype.FP32})
BOTH = [pytest.param(SPECS, id="pooled"), pytest.param(ROWS, id="sequences")]


@fewer_examples
@given(data=st.data())
def test_random_modules_answer_as_torchrec_runs_them(data: st.DataObject, tmp_path_factory: Any) -> None:
    modules: dict[str, Any] = {}
    specs: list[Spec] = []
    pooling = data.draw(st.sampled_from([["SUM", "MEAN"], ["NONE"]]), label="pooling")
    for number, table_keys in enumerate(
        data.draw(st.sampled_from([["a"], ["ab", "c"], ["c", "a", "b"]]), label="keys")
    ):
        buckets = data.draw(st.integers(1, 4), label="buckets")
        rows = buckets * data.draw(st.integers(1, 40), label="rows of a bucket")
        specs.append(Spec(f"t{number}", rows, 8, data.draw(st.sampled_from(pooling)), tuple(table_keys)))
        modules[f"t{number}"] = data.draw(
            st.one_of(
                st.builds(mch, st.just(rows), st.sampled_from(POLICIES)),
                st.builds(
                    zch,
                    st.just(rows),
                    st.just(buckets),
                    max_probe=st.integers(1, 20),
                    inference_dispatch_div_train_world_size=st.booleans(),
                    track_id_freq=st.booleans(),
                ),
            )
        )
    keys = [key for spec in specs for key in spec.features]
    seed = data.draw(st.integers(0, 1000))
    key_order = data.draw(st.permutations(keys), label="the order of keys in training")
    module = trained(
        collection_behind(modules, specs, seed=seed), seed, data.draw(st.integers(0, 5), label="steps"), key_order
    )
    ranks = data.draw(st.integers(1, 3), label="ranks")
    kind = data.draw(st.sampled_from(["row_wise", "table_wise", "column_wise", "data_parallel"]))
    kind = "table_wise" if kind == "row_wise" and min(spec.rows for spec in specs) < ranks else kind
    sharding = Sharding(ranks=ranks, types={"*": kind}) if ranks > 1 else Sharding()
    config = ExportConfig(dtype=FP32.dtype, sharding=sharding)
    engine = Engine.open(export_model(module, tmp_path_factory.mktemp("random") / "r", "m", config))
    assert all(parity.trained is not None for parity in engine.bundle.manifest.parity)
    random = np.random.default_rng(seed)
    for size in (0, 1, 5, 40):
        bags = bags_of(random, size, keys)
        assert_right(engine.lookup(bags), module, bags)
    some = {key: bags[key] for key in keys[-1:]}
    expected = right(module, bags)
    for name, answer in engine.lookup(some).items():
        assert_equal(answer, expected[name], name)


@pytest.mark.parametrize("specs", BOTH)
def test_training_fills_the_id_maps_of_the_oracle(specs: Several[Spec]) -> None:
    """The oracle says something: training has filled the maps."""
    module: Any = managed(specs)
    for part in module._managed_collision_collection._managed_collision_modules.values():
        state = part.state_dict()
        ids = state.get("_mch_sorted_raw_ids", state.get("_hash_zch_identities")).ravel()
        assert len(set(ids.tolist()) - {-1, 2**63 - 1}) > 30


@pytest.mark.parametrize("specs", one_in(2, BOTH))
def test_raw_ids_are_exported_verified_and_inspected_in_every_dtype(specs: Several[Spec], tmp_path: Path) -> None:
    module = managed(specs)
    dtype = {"user": WeightDtype.INT8, "item": WeightDtype.INT4, "word": WeightDtype.INT2}
    bundle = export_model(module, tmp_path / "r", "m", ExportConfig(dtype=dtype))
    manifest = open_bundle(bundle).manifest
    assert set(manifest.requires) - {Capability.SEQUENCES} == {Capability.ID_MAPS}
    assert all(parity.trained is not None and parity.trained.cosine > 0.6 for parity in manifest.parity)
    assert tbe_export("verify", str(bundle)).exit_code == 0
    shown = tbe_export("inspect", str(bundle)).stdout
    assert "known·m" in shown
    assert "any int64 is an id" in shown


def test_weights_of_ids_are_those_that_were_sent(tmp_path: Path) -> None:
    specs = [Spec("a", 40, 8, "SUM", ("x", "y")), Spec("b", 30, 8, "SUM", ("z",))]
    module = trained(collection_behind({"a": mch(40), "b": zch(30)}, specs, weighted=True), keys="xyz")
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    bags = bags_of(np.random.default_rng(3), 7, "xyz")
    expected = right(module, bags, weighted=True)
    for name, rows in engine.lookup(kjt_of(bags, weighted=True)).items():
        np.testing.assert_allclose(rows, expected[name], rtol=1e-6, atol=1e-5, err_msg=name)
    assert all(parity.trained is not None for parity in engine.bundle.manifest.parity)


def test_raw_ids_work_beside_a_collection_of_row_numbers(tmp_path: Path) -> None:
    """Tables with and without a map read one key: its ids are row numbers of the one without, and raw for the other."""
    specs = [Spec("own", 40, 8, "SUM", ("x", "recent"))]
    module = torch.nn.ModuleDict({"managed": managed(), "own": collection(specs)})
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    assert engine.bundle.manifest.rows_of_keys["recent"] == 40
    bags = bags_of(np.random.default_rng(0), 6) | {"recent": [[1, 39], [0], [], [7], [7], [3]], "x": [[1]] * 6}
    answer = engine.lookup(bags)
    expected = right(module["managed"], {key: bags[key] for key in KEYS})
    for name, rows in expected.items():
        served = answer["recent@item" if name == "recent" else name]
        np.testing.assert_allclose(served, rows, rtol=1e-6, atol=1e-5, err_msg=name)
    with pytest.raises(InvalidRequest, match=r"feature 'recent@own': expected an id in \[0, 40\), got 40"):
        engine.lookup(bags | {"recent": [[40], [], [], [], [], []]})
    with pytest.raises(InvalidRequest, match=r"feature 'x': expected an id in \[0, 40\), got -1"):
        engine.lookup({"x": [[-1]], "words": [[-1]]})


def test_sequences_work_beside_pooled_features(tmp_path: Path) -> None:
    """Tables of both read the same keys, each through a map of its own."""
    module = torch.nn.ModuleDict({"pooled": managed(), "rows": trained(managed(ROWS), seed=9)})
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    bags = bags_of(np.random.default_rng(4), 6)
    answer = engine.lookup(bags)
    assert len(answer) == 2 * len(KEYS)
    for path, collection_of in module.items():
        expected = right(collection_of, bags)
        for spec in SPECS:
            for key in spec.features:
                assert_equal(answer[f"{key}@{path}.{spec.name}"], expected[key], key)


class Ranker(torch.nn.Module):
    """A whole model: what follows the collection takes its embeddings, and a dense input."""

    def __init__(self, *, remapped: bool = False) -> None:
        super().__init__()
        self.sparse = managed()
        self.over = torch.nn.Linear(16 + 32 + 32 + 24 + 5, 1)
        self.remapped = remapped

    def forward(self, features: Any, dense: torch.Tensor) -> torch.Tensor:
        pooled, ids = self.sparse(features)
        scores: torch.Tensor = self.over(torch.cat([pooled.values(), dense], dim=1))
        return scores + ids if self.remapped else scores


def test_scores_of_raw_ids_are_those_of_torchrec(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Ranker().eval()
    config = ExportConfig(dtype=FP32.dtype, scores=True, dense_widths={"dense": 5})
    engine = Engine.open(export_model(module, tmp_path / "r", "m", config))
    bags, dense = bags_of(np.random.default_rng(2), 9), torch.randn(9, 5)
    with torch.no_grad(), looking_up(module):
        expected = module(kjt_of(bags), dense)
    scores: Any = engine.score(bags, {"dense": dense.numpy()})["scores"]
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)
    assert engine.bundle.manifest.dense_part is not None
    assert all(output.parity.trained is not None for output in engine.bundle.manifest.dense_part.outputs)
    with pytest.raises(ModelError, match=r"sparse: expected its embeddings alone to be used"):
        export_model(Ranker(remapped=True), tmp_path / "none", "m", config)


def test_scores_of_sequences_without_an_example_are_refused(tmp_path: Path) -> None:
    class Scored(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = managed(ROWS)

        def forward(self, features: Any) -> Any:
            return self.rows(features)[0]["words"].values()

    with pytest.raises(
        ModelError, match=r"rows \(Managed.*\): scores are made of rows .*: give an example of a call"
    ):
        export_model(Scored(), tmp_path / "r", "m", ExportConfig(scores=True))
