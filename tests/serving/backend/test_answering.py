"""Under more load than there is capacity some are refused, soon and unseen; the others are answered as ever."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export import ExportConfig, OutputDtype, WeightDtype, export_model
from serving import engine
from serving.backend import answering
from serving.backend.answering import Answerer
from serving.backend.metrics import LookupMetrics
from serving.bundle.tensor_names import EMBEDDINGS
from serving.engine import Engine
from serving.errors import InvalidRequest, RequestCancelled, ServerUnavailable, ServingError
from serving.log import Sampled
from serving.lookup.batch_answer import BatchAnswer
from serving.model.settings import LARGEST_HANDOVER, ServingSettings
from serving.requests.batches import Batch
from serving.requests.limits import Limits
from serving.requests.types import Tensors
from tests.support.leak_check import without_collector
from tests.support.models import Spec, collection

BUSY_MS = 100


class Counter:
    """A metric of Triton's."""

    def __init__(self, name: str, counts: dict[str, float]) -> None:
        self._name, self._counts = name, counts

    def Metric(self, labels: Any) -> "Counter":  # noqa: N802, ARG002
        return self

    def increment(self, value: float) -> None:
        self._counts[self._name] = self._counts.get(self._name, 0) + value

    def set(self, value: float) -> None: ...


def counting(counts: dict[str, float], tables: Sequence[str]) -> LookupMetrics:
    """Metrics that add to `counts`, by name."""
    return LookupMetrics(
        lambda name, *_: Counter(name, counts), {}, tables, 0.0, kernels="avx2", has_slow_kernels=False
    )


class Bench:
    """An answerer whose TBE calls take as long as is said, by a clock that nothing else moves."""

    def __init__(
        self,
        bundle: Path,
        monkeypatch: pytest.MonkeyPatch,
        limits: Limits,
        largest_handover: int = LARGEST_HANDOVER,
    ) -> None:
        self.now = 0.0
        self.call_ms = 0.0
        self.decoded = self.asked_for = 0
        self.counts: dict[str, float] = {}
        self.refused: list[str] = []
        self.shed: list[str] = []
        self.engine = Engine.open(bundle)
        look_up = self.engine.ranks.answer

        def slow(batches: Sequence[Batch]) -> list[BatchAnswer]:
            self.now += self.call_ms / 1e3
            return look_up(batches)

        for module in (answering, engine):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)
        monkeypatch.setattr(self.engine.ranks, "answer", slow)
        self.metrics = counting(self.counts, ["a"])
        self.answerer = Answerer(
            self.engine,
            limits,
            self.metrics,
            None,
            lambda _: None,
            self.refused.append,
            largest_handover,
            say_shed=Sampled(self.shed.append),
        )
        self.tensors = Tensors(["user_id"], np.array([1]), np.array([1], np.int32))
        self.expected = self.engine.outputs(self.tensors)[EMBEDDINGS]

    def answer(
        self,
        requests: int,
        call_ms: float,
        decode: Callable[[Tensors], Tensors] | None = None,
        cancelled: Callable[[int], bool] | None = None,
    ) -> str:
        """Letters: an answer, a refusal because of load, an invalid request, one whose caller has gone."""
        self.call_ms = call_ms
        batch = [replace(self.tensors, trace=str(number)) for number in range(requests)]

        def is_gone(tensors: Tensors) -> bool:
            self.asked_for += 1
            return cancelled is not None and cancelled(int(tensors.trace or 0))

        def count(tensors: Tensors) -> Tensors:
            self.decoded += 1
            return tensors

        outcomes = self.answerer.answer(batch, decode or count, is_gone)
        said = ""
        for outcome in outcomes:
            if isinstance(outcome, ServerUnavailable):
                assert "busy" in str(outcome)
                assert f"{BUSY_MS} ms" in str(outcome)
                said += "r"
            elif isinstance(outcome, InvalidRequest):
                said += "i"
            elif isinstance(outcome, RequestCancelled):
                said += "g"
            else:
                assert isinstance(outcome, dict)
                np.testing.assert_array_equal(outcome["embeddings"], self.expected)
                said += "a"
        return said

    @property
    def shed_count(self) -> float:
        self.metrics.publish()
        return self.counts.get("tbe_shed_total", 0)


@pytest.fixture
def bench(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """One request in a call, and never more than eight handed over."""
    return Bench(mixed, monkeypatch, ServingSettings(merged_requests=1, max_busy_ms=BUSY_MS), largest_handover=8)


@pytest.mark.promise("A backlog longer than `max-busy-ms` is refused before it is looked up")
def test_the_longest_waiting_requests_of_a_slow_group_are_refused_first(bench: Bench) -> None:
    assert bench.answer(7, 30) == "rrraaaa"
    assert bench.decoded == 4
    assert bench.shed_count == 3
    (line,) = bench.shed  # one every ten seconds at most
    assert line.startswith("busy: 7 requests or more waited")


def test_a_group_within_max_busy_ms_is_answered_whole(bench: Bench) -> None:
    assert bench.answer(8, 10) == "a" * 8
    assert bench.shed_count == 0


def test_a_group_of_up_to_four_slow_requests_is_not_refused(bench: Bench) -> None:
    assert bench.answer(4, 5000) == "aaaa"
    bench.now += 1
    assert bench.answer(5, 5000) == "raaaa"


def test_requests_that_were_merged_are_refused_together(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the requests that were decoded together, too: their ids make several calls."""
    bench = Bench(mixed, monkeypatch, ServingSettings(merged_requests=6, max_call_ids=1, max_busy_ms=BUSY_MS))
    assert bench.answer(12, 30) == "r" * 6 + "rraaaa"
    assert bench.decoded == 6


def test_an_invalid_request_is_refused_without_cost_to_others(bench: Bench) -> None:
    def refuse_every_other(tensors: Tensors) -> Tensors:
        bench.decoded += 1
        if bench.decoded % 2:
            raise InvalidRequest("no")
        return tensors

    assert bench.answer(7, 19, refuse_every_other) == "iaiaiai"


@pytest.mark.promise("A backlog longer than `max-busy-ms` is refused before it is looked up")
def test_consecutive_full_handovers_count_as_one_backlog(bench: Bench) -> None:
    """Triton hands over so many at most: more wait behind them, and are refused until fewer do."""
    assert bench.answer(8, 19) == "rraaaaaa"
    assert bench.answer(8, 19) == "r" * 8
    assert bench.answer(8, 19) == "r" * 8
    assert bench.answer(3, 19) == "aaa"
    assert bench.answer(8, 10) == "a" * 8
    assert bench.decoded == 6 + 3 + 8


def test_a_full_handover_after_a_pause_starts_a_new_backlog(bench: Bench) -> None:
    assert bench.answer(8, 19) == "rraaaaaa"
    bench.now += 0.1
    assert bench.answer(8, 19) == "rraaaaaa"


def test_cancelled_requests_are_not_looked_up(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(mixed, monkeypatch, ServingSettings(merged_requests=64, max_busy_ms=BUSY_MS))
    assert bench.answer(1, 2000) == "a"
    assert bench.answer(200, 1, cancelled=lambda _: True) == "g" * 200
    assert bench.decoded == 1
    bench.metrics.publish()
    assert bench.counts["tbe_cancelled_total"] == 200


def test_cancelled_requests_in_a_group_are_not_looked_up(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(mixed, monkeypatch, ServingSettings(merged_requests=64, max_busy_ms=BUSY_MS))
    assert bench.answer(1, 2000) == "a"
    assert bench.answer(64, 1, cancelled=lambda number: number < 40) == "g" * 40 + "a" * 24


def test_recent_requests_are_not_checked_for_cancellation(bench: Bench) -> None:
    assert bench.answer(8, 2) == "a" * 8
    assert bench.answer(8, 2) == "a" * 8
    assert bench.answer(1, 2000) == "a"
    bench.now += 1  # nothing waited: it was idle
    assert bench.answer(8, 2) == "a" * 8
    assert bench.asked_for == 0


# --- FP16


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Even rows of 1 and odd ones of −1 in a table with weights, answered in FP16."""
    module = collection([Spec("t", 10, 4, "SUM", ("f",))], weighted=True)
    with torch.no_grad():
        next(module.parameters()).copy_(torch.tensor([1.0, -1.0] * 5)[:, None].expand(10, 4))
    config = ExportConfig(dtype={"*": WeightDtype.FP32}, output_dtype=OutputDtype.FP16)
    return Engine.open(export_model(module, tmp_path_factory.mktemp("half") / "r", "m", config))


@pytest.mark.parametrize(
    ("bags", "expected"),
    [
        pytest.param([[0], [1]], 0, id="none"),
        pytest.param([[0], [0, 2], [1], []], 1, id="one of four"),
        pytest.param([[1, 3], [0, 1]], 1, id="below zero, beside a sum of zero"),
        pytest.param([[0, 0], [1, 1], [2, 4]], 3, id="all"),
    ],
)
def test_overflowing_fp16_answers_are_counted_for_their_request_only(
    half: Engine, bags: list[list[int]], expected: int
) -> None:
    """Each id weighs 40,000: two of one sign are beyond the largest number."""
    counts: dict[str, float] = {}
    metrics = counting(counts, ["t"])
    answerer = Answerer(half, ServingSettings(), metrics, None, lambda _: None, lambda _: None)
    requests = [
        Tensors(None, np.array(bag, np.int64), np.array([len(bag)], np.int32), np.full(len(bag), 4e4, np.float32))
        for bag in bags
    ]
    answers = answerer.answer(requests, lambda tensors: tensors, lambda _: False)
    metrics.publish()
    embeddings = [answer["embeddings"] for answer in answers if isinstance(answer, dict)]
    assert len(embeddings) == len(bags)
    assert sum(bool(np.isinf(embedding).any()) for embedding in embeddings) == expected
    assert counts.get("tbe_overflow_total", 0) == expected
    assert counts["tbe_calls_total"] == 1
    assert counts["tbe_call_requests_sum"] == len(bags)


def test_every_fp16_number_is_classified_as_finite_or_not() -> None:
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    overflows = [answering._overflows(numbers[[number, 0]]) for number in range(numbers.size)]
    assert overflows == (~np.isfinite(numbers)).tolist()
    assert not answering._overflows(np.array([np.inf], np.float32))


def test_a_request_leaves_nothing_to_the_garbage_collector(mixed: Path) -> None:
    """Refused requests have as many ids as others. The collector counts objects, not their bytes."""
    counts: dict[str, float] = {}
    lengths = np.array([1], np.int32)
    good = Tensors(["user_id"], np.array([1]), lengths)
    requests = [
        good,
        replace(good, features=["nobody"]),
        replace(good, lengths=np.array([2], np.int32)),
        replace(good, values=np.array([-5])),
        replace(good, bundle="0" * 64),
        replace(good, trace="not decoded"),
        replace(good, trace="our fault"),
    ]

    def decode(tensors: Tensors) -> Tensors:
        if tensors.trace == "not decoded":
            try:
                int(tensors.trace)
            except ValueError as error:
                raise InvalidRequest("no number") from error
        if tensors.trace == "our fault":
            raise ZeroDivisionError
        return tensors

    with Engine.open(mixed) as engine:
        tables = [table.name for table in engine.bundle.manifest.tables]
        metrics = counting(counts, tables)
        answerer = Answerer(engine, ServingSettings(), metrics, None, lambda _: None, lambda _: None)
        refused = [isinstance(answer, ServingError) for answer in answerer.answer(requests, decode, lambda _: False)]
        assert refused == [False] + [True] * 6
        with without_collector():
            for _ in range(20):
                answerer.answer(requests, decode, lambda _: False)
            assert gc.collect() == 0
