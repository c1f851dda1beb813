"""Scores that are made of sequences: rows, lengths, ids and weights of a request reach the dense part."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from export import IdPolicy, OutputDtype, Sharding, export_model
from serving.backend.answering import Answerer
from serving.bundle.scores import JaggedInput, JaggedKind
from serving.engine import Engine
from serving.errors import InternalError, InvalidRequest
from serving.lookup import dense_program
from serving.lookup.dense_program import DenseProgram
from serving.model.settings import ServingSettings
from serving.requests import merge_sequences as sequences_module
from serving.requests.accept import accept
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode
from serving.requests.limits import grouped
from serving.requests.schema import scoring_schema
from serving.requests.types import Tensors
from tests.support.handwritten_dense_part import with_dense_part
from tests.support.history_model import (
    INPUTS,
    JAGGED,
    OUTPUTS,
    Relative,
    assert_scores,
    expected,
    random_histories,
    say,
    sums,
    with_histories,
)
from tests.support.managed_collision import collection_behind, mch, trained
from tests.support.managed_collision import kjt_of as raw_kjt_of
from tests.support.models import Spec, collection
from tests.support.sequence_models import FP32, POOLED, Mixed, sequences

MODULE = Mixed()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_histories(export_model(MODULE, tmp_path_factory.mktemp("scores") / "r", "m", FP32))


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Engine:
    return Engine.open(bundle)


def tensors_of_request(
    bags: Any, dense: Any, shared: Sequence[str] = (), outputs: Sequence[str] = tuple(OUTPUTS)
) -> Tensors:
    return replace(encode(bags, (), shared), outputs=outputs, dense=encode_dense(INPUTS, dense))


def together(engine: Engine, requests: Sequence[Tensors]) -> list[Any]:
    return engine.answer([accept(engine.schema, request) for request in requests]).outcomes()


def check(engine: Engine, module: Mixed, relative: bool = False, tolerance: float = 1e-5) -> None:
    """Requests of all sizes, each alone and all at once, beside lookups."""
    random = np.random.default_rng(0)
    requests = [random_histories(random, number % 5, longest=number % 4 * 3) for number in range(20)]
    answers = together(
        engine, [tensors_of_request(*request) for request in requests] + [encode({"words": [[1, 2]]})] * 2
    )
    for request, answer in zip(requests, answers, strict=False):
        right = expected(module, *request, relative)
        assert_scores(answer, right, tolerance)
        assert_scores(engine.score(*request), right, tolerance)
    for lookup in answers[20:]:
        assert list(lookup) == ["sequences"]


def test_requests_of_different_lengths_are_scored_alone_and_merged(engine: Engine) -> None:
    check(engine, MODULE)


@given(st.data())
def test_merging_does_not_change_an_answer(engine: Engine, data: st.DataObject) -> None:
    """Scores of any keys once, beside sequences, embeddings and lookups."""
    random = np.random.default_rng(data.draw(st.integers(0, 1000), label="seed"))
    requests = []
    for _ in range(data.draw(st.integers(1, 6), label="requests")):
        samples = data.draw(st.integers(0, 4), label="samples")
        bags, dense = random_histories(random, samples, longest=data.draw(st.integers(0, 5), label="longest"))
        shared = data.draw(st.lists(st.sampled_from(list(bags)), unique=True, max_size=4), label="once")
        user, _ = random_histories(random, 1)
        outputs = data.draw(
            st.lists(st.sampled_from([*OUTPUTS, "sequences"]), min_size=1, unique=True), label="outputs"
        )
        bags |= {name: user[name] for name in shared}
        requests.append(tensors_of_request(bags, dense, shared, outputs))
    for request, answer in zip(requests, together(engine, requests), strict=True):
        alone = engine.outputs(request)
        assert answer.keys() == alone.keys() == {*request.outputs}
        for name, numbers in alone.items():
            np.testing.assert_allclose(answer[name], numbers, rtol=1e-5, atol=1e-5, err_msg=name)


def test_features_may_be_asked_for_in_any_order(engine: Engine) -> None:
    bags, dense = random_histories(np.random.default_rng(1), 4)
    turned = {name: bags[name] for name in reversed(bags)}
    for name, numbers in engine.score(bags, dense).items():
        np.testing.assert_array_equal(engine.score(turned, dense)[name], numbers)


def test_rows_are_answered_only_where_they_are_asked_for(engine: Engine) -> None:
    bags, dense = random_histories(np.random.default_rng(2), 4)
    right = engine.lookup(bags)
    (alone,) = together(engine, [tensors_of_request(bags, dense)])
    assert list(alone) == list(OUTPUTS)
    (both,) = together(engine, [tensors_of_request(bags, dense, outputs=("total", "sequences", "embeddings"))])
    assert both.keys() == {"total", "sequences", "embeddings"}
    np.testing.assert_array_equal(both["total"], alone["total"])
    rows = np.concatenate([right[name].values.ravel() for name in ("recent", "seen", "words")])
    np.testing.assert_array_equal(both["sequences"], rows)


@pytest.mark.parametrize(
    "shared", [["recent"], ["words", "genres"], ["recent", "price"], ["recent", "seen", "words"]]
)
@pytest.mark.parametrize("samples", [0, 1, 5])
def test_shared_features_count_for_each_sample(engine: Engine, shared: list[str], samples: int) -> None:
    random = np.random.default_rng(3)
    bags, dense = random_histories(random, samples)
    user, prices = random_histories(random, 1)
    short = {name: user[name] if name in shared else bags[name] for name in bags}
    repeated = {name: user[name] * samples if name in shared else bags[name] for name in bags}
    inputs, every = (
        (prices, {"price": np.repeat(prices["price"], samples, axis=0)}) if "price" in shared else (dense,) * 2
    )
    right = expected(MODULE, repeated, every)
    assert_scores(engine.score(short, inputs, shared=shared), right)
    neighbours = [random_histories(random, number) for number in range(3)]
    answers = together(
        engine,
        [
            tensors_of_request(*neighbours[1]),
            tensors_of_request(short, inputs, shared),
            tensors_of_request(*neighbours[2]),
        ],
    )
    assert_scores(answers[1], right)
    for other, answer in zip(neighbours[1:], answers[::2], strict=True):
        assert_scores(answer, expected(MODULE, *other))


def test_samples_are_scored_some_at_a_time(engine: Engine, fixed: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run = DenseProgram._run

    def spy(self: DenseProgram, embeddings: Any, inputs: Any) -> Any:
        sizes.append(len(embeddings))
        return run(self, embeddings, inputs)

    monkeypatch.setattr(dense_program, "SLICE", 3)
    monkeypatch.setattr(DenseProgram, "_run", spy)
    check(engine, MODULE)
    assert max(sizes) == 3, "some were not cut"
    assert fixed.score(of_recent([[n, 2, 3] for n in range(8)]))["ids"].tolist() == [[n, 2, 3] for n in range(8)]
    assert sizes[-3:] == [3, 3, 2]


def test_a_model_that_mixes_samples_scores_each_request_by_itself(tmp_path: Path) -> None:
    bundle = with_histories(export_model(MODULE, tmp_path / "r", "m", FP32), Relative(), mixes_samples=True)
    check(Engine.open(bundle), MODULE, relative=True)


@pytest.mark.parametrize("ranks", [1, 3])
def test_fp16_and_sharded_models_score_sequences(ranks: int, tmp_path: Path) -> None:
    sharding = Sharding(ranks=ranks, types={"*": "row_wise", "word": "column_wise"})
    config = replace(FP32, output_dtype=OutputDtype.FP16, sharding=sharding)
    check(Engine.open(with_histories(export_model(MODULE, tmp_path / "r", "m", config))), MODULE, tolerance=2e-3)


def test_ids_outside_are_zero_rows_and_reach_the_dense_part_unchanged(tmp_path: Path) -> None:
    config = replace(FP32, id_policy={"item": IdPolicy.ZERO, "genre": IdPolicy.ZERO, "word": IdPolicy.ERROR})
    engine = Engine.open(with_histories(export_model(MODULE, tmp_path / "r", "m", config)))
    requests = [random_histories(np.random.default_rng(seed), 3) for seed in range(4)]
    for bags, _ in requests[1:]:
        bags["recent"][1] = [-1, 5, -7]
        bags["genres"][2] = [-1, 3]
    bad = tensors_of_request({**requests[0][0], "words": [[1000], [], []]}, requests[0][1])
    answers = together(
        engine, [tensors_of_request(*requests[0]), bad, *(tensors_of_request(*request) for request in requests[1:])]
    )
    assert isinstance(answers.pop(1), InvalidRequest)
    for request, answer in zip(requests, answers, strict=True):
        assert_scores(answer, expected(MODULE, *request))


class OfRaw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pooled = collection(POOLED)
        specs = [Spec("item", 60, 16, "NONE", ("recent",))]
        self.rows = trained(collection_behind({"item": mch(60)}, specs), keys=("recent",))


class Firsts(nn.Module):
    """The sum of rows, and of the lower bits of the ids."""

    def forward(self, _: Tensor, rows: Tensor, lengths: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return sums(rows, lengths), sums(ids & 0xFF, lengths)


OF_RECENT = tuple(JaggedInput(kind, "recent") for kind in (JaggedKind.ROWS, JaggedKind.LENGTHS, JaggedKind.IDS))


def test_raw_ids_reach_the_dense_part_unmapped(tmp_path: Path) -> None:
    module = OfRaw()
    bundle = export_model(module, tmp_path / "r", "m", FP32)
    with_dense_part(bundle, Firsts(), (), {"sum": (16,), "bits": ()}, say(jagged=OF_RECENT))
    random = np.random.default_rng(0)
    raw = [[int(id_) * 1_000_003**2 for id_ in random.integers(-100, 200, size)] for size in (3, 0, 9)]
    scores = Engine.open(bundle).score({"user_id": [[1], [], [2]], "genres": [[], [1], []], "recent": raw})
    with torch.no_grad():
        answer, _ = module.rows.eval()(raw_kjt_of({"recent": raw}))
    rows = [bag_rows.sum(0).numpy() for bag_rows in answer["recent"].to_dense()]
    np.testing.assert_allclose(scores["sum"], rows, rtol=1e-5, atol=1e-5)
    assert scores["bits"].tolist() == [sum(id_ & 0xFF for id_ in bag) for bag in raw]


class OfRowsAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = sequences()


def test_a_model_of_sequences_alone_is_scored(tmp_path: Path) -> None:
    module = OfRowsAlone()
    bundle = export_model(module, tmp_path / "r", "m", FP32)
    with_dense_part(bundle, Firsts(), (), {"sum": (32,), "bits": ()}, say(jagged=OF_RECENT))
    engine = Engine.open(bundle)
    items = module.rows.embeddings["item"].weight.detach().numpy()
    requests: list[Any] = [[[1, 2], [], [3]], [], [[], []], [[299]], [[], [], [5]]]
    tensors = [
        replace(encode({"recent": recent, "seen": recent, "words": recent}), outputs=("sum", "bits"))
        for recent in requests
    ]
    alone = [engine.outputs(tensor) for tensor in tensors]
    for recent, answer in zip(requests * 2, [*together(engine, tensors), *alone], strict=True):
        right = np.array([items[bag].sum(0) if bag else np.zeros(32) for bag in recent]).reshape(-1, 32)
        np.testing.assert_allclose(answer["sum"], right, rtol=1e-6, atol=1e-6)
        assert answer["bits"].tolist() == [sum(bag) & 0xFF if len(bag) < 2 else sum(bag) for bag in recent]


class Around(nn.Module):
    """Pooled tables before its sequences, and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.rows, self.genre = collection(POOLED[:1]), sequences(), collection(POOLED[1:], seed=2)


class Everything(nn.Module):
    """What is pooled, weighed by its column, and the sum of the rows of each sequence."""

    def forward(
        self, embeddings: Tensor, a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, c: Tensor, of_c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pooled = embeddings.float() * torch.arange(embeddings.size(1))
        return pooled.sum(1), sums(a, of_a), sums(b, of_b), sums(c, of_c)


SEQUENCES = ("recent", "seen", "words")
EVERYTHING = tuple(JaggedInput(kind, key) for key in SEQUENCES for kind in (JaggedKind.ROWS, JaggedKind.LENGTHS))


@pytest.mark.parametrize(("ranks", "output"), [(1, OutputDtype.FP32), (3, OutputDtype.FP16)])
@pytest.mark.parametrize("model", [Mixed, Around, OfRowsAlone])
def test_one_call_answers_a_request_as_several_calls_do(
    model: type[nn.Module], ranks: int, output: OutputDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and a request without samples, too."""
    sharding = Sharding(ranks=ranks, types={"*": "row_wise", "word": "column_wise"})
    bundle = export_model(model(), tmp_path / "r", "m", replace(FP32, output_dtype=output, sharding=sharding))
    outputs = {"pooled": (), **{f"of_{key}": (32,) for key in SEQUENCES}}
    engine = Engine.open(with_dense_part(bundle, Everything(), (), outputs, say(jagged=EVERYTHING)))
    random = np.random.default_rng(0)
    calls = []
    for number in range(40):
        bags, _ = random_histories(random, number % 5, longest=number % 4 * 4)
        if model is OfRowsAlone:
            bags = {key: bags[key] for key in SEQUENCES}
        if number % 3 == 0:  # some of the keys have no ids at all, or none has
            bags |= {key: [[]] * (number % 5) for key in random.permutation([*bags])[: number // 3]}
        request = replace(encode(bags), outputs=tuple(outputs))
        answered = engine.answer([accept(engine.schema, request)])
        calls.append(len(answered.batches))
        with monkeypatch.context() as patch:
            patch.setattr(sequences_module, "_MOST_NUMBERS", 0)
            apart = engine.answer([accept(engine.schema, request)])
        assert len(apart.batches) > 1 or model is OfRowsAlone or not number % 5
        for name, numbers in apart.outputs()[0].items():
            np.testing.assert_array_equal(answered.outputs()[0][name], numbers, err_msg=f"{name} of {number}")
    assert calls == [1 if number % 5 else calls[0] for number in range(40)]


class Weighs(nn.Module):
    def forward(self, embeddings: Tensor, weights: Tensor, lengths: Tensor) -> tuple[Tensor]:
        return (embeddings.float().sum(1) + 100 * sums(weights, lengths),)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pooled = collection(POOLED, weighted=True)
        self.rows = sequences()


def test_weights_reach_the_dense_part_unchanged(tmp_path: Path) -> None:
    bundle = export_model(Weighted(), tmp_path / "r", "m", FP32)
    jagged = (JaggedInput(JaggedKind.WEIGHTS, "genres"), JaggedInput(JaggedKind.LENGTHS, "genres"))
    engine = Engine.open(with_dense_part(bundle, Weighs(), (), {"score": ()}, say(jagged=jagged)))
    bags: dict[str, Any] = {
        "user_id": ([3, 4], [1, 1], [0.5, 2.0]),
        "genres": ([1, 2, 3], [2, 1], [0.25, 0.5, -1.0]),
        "recent": ([1, 2], [0, 2]),
        "seen": ([], [0, 0]),
        "words": ([1], [1, 0]),
    }
    pooled = engine.lookup(bags)
    right = pooled["user_id"].sum(1) + pooled["genres"].sum(1) + 100 * np.array([0.75, -1.0])
    np.testing.assert_allclose(engine.score(bags)["score"], right, rtol=1e-5)


class Fixed(nn.Module):
    """Three recent items for each sample, as a tensor."""

    def forward(self, embeddings: Tensor, recent: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        samples = embeddings.shape[0]
        return recent.view(samples, 3, 32)[:, 0], ids.view(samples, 3).float()


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    bundle = export_model(MODULE, tmp_path_factory.mktemp("fixed") / "r", "m", FP32)
    jagged = (OF_RECENT[0], OF_RECENT[2])
    said = say(jagged=jagged, fixed_lengths={"recent": 3})
    return Engine.open(with_dense_part(bundle, Fixed(), (), {"first": (32,), "ids": (3,)}, said))


def of_recent(recent: Any, shared: Sequence[str] = ()) -> dict[str, Any]:
    samples = len(recent) if not shared else 2
    return {"recent": recent, **{name: [[1]] * samples for name in ("user_id", "genres", "seen", "words")}}


def test_a_model_with_a_fixed_length_is_scored(fixed: Engine) -> None:
    items = MODULE.rows.embeddings["item"].weight.detach().numpy()
    scores = fixed.score(of_recent([[1, 2, 3], [4, 5, 6]]))
    np.testing.assert_array_equal(scores["first"], items[[1, 4]])
    assert scores["ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
    scores = fixed.score(of_recent([[7, 8, 9]], ["recent"]), shared=["recent"])
    assert scores["ids"].tolist() == [[7, 8, 9]] * 2
    assert fixed.score(of_recent([]))["ids"].shape == (0, 3)
    assert len(fixed.lookup(of_recent([[1, 2]]))["recent"].values) == 2, "a lookup may have any number"


@pytest.mark.parametrize(
    ("recent", "shared", "why"),
    [
        ([[1, 2, 3], [1, 2, 3], [1, 2]], (), "got 2 in sample 2"),
        ([[], [1, 2, 3]], (), "got 0 in sample 0"),
        ([[1, 2, 3, 4]], ["recent"], "got 4 in sample 0"),
    ],
)
def test_other_lengths_are_refused_by_key_and_sample(fixed: Engine, recent: Any, shared: Any, why: str) -> None:
    expected = f"feature 'recent': expected 3 ids for each sample, the model takes so many, {why}"
    with pytest.raises(InvalidRequest) as refused:
        fixed.score(of_recent(recent, shared), shared=shared)
    assert str(refused.value) == expected


@pytest.mark.parametrize(
    ("lengths", "why"),
    [
        ([1, -1, *[0] * 8], "feature 'user_id': expected lengths >= 0, got -1 for sample 1"),
        ([9, *[0] * 9], r"feature 'user_id': expected its bags to take ids \[0, 9\) of `values`, got 2 ids"),
    ],
)
def test_wrong_lengths_are_refused_before_they_are_used(engine: Engine, lengths: list[int], why: str) -> None:
    wrong = replace(
        tensors_of_request(*random_histories(np.random.default_rng(0), 2)),
        values=np.array([1, 2]),
        lengths=np.array(lengths, np.int32),
    )
    with pytest.raises(InvalidRequest, match=why):
        engine.outputs(wrong)


def bytes_of(bags: Mapping[str, Any], recent: int = 1) -> int:
    """Of the jagged inputs; those of `recent` count so often."""
    ids = {name: sum(map(len, column)) for name, column in bags.items()}
    recent_bytes = ids["recent"] * (32 * 4 + 8) + len(bags["recent"]) * 4
    return (
        recent_bytes * recent
        + ids["words"] * 32 * 4
        + ids["genres"] * 8
        + 4 * (len(bags["words"]) + len(bags["genres"]))
    )


def test_inputs_of_scores_are_limited_for_a_request_and_a_group(engine: Engine) -> None:
    bags, dense = random_histories(np.random.default_rng(4), 6)
    request = accept(engine.schema, tensors_of_request(bags, dense))
    assert request.jagged_bytes == bytes_of(bags)
    tight = ServingSettings(max_sequence_bytes=request.jagged_bytes)
    assert accept(engine.schema, tensors_of_request(bags, dense), tight).samples == 6
    with pytest.raises(
        InvalidRequest, match=r"bytes of sequences: expected at most \d+ in a request, got \d+: send several"
    ):
        accept(
            engine.schema,
            tensors_of_request(bags, dense),
            replace(tight, max_sequence_bytes=request.jagged_bytes - 1),
        )
    assert [*grouped([request] * 3, tight)] == [[0], [1], [2]]
    assert [*grouped([request] * 4, replace(tight, max_sequence_bytes=2 * request.jagged_bytes))] == [[0, 1], [2, 3]]
    lookup = accept(engine.schema, encode({"user_id": [[1]]}))
    assert lookup.jagged_bytes == 0

    user = {**bags, "recent": [[1, 2, 3]]}
    shared = accept(engine.schema, tensors_of_request(user, dense, ["recent"]))
    assert shared.jagged_bytes == bytes_of(user, recent=6)
    both = tensors_of_request(bags, dense, outputs=("total", "sequences"))
    rows = sum(len(bag) for name in ("recent", "seen", "words") for bag in bags[name]) * 32 * 4
    with pytest.raises(InvalidRequest, match=f"got {bytes_of(bags) + rows}: "):
        accept(engine.schema, both, tight)


class Largest(nn.Module):
    """It fails without ids."""

    def forward(self, embeddings: Tensor, ids: Tensor) -> tuple[Tensor]:
        return (embeddings.float().sum(1) + ids.max(),)


def test_a_program_that_needs_ids_fails_only_requests_without_them(tmp_path: Path) -> None:
    bundle = export_model(MODULE, tmp_path / "r", "m", FP32)
    jagged = (JaggedInput(JaggedKind.IDS, "recent"),)
    engine = Engine.open(
        with_dense_part(bundle, Largest(), (), {"score": ()}, say(jagged=jagged, mixes_samples=True))
    )
    log: list[str] = []
    metrics: Any = _NoMetrics()
    answerer = Answerer(engine, ServingSettings(), metrics, None, log.append, lambda _: None)
    bags: list[Any] = [[[1, 9]], [[]], [[2]]]
    requests = [replace(encode(of_recent(recent)), outputs=("score",)) for recent in bags]
    first, failed, last = answerer.answer(requests, lambda tensors: tensors, lambda _: False)
    assert isinstance(failed, InternalError)
    assert "lookup failed" in log[0]
    assert first["score"][0] - last["score"][0] == pytest.approx(7, abs=1e-3)  # type: ignore[index]


class _NoMetrics:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_a_probe_is_scored_by_the_program_alone(engine: Engine) -> None:
    """As an export does it: inputs are the dense ones, then the jagged ones."""
    bags, dense = random_histories(np.random.default_rng(5), 3)
    answer = engine.lookup(bags)
    part = engine.bundle.manifest.dense_part
    assert part is not None
    assert part.jagged == JAGGED
    ids = {name: np.array([id_ for bag in column for id_ in bag], np.int64) for name, column in bags.items()}
    lengths = {name: np.array([len(bag) for bag in column], np.int32) for name, column in bags.items()}
    of: dict[JaggedKind, Any] = {JaggedKind.LENGTHS: lengths, JaggedKind.IDS: ids}
    jagged = [
        answer[jagged_input.name].values
        if jagged_input.kind is JaggedKind.ROWS
        else of[jagged_input.kind][jagged_input.name]
        for jagged_input in part.jagged
    ]
    pooled = np.concatenate([answer["user_id"], answer["genres"]], axis=1)
    (scores,) = DenseProgram(engine.bundle, scoring_schema(engine.bundle.manifest, part)).score(
        pooled, [[dense["price"], *jagged]], [3]
    )
    for name, numbers in engine.score(bags, dense).items():
        np.testing.assert_array_equal(scores[name], numbers)
