"""Sequences: TorchRec's EmbeddingCollection, run eagerly on a KJT, is the oracle."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from export import ExportConfig, IdPolicy, OutputDtype, Sharding, WeightDtype, export_model
from export.errors import ModelError
from serving.bundle import DefaultRow
from serving.bundle.load import open_bundle
from serving.bundle.manifest import Capability
from serving.bundle.tensor_names import EMBEDDINGS, SEQUENCES
from serving.engine import Engine
from serving.errors import IdsOutside, InvalidRequest, Reason
from serving.model.settings import ServingSettings
from serving.reference import pool
from serving.requests.accept import accept
from serving.requests.limits import grouped
from serving.requests.merge import merge_all
from serving.requests.types import Tensors
from serving.requests.validate import validate
from tests.support import bundle_reader
from tests.support.commands import tbe_export
from tests.support.long_cases import fewer_examples, one_in
from tests.support.merged_answers import merged_answers
from tests.support.models import Spec, collection, flat, random_bags
from tests.support.sequence_models import FP32, ROWS, SPECS, Mixed, assert_rows, kjt_of, sequences

pytestmark = pytest.mark.usefixtures("any_torchscript")


@fewer_examples
@given(data=st.data())
def test_random_modules_answer_as_torchrec_runs_them(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Keys are read by tables of both collections, and by several of one."""
    keys = ("a", "b", "c", "d", "e")
    dim = 4 * data.draw(st.integers(1, 4), label="dim of all sequences")

    def specs(prefix: str, most: int, pooling: st.SearchStrategy[str]) -> list[Spec]:
        return [
            Spec(
                f"{prefix}{number}",
                data.draw(st.integers(4, 60), label="rows"),
                dim if prefix == "s" else 4 * data.draw(st.integers(1, 4)),
                data.draw(pooling),
                tuple(data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True), label="keys")),
            )
            for number in range(data.draw(st.integers(1, most), label="tables"))
        ]

    pooled = specs("p", 2, st.sampled_from(["SUM", "MEAN"]))
    rows = specs("s", 3, st.just("NONE"))
    module = Mixed(pooled, rows, seed=data.draw(st.integers(0, 1000)))
    ranks = data.draw(st.sampled_from([1, 2, 4]), label="ranks")
    kinds = ["row_wise", "table_wise", "column_wise", "data_parallel", "grid_shard", "table_row_wise"]
    types = {spec.name: data.draw(st.sampled_from(kinds), label=spec.name) for spec in (*pooled, *rows)}
    sharding = Sharding(ranks=ranks, ranks_per_host=max(ranks // 2, 1), types=types) if ranks > 1 else Sharding()
    config = ExportConfig(dtype=FP32.dtype, sharding=sharding)
    engine = Engine.open(export_model(module, tmp_path_factory.mktemp("random") / "r", "m", config))
    readers = [key for spec in (*pooled, *rows) for key in spec.features]
    heights = {key: min(row.rows for row in (*pooled, *rows) if key in row.features) for key in readers}
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for samples in (0, 1, 5):
        bags = {
            key: [random.integers(0, row_count, size).tolist() for size in random.integers(0, 7, samples)]
            for key, row_count in heights.items()
        }
        answer, bag_kjt = engine.lookup(bags), kjt_of(bags)
        if not samples:
            assert {len(values) for values in answer.values()} == {0}
            continue
        with torch.no_grad():
            jagged = [module.rows(bag_kjt)[name] for names in module.rows._embedding_names_by_table for name in names]
            sums = [*module.pooled(bag_kjt).to_dict().values()]
        for specs_of, expected in ((pooled, sums), (rows, jagged)):
            names = [(key, spec.name) for spec in specs_of for key in spec.features]
            for (key, table), torchrec_rows in zip(names, expected, strict=True):
                ours = answer[key if readers.count(key) == 1 else f"{key}@{table}"]
                if specs_of is pooled:
                    np.testing.assert_allclose(ours, torchrec_rows, rtol=1e-6, atol=4e-6)
                else:
                    np.testing.assert_array_equal(ours.values, torchrec_rows.values())
                    assert ours.lengths.tolist() == [len(bag) for bag in bags[key]]
    assert all(parity.trained is not None for parity in engine.bundle.manifest.parity)


@pytest.mark.parametrize("output", one_in(2, OutputDtype))
def test_every_dtype_is_compared_with_the_module(output: OutputDtype, tmp_path: Path) -> None:
    specs = tuple(Spec(dtype.value, 90, 16, "NONE", (dtype.value.lower(),)) for dtype in WeightDtype)
    config = ExportConfig(dtype={dtype.value: dtype for dtype in WeightDtype}, output_dtype=output)
    bundle = export_model(Mixed(rows=specs), tmp_path / "r", "m", config)
    manifest = open_bundle(bundle).manifest
    assert {*manifest.requires} - {Capability.NO_PROGRAM} == {Capability.SEQUENCES}
    assert all(parity.trained is not None and parity.trained.cosine > 0.6 for parity in manifest.parity)
    assert tbe_export("verify", str(bundle)).exit_code == 0
    assert "NONE" in tbe_export("inspect", str(bundle)).stdout
    engine = Engine.open(bundle)
    for spec in specs:
        answer = engine.lookup({spec.features[0]: [[7, 7], [], [89, 0]]})[spec.features[0]]
        expected = bundle_reader.exported_table(bundle, spec.name)[[7, 7, 89, 0]]
        np.testing.assert_allclose(answer.values, expected, rtol=1e-6 if output is OutputDtype.FP32 else 1e-3)
        np.testing.assert_array_equal(answer.values, engine.rows(spec.name, [7, 7, 89, 0]))


def test_a_bundle_without_sequences_requires_no_sequences(tmp_path: Path) -> None:
    manifest = open_bundle(export_model(collection(), tmp_path / "r", "m")).manifest
    assert {*manifest.requires} - {Capability.NO_PROGRAM} == set()


POLICIES: dict[str, Any] = {"item": IdPolicy.ZERO, "word": DefaultRow(default_row=9), "user": IdPolicy.MODULO}


@pytest.mark.parametrize("ranks", one_in(2, [3, 1]))
def test_ids_outside_a_table_are_answered_by_its_policy(ranks: int, tmp_path: Path) -> None:
    """A row for each id, whatever becomes of it: lengths are those of the request."""
    module = Mixed()
    sharding = Sharding(ranks=ranks, types={"*": "row_wise"}) if ranks > 1 else Sharding()
    config = ExportConfig(dtype=FP32.dtype, id_policy=POLICIES, sharding=sharding)
    engine = Engine.open(export_model(module, tmp_path / "r", "m", config))
    items, words = (module.rows.embeddings[name].weight.detach().numpy() for name in ("item", "word"))
    answer = engine.lookup({"recent": [[-1, 7], [300], [299, 1 << 40, 5]], "words": [[1000], [-5, 3], []]})
    recent = answer["recent"]
    assert recent.lengths.tolist() == [2, 1, 3]
    np.testing.assert_array_equal(recent.values[[1, 3, 5]], items[[7, 299, 5]])
    assert not recent.values[[0, 2, 4]].any()
    np.testing.assert_array_equal(recent.rows(2)[0], items[299])
    np.testing.assert_array_equal(answer["words"].values, words[[9, 9, 3]])
    np.testing.assert_array_equal(engine.rows("item", [300, 1, -1])[1], items[1])
    users = module.pooled.embedding_bags["user"].weight.detach().numpy()
    np.testing.assert_array_equal(engine.rows("user", [501, -1]), users[[1, 499]])
    with pytest.raises(IdsOutside, match=r"feature 'genres': expected an id in \[0, 20\), got 20 for sample 1"):
        engine.lookup({"recent": [[-1], [2]], "genres": [[1], [3, 20]]})
    with pytest.raises(IdsOutside, match=r"table 'genre': expected an id in \[0, 20\), got 20 for sample 0"):
        engine.rows("genre", [3, 20])


def test_an_id_outside_in_a_sequence_is_named_with_its_sample(tmp_path: Path) -> None:
    engine = Engine.open(export_model(Mixed(), tmp_path / "r", "m", FP32))
    with pytest.raises(IdsOutside, match=r"feature 'words': expected .*, got 1000 for sample 1 \(values\[4\]\)"):
        engine.lookup({"user_id": [[1], [2]], "words": [[5], [6, 1000]]})


def test_tables_of_one_name_in_two_collections_get_different_names(tmp_path: Path) -> None:
    module = Mixed([Spec("t", 9, 8, "SUM", ("x",))], [Spec("t", 30, 4, "NONE", ("x", "y"))])
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    assert [table.name for table in engine.bundle.manifest.tables] == ["pooled.t", "rows.t"]
    bags = {"x": [[8], [1, 2]], "y": [[29, 28], []]}
    answer = engine.lookup(bags)
    assert list(answer) == ["x@pooled.t", "x@rows.t", "y"]
    assert_rows(answer, module.rows, bags, {"x": "x@rows.t"})


def test_scores_of_sequences_without_an_example_are_refused(tmp_path: Path) -> None:
    class Scored(Mixed):
        def forward(self, kjt: Any) -> Any:
            return self.pooled(kjt).values().sum(1, keepdim=True) + self.rows(kjt)["words"].values().sum()

    with pytest.raises(
        ModelError, match=r"rows \(EmbeddingCollection\): scores are made of rows .*: give an example of a call"
    ):
        export_model(Scored(), tmp_path / "r", "m", ExportConfig(scores=True))


def test_sequences_work_beside_weighted_tables(tmp_path: Path) -> None:
    """A KJT with weights for all ids: TorchRec's EmbeddingCollection takes no notice of them."""
    module: Any = nn.ModuleDict(
        {"w": collection([Spec("w", 50, 8, "SUM", ("k",))], weighted=True), "ec": sequences()}
    )
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    bags = random_bags(np.random.default_rng(0), ROWS, 5)
    assert_rows(engine.lookup({**bags, "k": ([1, 2], [1, 0, 1, 0, 0], [0.5, 3.0])}), module["ec"], bags)
    np.testing.assert_array_equal(engine.rows("w", [4]), module["w"].embedding_bags["w"].weight.detach()[[4]])


@pytest.mark.parametrize(("longest", "most_rows"), one_in(2, [(4, None), (3000, None), (4, 2)]))
def test_merged_requests_are_answered_as_alone(
    longest: int, most_rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all kinds, short and long: calls are shared by features whose answers are small, and not by others."""
    if most_rows is not None:  # each sequence takes several calls
        monkeypatch.setattr("serving.requests.merge_sequences._MOST_ROWS", most_rows)
        monkeypatch.setattr("serving.requests.merge_sequences._MOST_NUMBERS", 8)
    module = Mixed()
    bundle = export_model(
        module, tmp_path / "r", "m", ExportConfig(dtype=FP32.dtype, id_policy={"item": IdPolicy.ZERO})
    )
    random = np.random.default_rng(1)
    requests = []
    for number in range(20):
        features = None if number % 3 == 0 else list(random.permutation([f for s in SPECS for f in s.features])[:2])
        bags = random_bags(random, SPECS, number % 4, features, longest)
        values, lengths = flat(bags)
        if number % 5 == 0 and "recent" in bags and values.size:
            values[-1] = 10**6 if list(bags)[-1] in ("recent", "seen") else values[-1]
        requests.append(Tensors(tuple(bags), values, lengths))
    for number, outputs in {4: [EMBEDDINGS], 6: [SEQUENCES], 7: []}.items():
        requests[number] = replace(requests[number], outputs=outputs)
    requests.append(Tensors(None, np.arange(5), np.array([3, 2], np.int32), tables=["genre", "item"]))
    bad = Tensors(["words"], np.array([1, 1000]), np.array([2], np.int32))
    outcomes = merged_answers(bundle, [*requests, bad])
    assert isinstance(outcomes[-1], IdsOutside)
    engine = Engine.open(bundle)
    for request, outcome in zip(requests, outcomes, strict=False):
        alone = engine.outputs(request)
        assert outcome.keys() == alone.keys() <= set(request.outputs)
        for name, numbers in alone.items():
            np.testing.assert_array_equal(outcome[name], numbers, err_msg=name)
        expected = pool(bundle, engine.bundle.manifest, request)
        if {EMBEDDINGS, SEQUENCES} <= {*request.outputs}:
            assert {name: [1, *value.shape] for name, value in outcome.items()} == expected.shapes
            assert list(expected.misses(expected.by_feature(outcome))) == []


def test_long_sequences_of_several_requests_take_several_calls(tmp_path: Path) -> None:
    module = Mixed()
    bundle = export_model(module, tmp_path / "r", "m", replace(FP32, id_policy={"item": IdPolicy.ZERO}))
    items = module.rows.embeddings["item"].weight.detach().numpy()
    random = np.random.default_rng(2)
    id_arrays = [random.integers(-1, 300, size) for size in (20_000, 30_000, 0, 25_000)]
    requests = [Tensors(["recent"], ids, np.array([ids.size], np.int32)) for ids in id_arrays]
    for ids, outcome in zip(id_arrays, merged_answers(bundle, requests), strict=True):
        expected = np.where(ids[:, np.newaxis] < 0, 0, items[ids])
        np.testing.assert_array_equal(outcome[SEQUENCES].reshape(-1, 32), expected)


@pytest.mark.parametrize(
    ("outputs", "looked_up"),
    [
        pytest.param([EMBEDDINGS, SEQUENCES], {"user_id", "recent"}, id="both"),
        pytest.param([EMBEDDINGS], {"user_id"}, id="embeddings"),
        pytest.param([SEQUENCES], {"recent"}, id="sequences"),
        pytest.param([], set(), id="none"),
    ],
)
def test_unrequested_features_are_not_looked_up(outputs: list[str], looked_up: set[str], tmp_path: Path) -> None:
    engine = Engine.open(export_model(Mixed(), tmp_path / "r", "m", FP32))
    tensors = Tensors(["user_id", "recent"], np.array([1, 2]), np.array([1, 1], np.int32), outputs=outputs)
    batches = merge_all(engine.schema, validate([accept(engine.schema, tensors)]))
    assert {name for batch in batches for name in batch.feature_set.names} == looked_up
    assert engine.outputs(tensors).keys() == set(outputs)


def test_a_too_large_answer_is_refused_before_the_lookup(tmp_path: Path) -> None:
    """Rows of `recent` take 32 · 4 bytes. Features that are pooled do not count, nor outputs that nobody wants."""
    bundle = export_model(Mixed(), tmp_path / "r", "m", FP32)
    least = ServingSettings(max_sequence_bytes=10 * 128)

    def request_of(ids: int, *, said: int | None = None, **options: Any) -> Tensors:
        return Tensors(["recent"], np.zeros(ids, np.int64), np.array([said or ids], np.int32), **options)

    pooled = Tensors(["user_id"], np.zeros(500, np.int64), np.array([500], np.int32))
    rows = Tensors(None, np.zeros(11, np.int64), np.array([11], np.int32), tables=["item"])
    many = [
        request_of(10),
        request_of(11),
        request_of(3, said=2**31 - 1),
        request_of(9),
        request_of(500, outputs=[EMBEDDINGS]),
        pooled,
        rows,
    ]
    outcomes = merged_answers(bundle, many, least)
    for refused, size in ((outcomes[1], 11 * 128), (outcomes[2], (2**31 - 1) * 128), (outcomes[6], 11 * 128)):
        assert isinstance(refused, InvalidRequest)
        assert refused.reason is Reason.SIZE
        assert f"bytes of sequences: expected at most 1280 in a request, got {size}: send several" in str(refused)
        assert "--max-sequence-bytes" in str(refused)
    assert [outcome[SEQUENCES].size for outcome in (outcomes[0], outcomes[3])] == [320, 288]
    assert outcomes[4] == {}
    assert outcomes[5].keys() == {EMBEDDINGS}


def test_requests_are_grouped_by_the_bytes_of_their_rows(tmp_path: Path) -> None:
    engine = Engine.open(export_model(Mixed(), tmp_path / "r", "m", FP32))
    one = Tensors(["recent"], np.zeros(4, np.int64), np.array([4], np.int32))
    two = Tensors(["user_id"], np.zeros(4, np.int64), np.array([4], np.int32))
    accepted = [accept(engine.schema, request) for request in (one, one, two, one, one, two)]
    assert list(grouped(accepted, ServingSettings(max_sequence_bytes=2 * 4 * 128))) == [[0, 1, 2], [3, 4, 5]]
