"""A large request looked up by several threads: the answer is that of one thread, bit for bit, whatever the model."""

import gc
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import ExportConfig, Sharding, export_model
from serving.bundle.plan import ShardingType
from serving.bundle.tables import OutputDtype
from serving.engine import Engine
from serving.errors import ConfigurationError
from serving.lookup import parallel_lookup
from serving.lookup.threads import Threads
from serving.requests.accept import accept
from serving.requests.answers import JaggedRows
from serving.requests.encoding import encode
from tests.support.long_cases import one_in
from tests.support.models import MEAN, MIXED, MIXED_CONFIG, SUM, Spec, collection, flat, random_bags, table_of
from tests.support.no_torchscript import without_torchscript
from tests.support.position_weights import LONGEST, positioned
from tests.support.position_weights import SPECS as POSITIONED
from tests.support.sequence_models import POOLED, ROWS, Mixed

THREADS = (2, 3, 4)
# In place of a number of threads: two, without TorchScript.
PLAIN = -2
# The most bytes of a block, and the most samples: a bag at a time, some samples of a feature, some features, everything.
BLOCKS = [
    (1, 17),
    pytest.param(9000, 300, marks=pytest.mark.long),
    (700, 300),
    (1 << 20, 300),
]
CHOICES = [kind.value for kind in ShardingType]
MODELS: dict[str, tuple[Callable[[], Any], tuple[Spec, ...], ExportConfig]] = {
    "sums": (lambda: collection(SUM), SUM, ExportConfig()),
    "means": (lambda: collection(MEAN), MEAN, ExportConfig()),
    "sums and means, every dtype": (collection, MIXED, MIXED_CONFIG),
    "weighted": (lambda: collection(MIXED, weighted=True), MIXED, ExportConfig()),
    "by position": (positioned, POSITIONED, ExportConfig()),
    "float16": (lambda: collection(SUM), SUM, ExportConfig(output_dtype=OutputDtype.FP16)),
    "float16, sums and means": (collection, MIXED, ExportConfig(output_dtype=OutputDtype.FP16)),
    "sequences": (Mixed, (*POOLED, *ROWS), ExportConfig()),
    **{
        f"{kind}, weighted": (
            lambda: collection(MIXED, weighted=True),
            MIXED,
            ExportConfig(
                sharding=Sharding(ranks=4, ranks_per_host=2, types={"*": kind}),
                output_dtype=OutputDtype.FP16 if "row" in kind else OutputDtype.FP32,
            ),
        )
        for kind in CHOICES
    },
}


@pytest.fixture(name="parts", autouse=True)
def _parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every batch is cut, as evenly as it can be. In how many parts, one after the other."""
    for size in ("LEAST", "HEAD_START", "CALL"):
        monkeypatch.setattr(parallel_lookup, size, 0)
    sizes: list[int] = []
    run = Threads.run

    def spy(self: Threads, work: Any) -> None:
        sizes.append(len(work))
        run(self, work)

    monkeypatch.setattr(Threads, "run", spy)
    return sizes


@pytest.fixture(name="model", params=one_in(3, MODELS), scope="module")
def _model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, tuple[Spec, ...], Path, dict[int, Engine]]]:
    module, specs, config = MODELS[request.param]
    bundle = export_model(module(), tmp_path_factory.mktemp("pieces") / "r", "m", config)
    engines = {threads: Engine.open(bundle, threads=threads) for threads in (1, *THREADS)}
    with without_torchscript():
        engines[PLAIN] = Engine.open(bundle, threads=2)
    yield request.param, specs, bundle, engines
    for engine in engines.values():
        engine.close()


def requests(name: str, specs: tuple[Spec, ...], most: int = 300) -> Iterator[dict[str, Any]]:
    """Requests of every size, for all features and for some, with empty bags and with one that has nearly all ids."""
    random = np.random.default_rng(0)
    keys = list(table_of(specs))
    for samples, features in product(
        [number for number in (1, 2, 3, 17, 300) if number <= most], (None, keys[::-1], keys[:1], keys[1::-1])
    ):
        bags = random_bags(random, specs, samples, features)
        if samples == 3:
            bags = {key: [[] for _ in column] for key, column in bags.items()}
        if samples == 17:
            last = [*bags][-1]
            rows = table_of(specs)[last].rows
            bags[last][11] = random.integers(0, rows, 3000).tolist()
        if name == "by position":  # two tables read a key there; a bag has as many ids as there are weights
            fewest = min(spec.rows for spec in specs)
            bags = {
                key: [[id_ % fewest for id_ in bag[: LONGEST[key]]] for bag in column] for key, column in bags.items()
            }
        if "weighted" in name:
            weights = {key: random.normal(size=sum(map(len, column))) for key, column in bags.items()}
            yield {key: (*flat({key: column}), weights[key]) for key, column in bags.items()}
        else:
            yield bags


def assert_same(answer: Any, expected: Any) -> None:
    assert list(answer) == list(expected)
    for name, embeddings in expected.items():
        if isinstance(embeddings, JaggedRows):
            np.testing.assert_array_equal(answer[name].lengths, embeddings.lengths)
            found_values, embeddings = answer[name].values, embeddings.values
        else:
            found_values = answer[name]
        assert found_values.dtype == embeddings.dtype
        # As bytes: the sign of a zero counts, too.
        assert found_values.tobytes() == embeddings.tobytes(), name


@pytest.mark.parametrize(("block", "most"), BLOCKS)
def test_threads_answer_as_one_bit_for_bit(
    model: Any, parts: list[int], block: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_lookup, "BLOCK", block)
    name, specs, _, engines = model
    for request in requests(name, specs, most):
        expected = engines[1].lookup(request)
        assert not parts
        for threads in (*THREADS, PLAIN):
            assert_same(engines[threads].lookup(request), expected)
        assert parts, "it was not cut"
        assert set(parts) <= {1, *THREADS}
        if len(request) > 1 and len(next(iter(expected.values()))) == 300:
            assert max(parts) == max(THREADS)
        parts.clear()


def test_merged_requests_are_answered_as_by_one_thread(
    model: Any, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_lookup, "BLOCK", 3000)
    name, specs, _, engines = model
    every = list(requests(name, specs))
    for first in range(0, len(every), 5):
        outputs = {}
        for threads, engine in engines.items():
            encoded = [encode(request, engine.bundle.manifest.weighted_keys) for request in every[first : first + 5]]
            outputs[threads] = engine.answer([accept(engine.schema, request) for request in encoded]).outputs()
        for threads in THREADS:
            for answer, expected in zip(outputs[threads], outputs[1], strict=True):
                assert_same(answer, expected)
    assert max(parts) == max(THREADS)


def test_small_requests_are_left_to_one_thread(
    mixed: Path, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_lookup, "LEAST", 1 << 20)
    random = np.random.default_rng(1)
    with Engine.open(mixed, threads=4) as engine, Engine.open(mixed) as one:
        for samples in (0, 1, 30):
            bags = random_bags(random, MIXED, samples)
            assert_same(engine.lookup(bags), one.lookup(bags))
        assert not parts
        # An answer of 3.6 MB, which is moved twice.
        bags = random_bags(random, MIXED, 8000)
        assert_same(engine.lookup(bags), one.lookup(bags))
        assert parts == [4]
        bags = random_bags(random, MIXED, 1200)
        assert_same(engine.lookup(bags), one.lookup(bags))
        assert parts == [4, 2]  # each thread has work worth waking up for


def test_threads_end_with_the_engine(mixed: Path) -> None:
    earlier = set(threading.enumerate())  # of tests before this one, and they may end at any time
    engine = Engine.open(mixed, threads=3)
    expected = engine.lookup({"genres": [[1, 2], [3]]})
    assert len(set(threading.enumerate()) - earlier) == 2
    engine.close()
    assert set(threading.enumerate()) <= earlier
    assert_same(engine.lookup({"genres": [[1, 2], [3]]}), expected)  # one thread still answers
    forgotten = Engine.open(mixed, threads=3)
    forgotten.lookup({"genres": [[1, 2], [3]]})
    del forgotten
    gc.collect()
    assert set(threading.enumerate()) <= earlier


@pytest.mark.parametrize("threads", [1, 3])
def test_weights_are_unmapped_with_their_engine(mixed: Path, threads: int) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(f"{mixed}/")

    gc.collect()
    before = mapped()
    engine = Engine.open(mixed, threads=threads)
    engine.lookup({"genres": [[1, 2], [3]]})
    assert mapped() > before
    engine.close()
    del engine
    gc.collect()
    assert mapped() == before


@pytest.mark.parametrize("threads", [0, -1, 1025, 10**6, 1.5, "2", None, True])
def test_threads_that_a_setting_may_not_have_are_refused(mixed: Path, threads: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^threads: expected .*, got {threads!r}"):
        Engine.open(mixed, threads=threads)


def test_an_invalid_weights_memory_is_refused(mixed: Path) -> None:
    memory: Any = "huge"
    with pytest.raises(ConfigurationError, match=r"^memory: expected .*, got 'huge'"):
        Engine.open(mixed, memory=memory)
