"""Sequences: TorchRec's EmbeddingCollection, run eagerly on a KJT, is the oracle. And rows of tables."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
import tritonclient.utils as triton_errors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from export import ExportConfig, IdPolicy, OutputDtype, Sharding, WeightDtype, export_model
from export.errors import ModelError
from serving.backend.answering import Answerer
from serving.backend.metrics import LookupMetrics
from serving.bundle import DefaultRow
from serving.bundle.opening import open_bundle
from serving.client import AsyncLookupClient, LookupClient, Retries, Sequence
from serving.engine import Engine
from serving.errors import HostUnavailable, IdsOutside, InvalidRequest, Reason, ServerUnavailable
from serving.model.config_file import read_config, settings_of
from serving.model.settings import ServingSettings
from serving.ranks.direct import DirectCall, DirectHosts
from serving.ranks.hosts import OnLost
from serving.reference import pool
from serving.request import kjt
from serving.request.accept import accept
from serving.request.batches import batches_of
from serving.request.limits import Limits, grouped
from serving.request.tensors import EMBEDDINGS, SEQUENCES, Tensors
from tests.serving.backend.test_answering import Counter
from tests.support import oracle
from tests.support.commands import tbe_export
from tests.support.host_faults import until
from tests.support.hosts import MODEL, export_hosts, fleet
from tests.support.models import Bags, Spec, collection, flat, random_bags
from tests.support.positioned import positioned
from tests.support.quick_reload import quick_reload
from tests.support.sequences import POOLED, ROWS, Mixed, assert_rows, kjt_of, sequences
from tests.support.servers import Running, at_once, lens, row, running, tbe_serve

pytestmark = pytest.mark.usefixtures("quick_reload")

FP32 = ExportConfig(dtype={"*": WeightDtype.FP32})
SPECS = (*POOLED, *ROWS)


def assert_mixed(answer: Any, module: Mixed, bags: Mapping[str, Bags]) -> None:
    """That an answer is what both collections of a module answer to the same request."""
    assert {len(found) for found in answer.values()} == {len(next(iter(bags.values())))}
    if not any(bags.values()):  # without samples, TorchRec's KJT cannot be taken apart
        return
    with torch.no_grad():
        expected = module.pooled(kjt_of(bags)).to_dict()
    for name, rows in expected.items():
        np.testing.assert_allclose(answer[name], rows, rtol=1e-6, atol=4e-6, err_msg=name)
    assert_rows(answer, module.rows, bags)


@given(data=st.data())
@settings(max_examples=60)
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
    heights = {key: min(each.rows for each in (*pooled, *rows) if key in each.features) for key in readers}
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for samples in (0, 1, 5):
        bags = {
            key: [random.integers(0, height, size).tolist() for size in random.integers(0, 7, samples)]
            for key, height in heights.items()
        }
        answer, bag_kjt = engine.lookup(bags), kjt_of(bags)
        if not samples:
            assert {len(found) for found in answer.values()} == {0}
            continue
        with torch.no_grad():
            jagged = [module.rows(bag_kjt)[name] for names in module.rows._embedding_names_by_table for name in names]
            sums = [*module.pooled(bag_kjt).to_dict().values()]
        for specs_of, expected in ((pooled, sums), (rows, jagged)):
            names = [(key, spec.name) for spec in specs_of for key in spec.features]
            for (key, table), theirs in zip(names, expected, strict=True):
                ours = answer[key if readers.count(key) == 1 else f"{key}@{table}"]
                if specs_of is pooled:
                    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=4e-6)
                else:
                    np.testing.assert_array_equal(ours.values, theirs.values())
                    assert ours.lengths.tolist() == [len(bag) for bag in bags[key]]
    assert all(parity.trained is not None for parity in engine.bundle.manifest.parity)


@pytest.mark.parametrize("output", OutputDtype)
def test_every_dtype_is_compared_with_the_module(output: OutputDtype, tmp_path: Path) -> None:
    specs = tuple(Spec(each.value, 90, 16, "NONE", (each.value.lower(),)) for each in WeightDtype)
    config = ExportConfig(dtype={each.value: each for each in WeightDtype}, output_dtype=output)
    bundle = export_model(Mixed(rows=specs), tmp_path / "r", "m", config)
    manifest = open_bundle(bundle).manifest
    assert manifest.format_version == 7
    assert all(parity.trained is not None and parity.trained.cosine > 0.6 for parity in manifest.parity)
    assert tbe_export("verify", str(bundle)).exit_code == 0
    assert "NONE" in tbe_export("inspect", str(bundle)).stdout
    engine = Engine.open(bundle)
    for spec in specs:
        found = engine.lookup({spec.features[0]: [[7, 7], [], [89, 0]]})[spec.features[0]]
        expected = oracle.exported_table(bundle, spec.name)[[7, 7, 89, 0]]
        np.testing.assert_allclose(found.values, expected, rtol=1e-6 if output is OutputDtype.FP32 else 1e-3)
        np.testing.assert_array_equal(found.values, engine.rows(spec.name, [7, 7, 89, 0]))


def test_a_bundle_without_sequences_has_the_format_that_it_had(tmp_path: Path) -> None:
    manifest = open_bundle(export_model(collection(), tmp_path / "r", "m")).manifest
    assert manifest.format_version == 4


POLICIES: dict[str, Any] = {"item": IdPolicy.ZERO, "word": DefaultRow(default_row=9), "user": IdPolicy.MODULO}


@pytest.mark.parametrize("ranks", [1, 3])
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


def test_sequences_of_a_mixed_request_are_named_where_they_are_wrong(tmp_path: Path) -> None:
    engine = Engine.open(export_model(Mixed(), tmp_path / "r", "m", FP32))
    with pytest.raises(IdsOutside, match=r"feature 'words': expected .*, got 1000 for sample 1 \(values\[4\]\)"):
        engine.lookup({"user_id": [[1], [2]], "words": [[5], [6, 1000]]})


@pytest.mark.parametrize("kind", ["SUM", "MEAN", "weighted", "positioned", "NONE"])
def test_rows_are_those_of_the_table_however_it_is_pooled(kind: str, tmp_path: Path) -> None:
    specs = [Spec("item", 300, 32, "MEAN" if kind == "MEAN" else "SUM", ("recent", "seen"))]
    module: Any = {
        "positioned": lambda: positioned(specs, {"recent": 3, "seen": 2}),
        "weighted": lambda: collection(specs, weighted=True),
        "NONE": lambda: sequences(ROWS),
    }.get(kind, lambda: collection(specs))()
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    (table,) = [each for name, each in module.state_dict().items() if name.endswith("item.weight")]
    for ids in ([], [5], np.arange(299, -1, -1), [7] * 40):
        np.testing.assert_array_equal(engine.rows("item", ids), table.numpy()[np.array(ids, np.int64)])
    with pytest.raises(InvalidRequest, match="table 'recent': expected one of 'item'"):
        engine.rows("recent", [1])
    with pytest.raises(InvalidRequest, match="table 'item': expected integers in 1 dimension"):
        engine.rows("item", [[1]])


@pytest.mark.parametrize(
    ("lengths", "why"),
    [
        ([2, -1], "table 'word': expected lengths >= 0, got -1 for sample 0"),
        ([1, 3], "table 'word': expected its bags"),
    ],
)
def test_a_wrong_request_for_rows_is_refused_by_the_name_of_its_table(
    lengths: list[int], why: str, tmp_path: Path
) -> None:
    engine = Engine.open(export_model(Mixed(), tmp_path / "r", "m", FP32))
    asked = Tensors(None, np.array([1, 2]), np.array(lengths, np.int32), tables=["item", "word"])
    with pytest.raises(InvalidRequest, match=why):
        engine.outputs(asked)


def test_of_a_key_that_several_tables_read_rows_are_of_one(tmp_path: Path) -> None:
    """An id need be in the other tables no more than a request by features would let it."""
    specs = [Spec("small", 4, 8, "SUM", ("x",)), Spec("large", 90, 12, "SUM", ("x",))]
    module = collection(specs)
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    large = module.embedding_bags["large"].weight.detach().numpy()
    np.testing.assert_array_equal(engine.rows("large", [80, 3]), large[[80, 3]])


def test_tables_of_one_name_in_both_collections_are_two(tmp_path: Path) -> None:
    module = Mixed([Spec("t", 9, 8, "SUM", ("x",))], [Spec("t", 30, 4, "NONE", ("x", "y"))])
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    assert [table.name for table in engine.bundle.manifest.tables] == ["pooled.t", "rows.t"]
    bags = {"x": [[8], [1, 2]], "y": [[29, 28], []]}
    answer = engine.lookup(bags)
    assert list(answer) == ["x@pooled.t", "x@rows.t", "y"]
    assert_rows(answer, module.rows, bags, {"x": "x@rows.t"})


def test_scores_of_sequences_are_refused_by_name(tmp_path: Path) -> None:
    class Scored(Mixed):
        def forward(self, kjt: Any) -> Any:
            return self.pooled(kjt).values().sum(1, keepdim=True) + self.rows(kjt)["words"].values().sum()

    with pytest.raises(
        ModelError, match=r"rows \(EmbeddingCollection\): scores are made of embeddings that are pooled"
    ):
        export_model(Scored(), tmp_path / "r", "m", ExportConfig(scores=True))


def test_beside_weighted_tables(tmp_path: Path) -> None:
    """A KJT with weights for all ids: TorchRec's EmbeddingCollection takes no notice of them."""
    module: Any = nn.ModuleDict(
        {"w": collection([Spec("w", 50, 8, "SUM", ("k",))], weighted=True), "ec": sequences()}
    )
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    bags = random_bags(np.random.default_rng(0), ROWS, 5)
    assert_rows(engine.lookup({**bags, "k": ([1, 2], [1, 0, 1, 0, 0], [0.5, 3.0])}), module["ec"], bags)
    np.testing.assert_array_equal(engine.rows("w", [4]), module["w"].embedding_bags["w"].weight.detach()[[4]])


@pytest.mark.parametrize("longest", [4, 3000])
def test_merged_requests_are_answered_as_alone(longest: int, tmp_path: Path) -> None:
    """Of all kinds, short and long: calls are shared by features whose answers are small, and not by others."""
    module = Mixed()
    bundle = export_model(
        module, tmp_path / "r", "m", ExportConfig(dtype=FP32.dtype, id_policy={"item": IdPolicy.ZERO})
    )
    random = np.random.default_rng(1)
    asked = []
    for number in range(20):
        features = None if number % 3 == 0 else list(random.permutation([f for s in SPECS for f in s.features])[:2])
        bags = random_bags(random, SPECS, number % 4, features, longest)
        values, lengths = flat(bags)
        if number % 5 == 0 and "recent" in bags and values.size:
            values[-1] = 10**6 if list(bags)[-1] in ("recent", "seen") else values[-1]
        asked.append(Tensors(tuple(bags), values, lengths))
    asked[4].outputs, asked[6].outputs, asked[7].outputs = [EMBEDDINGS], [SEQUENCES], []
    asked.append(Tensors(None, np.arange(5), np.array([3, 2], np.int32), tables=["genre", "item"]))
    bad = Tensors(["words"], np.array([1, 1000]), np.array([2], np.int32))
    outcomes = answers_of(bundle, [*asked, bad])
    assert isinstance(outcomes[-1], IdsOutside)
    engine = Engine.open(bundle)
    for request, outcome in zip(asked, outcomes, strict=False):
        alone = engine.outputs(request)
        assert outcome.keys() == alone.keys() <= set(request.outputs)
        for name, numbers in alone.items():
            np.testing.assert_array_equal(outcome[name], numbers, err_msg=name)
        expected = pool(bundle, engine.bundle.manifest, request)
        if {EMBEDDINGS, SEQUENCES} <= {*request.outputs}:
            assert {name: [1, *each.shape] for name, each in outcome.items()} == expected.shapes
            assert list(expected.misses(expected.by_feature(outcome))) == []


def test_long_sequences_of_several_requests_take_several_calls(tmp_path: Path) -> None:
    module = Mixed()
    bundle = export_model(module, tmp_path / "r", "m", replace(FP32, id_policy={"item": IdPolicy.ZERO}))
    items = module.rows.embeddings["item"].weight.detach().numpy()
    random = np.random.default_rng(2)
    asked = [random.integers(-1, 300, size) for size in (20_000, 30_000, 0, 25_000)]
    requests = [Tensors(["recent"], ids, np.array([ids.size], np.int32)) for ids in asked]
    for ids, outcome in zip(asked, answers_of(bundle, requests), strict=True):
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
def test_nothing_is_looked_up_that_nobody_asked_for(outputs: list[str], looked_up: set[str], tmp_path: Path) -> None:
    engine = Engine.open(export_model(Mixed(), tmp_path / "r", "m", FP32))
    asked = Tensors(["user_id", "recent"], np.array([1, 2]), np.array([1, 1], np.int32), outputs=outputs)
    batches = batches_of(engine.schema, kjt.check([accept(engine.schema, asked)]))
    assert {name for batch in batches for name in batch.selection.names} == looked_up
    assert engine.outputs(asked).keys() == set(outputs)


def answers_of(bundle: Path, requests: list[Tensors], limits: Limits | None = None) -> list[Any]:
    """The outcomes of requests that come together."""
    engine = Engine.open(bundle)
    metrics = LookupMetrics(
        lambda name, *_: Counter(name, {}), {}, [table.name for table in engine.bundle.manifest.tables], 0.0
    )
    answerer = Answerer(engine, limits or ServingSettings(), metrics, None, pytest.fail)
    return answerer.answer(requests, lambda tensors: tensors, lambda _: False)


def test_an_answer_that_is_too_large_is_refused_before_anything_is_looked_up(tmp_path: Path) -> None:
    """Rows of `recent` take 32 · 4 bytes. Features that are pooled do not count, nor outputs that nobody wants."""
    bundle = export_model(Mixed(), tmp_path / "r", "m", FP32)
    least = ServingSettings(max_sequence_bytes=10 * 128)

    def asked(ids: int, *, said: int | None = None, **others: Any) -> Tensors:
        return Tensors(["recent"], np.zeros(ids, np.int64), np.array([said or ids], np.int32), **others)

    pooled = Tensors(["user_id"], np.zeros(500, np.int64), np.array([500], np.int32))
    rows = Tensors(None, np.zeros(11, np.int64), np.array([11], np.int32), tables=["item"])
    many = [asked(10), asked(11), asked(3, said=2**31 - 1), asked(9), asked(500, outputs=[EMBEDDINGS]), pooled, rows]
    outcomes = answers_of(bundle, many, least)
    for refused, size in ((outcomes[1], 11 * 128), (outcomes[2], (2**31 - 1) * 128), (outcomes[6], 11 * 128)):
        assert isinstance(refused, InvalidRequest)
        assert refused.reason is Reason.SIZE
        assert f"bytes of sequences: expected at most 1280 in a request, got {size}: send several" in str(refused)
        assert "--max-sequence-bytes" in str(refused)
    assert [each[SEQUENCES].size for each in (outcomes[0], outcomes[3])] == [320, 288]
    assert outcomes[4] == {}
    assert outcomes[5].keys() == {EMBEDDINGS}


def test_requests_are_grouped_by_the_bytes_of_their_rows(tmp_path: Path) -> None:
    engine = Engine.open(export_model(Mixed(), tmp_path / "r", "m", FP32))
    one = Tensors(["recent"], np.zeros(4, np.int64), np.array([4], np.int32))
    two = Tensors(["user_id"], np.zeros(4, np.int64), np.array([4], np.int32))
    accepted = [accept(engine.schema, each) for each in (one, one, two, one, one, two)]
    assert list(grouped(accepted, ServingSettings(max_sequence_bytes=2 * 4 * 128))) == [[0, 1, 2], [3, 4, 5]]


# --- Served


@dataclass(frozen=True)
class Served:
    server: Running
    module: Mixed
    bundle: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`m`, and `pooled` without sequences."""
    folder = tmp_path_factory.mktemp("served")
    module = Mixed()
    with quick_reload():
        serving = ServingSettings(max_sequence_bytes=1 << 20)
        bundle = export_model(module, folder / "r", "m", replace(FP32, serving=serving))
        export_model(collection(POOLED), folder / "r", "pooled", FP32)
    with running(folder / "r", "--allow", "shared-memory") as server:
        yield Served(server, module, bundle)


def check_together(lookup: Callable[[Any], Any], module: Mixed) -> None:
    """Requests of all kinds at once; those that are wrong are refused, and hurt nobody."""
    random = np.random.default_rng(3)
    asked = [random_bags(random, SPECS, number % 7, longest=9) for number in range(48)]
    some = [{key: asked[5][key] for key in keys} for keys in (("words", "user_id"), ("recent",), ("genres", "seen"))]
    wrong = [{"words": [[1], [1000]]}, {"genres": [[20]], "recent": [[1]]}, {"seen": [[-1]]}, {"nothing": [[1]]}] * 3
    answers = at_once([partial(lookup, each) for each in [*asked, *some, *wrong]])
    for request, answer in zip(asked, answers, strict=False):
        assert_mixed(answer, module, request)
    for request, answer in zip(some, answers[48:51], strict=True):
        whole = answers[5]
        assert list(answer) == list(request)
        for name, found in answer.items():
            theirs = whole[name]
            pairs = [(found.values, theirs.values)] if isinstance(found, Sequence) else [(found, theirs)]
            for ours, expected in pairs:
                np.testing.assert_array_equal(ours, expected)
    for refused in answers[51:]:
        assert isinstance(refused, InvalidRequest), refused


@pytest.mark.parametrize("shared_memory", [False, True], ids=["over gRPC", "through shared memory"])
def test_served_and_merged(served: Served, shared_memory: bool) -> None:
    with LookupClient(served.server.grpc, "m", 60, shared_memory=shared_memory) as client:
        info = client.info()
        assert info.sequences == {"recent", "seen", "words"}
        assert info.tables == {"user": 16, "genre": 8, "item": 32, "word": 32}
        check_together(client.lookup, served.module)
        answer = client.lookup({"words": [[7], [], [7, 8]]})
        assert not answer["words"].values.flags.writeable
        assert [len(answer["words"].rows(sample)) for sample in range(3)] == [1, 0, 2]
        with pytest.raises(IndexError):
            answer["words"].rows(3)
        kept = {number: client.lookup({"recent": [[number]]})["recent"].rows(0) for number in range(9)}
        items = served.module.rows.embeddings["item"].weight.detach().numpy()
        for number, rows in kept.items():  # no answer takes the memory of another
            np.testing.assert_array_equal(rows[0], items[number])


@pytest.mark.parametrize("shared_memory", [False, True], ids=["over gRPC", "through shared memory"])
def test_rows_are_served(served: Served, shared_memory: bool) -> None:
    """Of any table, of models with and without sequences."""
    state = served.module.state_dict()
    with LookupClient(served.server.grpc, "m", 60, shared_memory=shared_memory) as client:
        for table, key in (("user", "pooled.embedding_bags.user"), ("item", "rows.embeddings.item")):
            for ids in ([5], [], [3, 1, 3], np.arange(200, dtype=np.int32)):
                rows = client.rows(table, ids)
                np.testing.assert_array_equal(rows, state[f"{key}.weight"].numpy()[np.array(ids, np.int64)])
        with pytest.raises(InvalidRequest, match="table 'recent': expected one of 'user', 'genre', 'item', 'word'"):
            client.rows("recent", [1])
        with pytest.raises(InvalidRequest, match=r"table 'item': expected an id in \[0, 300\)"):
            client.rows("item", [300])
        with pytest.raises(
            InvalidRequest, match="bytes of sequences: expected at most 1048576 in a request, got 1048704"
        ):
            client.rows("item", np.zeros(8193, np.int64))
    with LookupClient(served.server.grpc, "pooled", 60, shared_memory=shared_memory) as client:
        assert client.rows("genre", [1, 2]).shape == (2, 8)
        assert client.lookup({"user_id": [1]}).keys() == {"user_id"}


def test_the_client_for_asyncio(served: Served) -> None:
    async def run() -> None:
        async with AsyncLookupClient(served.server.grpc, "m", 60) as client:
            bags = random_bags(np.random.default_rng(7), SPECS, 3)
            answers = await asyncio.gather(*(client.lookup(bags) for _ in range(5)))
            for answer in answers:
                assert_mixed(answer, served.module, bags)
            many = await asyncio.gather(*(client.rows("item", [number]) for number in range(5)))
            np.testing.assert_array_equal(np.concatenate(many), await client.rows("item", range(5)))

    asyncio.run(run())


def ask(served: Served, inputs: list[tuple[str, Any]], outputs: list[str] | None = None, **parameters: Any) -> Any:
    """What any KServe client sends, and gets: {output: array}."""
    sent = []
    for name, array in inputs:
        sent.append(
            triton.InferInput(name, list(array.shape), {"int64": "INT64", "int32": "INT32"}[str(array.dtype)])
        )
        sent[-1].set_data_from_numpy(array)
    wanted = None if outputs is None else [triton.InferRequestedOutput(name) for name in outputs]
    with triton.InferenceServerClient(served.server.grpc) as client:
        found = client.infer("m", sent, outputs=wanted, client_timeout=60, parameters=parameters or None)
    return {each.name: found.as_numpy(each.name) for each in found.get_response().outputs}


def test_any_client_of_the_protocol_gets_the_outputs_that_it_asks_for(served: Served) -> None:
    """docs/protocol.md: rows flat, feature-major, in the order asked for."""
    inputs = [("values", row(7, 3, 4, 1, 5, 6, 2)), ("lengths", lens(1, 0, 0, 2, 2, 2))]
    items, words = (served.module.rows.embeddings[name].weight.detach().numpy() for name in ("item", "word"))
    users = served.module.pooled.embedding_bags["user"].weight.detach().numpy()
    both = ask(served, inputs, features="words,recent,user_id")
    assert {name: each.shape for name, each in both.items()} == {"embeddings": (1, 2, 16), "sequences": (1, 96)}
    np.testing.assert_array_equal(both["sequences"][0], np.concatenate([words[[7]], items[[3, 4]]]).ravel())
    np.testing.assert_allclose(both["embeddings"][0], [users[1] + users[5], users[6] + users[2]], atol=1e-6)
    for name in both:
        (found,) = ask(served, inputs, [name], features="words,recent,user_id").items()
        assert found[0] == name
        np.testing.assert_array_equal(found[1], both[name])
    rows = ask(served, [("values", row(9, 8, 1)), ("lengths", lens(2, 1))], tables="user,word")
    assert rows.keys() == {"sequences"}
    np.testing.assert_array_equal(rows["sequences"][0], np.concatenate([users[[9, 8]].ravel(), words[1]]))
    assert ask(served, [("values", row(1)), ("lengths", lens(1))], features="user_id").keys() == {"embeddings"}


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        pytest.param({"tables": "user,user"}, "table 'user': expected each table once, got it twice", id="twice"),
        pytest.param(
            {"tables": "recent"}, "table 'recent': expected one of 'user', 'genre', 'item', 'word'", id="unknown"
        ),
        pytest.param({"tables": ""}, "tables: expected at least one of 'user'", id="none"),
        pytest.param({"tables": 3}, "parameter tables: expected comma-separated names, got 3", id="a number"),
        pytest.param(
            {"tables": "user", "features": "recent"}, "expected the parameter features or tables", id="both"
        ),
    ],
)
def test_tables_that_cannot_be_asked_for_are_refused(served: Served, parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(triton_errors.InferenceServerException, match=said) as caught:
        ask(served, [("values", row(1)), ("lengths", lens(1))], **parameters)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(triton_errors.InferenceServerException, match="tables: rows are answered in the output"):
        ask(served, [("values", row(1)), ("lengths", lens(1))], ["embeddings"], tables="user")


def test_a_line_of_json_is_answered_with_lists_of_rows(served: Served) -> None:
    asked = {"words": [[7], [], [8, 9]], "user_id": [[1], [2], []]}
    done = tbe_serve("lookup", "m", "--url", served.server.grpc, stdin=json.dumps(asked))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [len(rows) for rows in found["words"]] == [1, 0, 2]
    words = served.module.rows.embeddings["word"].weight.detach().numpy()
    np.testing.assert_array_equal(np.array(found["words"][2], np.float32), words[[8, 9]])
    table = tbe_serve("lookup", "m", "--url", served.server.grpc, "--table", stdin=json.dumps(asked))
    assert table.stdout.count("words") == 3


def test_bench_checks_sequences(served: Served) -> None:
    options = ("--bundle", str(served.bundle), "--samples", "3", "--clients", "2", "--seconds", "0.5")
    done = tbe_serve("bench", "m", "--url", served.server.grpc, *options, "--repeats", "2", "--check", "1")
    assert done.returncode == 0, done.stderr + done.stdout


# --- Over hosts


def noted(order: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        order.append(name)
        return function(*arguments)

    return called


def test_over_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in one process. Hosts are asked for all batches of a request before one is waited for."""
    module = Mixed()
    sharding = Sharding(
        ranks=4,
        ranks_per_host=2,
        types={"item": "row_wise", "word": "column_wise", "user": "table_wise", "genre": "data_parallel"},
    )
    router = export_hosts(tmp_path, module, replace(FP32, sharding=sharding))
    assert open_bundle(router).manifest.format_version == 7
    for each in open_bundle(router).manifest.hosts:
        part = open_bundle(router.parents[1] / each.model / str(each.version))
        assert part.manifest.format_version == 5
        config = read_config(part.path.parent)
        assert [output.name for output in config.output] == ["embeddings"]
        assert settings_of(config).max_request_samples < 70_000
    with (
        fleet(tmp_path, router) as served,
        LookupClient(served.router.grpc, MODEL, 60) as client,
    ):
        check_together(client.lookup, module)
        items = module.rows.embeddings["item"].weight.detach().numpy()
        ids = np.random.default_rng(0).integers(0, 300, 70_000)  # more than a host takes samples
        np.testing.assert_array_equal(client.rows("item", ids), items[ids])
        users = module.pooled.embedding_bags["user"].weight.detach().numpy()
        np.testing.assert_array_equal(client.rows("user", [3, 3, 499]), users[[3, 3, 499]])
        bags = random_bags(np.random.default_rng(7), SPECS, 5)
        with Engine.open(served.bundle, served.hosts) as engine:
            assert_mixed(engine.lookup(bags), module, bags)
            np.testing.assert_array_equal(engine.rows("item", ids), items[ids])
            order: list[str] = []
            for name in ("ask", "sums"):
                kind = DirectHosts if name == "ask" else DirectCall
                monkeypatch.setattr(kind, name, noted(order, name, getattr(kind, name)))
            assert_mixed(engine.lookup(bags), module, bags)
            asks = order.count("ask")
            assert asks > 1
            assert set(order[:asks]) == {"ask"}
            assert set(order[asks:]) == {"sums"}


def test_of_a_lost_host_requests_fail_alone_or_have_zeros(tmp_path: Path) -> None:
    """Rows of `item` are on one host, those of `word` on the other."""
    module = Mixed()
    types = {"item": "table_wise", "word": "table_wise", "user": "data_parallel", "genre": "data_parallel"}
    sharding = Sharding(ranks=2, ranks_per_host=1, types=types)
    router = export_hosts(tmp_path, module, replace(FP32, sharding=sharding))
    manifest = open_bundle(router).manifest
    (lost,) = (manifest.plan.ranks[shard.rank].host for shard in manifest.plan.shards_by_table["item"])
    (kept,) = (manifest.plan.ranks[shard.rank].host for shard in manifest.plan.shards_by_table["word"])
    assert lost != kept
    whole: dict[str, Any] = {"recent": [[1, 2], []], "words": [[3], [4, 5]], "user_id": [[6], [7]]}
    need: list[Any] = [whole, {"recent": [[5]]}, {"seen": [[], [8]]}]
    no_need: list[Any] = [{"words": [[3], [4, 5]], "user_id": [[6], [7]]}, {"recent": [[], []], "words": [[1], [2]]}]
    with (
        fleet(tmp_path, router, "--shard-timeout-ms", "1000") as served,
        LookupClient(served.router.grpc, MODEL, 60, retries=Retries(attempts=1)) as client,
        Engine.open(served.bundle, replace(served.hosts, on_lost={"item": OnLost.ZERO})) as engine,
    ):
        expected = [engine.lookup(each) for each in no_need]
        before = engine.lookup(whole)
        for server in served.servers[lost]:
            server.lose()
        answers = at_once([partial(client.lookup, each) for each in [*need, *no_need] * 4])
        assert len(answers) == 20
        for number, answer in enumerate(answers):
            if number % 5 < 3:
                assert isinstance(answer, HostUnavailable | ServerUnavailable), answer
                assert "tables 'item': host" in str(answer)
            else:
                assert_same(answer, expected[number % 5 - 3])
        assert isinstance(at_once([partial(client.rows, "item", [1])])[0], ServerUnavailable)
        np.testing.assert_array_equal(client.rows("word", [3]), before["words"].values[:1])
        found = engine.lookup(whole)
        assert not found["recent"].values.any()
        assert before["recent"].values.all()
        assert_same({"words": found["words"]}, {"words": before["words"]})


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, each in found.items():
        pairs = [each.values, expected[name].values] if isinstance(each, Sequence) else [each, expected[name]]
        np.testing.assert_array_equal(*pairs)


# --- Captured


def test_captured_requests_for_sequences_and_rows_are_replayed(tmp_path: Path) -> None:
    """By `bench --replay`, and to warm up."""
    module = Mixed()
    captured = tmp_path / "captured"
    captured.mkdir()
    serving = ServingSettings(capture=str(captured), capture_slow_ms=1e-6)
    bundle = export_model(module, tmp_path / "r", "m", replace(FP32, serving=serving))
    file = captured / "m.jsonl"
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        client.rows("item", [3, 4])
        client.lookup({"words": [[7], [8, 9]], "user_id": [[1], [2]]})
        with pytest.raises(InvalidRequest):
            client.rows("item", [300])
        until(lambda: file.exists() and file.read_text().count("\n") == 3, "three captured requests")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line.get("tables") for line in lines] == [["item"], None, ["item"]]
        options = (
            "--bundle",
            str(bundle),
            "--replay",
            str(file),
            "--clients",
            "1",
            "--seconds",
            "0.3",
            "--repeats",
            "2",
        )
        done = tbe_serve("bench", "m", "--url", server.grpc, *options, "--check", "1")
        assert "wrong" not in done.stderr, done.stderr
    done = tbe_serve("configure", str(bundle.parent), "--warm-up", str(file), "--no-capture", "--no-capture-slow-ms")
    assert done.returncode == 0, done.stderr
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        assert client.rows("item", [3]).shape == (1, 32)
