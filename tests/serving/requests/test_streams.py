"""Batches that an engine answers: in order, in chunks, read when they are needed; errors name their batch."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from export import ExportConfig, export_model
from serving.engine import Engine
from serving.errors import ConfigurationError, IdsOutside, InvalidRequest
from serving.requests.chunks import ChunkLimits
from tests.support.models import MIXED, SUM, random_bags
from tests.support.ranker import mixing, ranker


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streamed") / "repository"
    export_model(ranker(), path, "ranker", ExportConfig(scores=True))
    export_model(mixing(), path, "mixing", ExportConfig(scores=True))
    return path


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.engine.engine_chunk_limits", lambda _, **__: ChunkLimits(3, 20))


def random_batch(seed: int, samples: int) -> tuple[dict[str, Any], dict[str, Any]]:
    random = np.random.default_rng(seed)
    dense = {"user": random.random((samples, 3), np.float32), "item": random.random((samples, 2), np.float32)}
    return random_bags(random, SUM, samples), dense


@pytest.mark.usefixtures("small_chunks")
def test_scores_are_those_of_whole_batches(models: Path) -> None:
    batches = [random_batch(seed, samples) for seed, samples in enumerate((10, 1, 0, 7))]
    done: list[int] = []
    with Engine.open(models / "ranker" / "1") as engine:
        answers = [*engine.stream(batches, progress=done.append)]
        for (bags, dense), answer in zip(batches, answers, strict=True):
            for name, scores in engine.score(bags, dense).items():
                np.testing.assert_allclose(answer[name], scores, atol=1e-6)
        assert answers[0].to_arrow().num_rows == 10
    assert done == [10, 11, 11, 18]


@pytest.mark.usefixtures("small_chunks")
def test_embeddings_are_those_of_whole_batches(mixed: Path) -> None:
    batches = [pa.table(random_bags(np.random.default_rng(seed), MIXED, 9)) for seed in range(2)]
    with Engine.open(mixed) as engine:
        for batch, answer in zip(batches, engine.stream(batches, method="lookup"), strict=True):
            for name, embeddings in engine.lookup(batch).items():
                np.testing.assert_array_equal(answer[name], embeddings)


@pytest.mark.usefixtures("small_chunks")
def test_a_batch_is_one_request_if_its_samples_are_mixed(models: Path) -> None:
    bags, _ = random_batch(0, 10)
    with Engine.open(models / "mixing" / "1") as engine:
        (answer,) = engine.stream([bags])
        np.testing.assert_array_equal(answer["scores"], engine.score(bags)["scores"])


def test_a_batch_is_read_after_the_previous_answer_was_taken(models: Path) -> None:
    sent: list[int] = []

    def batches() -> Iterator[Any]:
        for number in range(5):
            sent.append(number)
            yield random_batch(number, 2)

    with Engine.open(models / "ranker" / "1") as engine:
        for number, _ in enumerate(engine.stream(batches())):
            assert sent == [*range(number + 1)]


def test_an_error_is_raised_at_the_place_of_its_batch(models: Path) -> None:
    batches = [random_batch(0, 2), ({"x": [[50]], "y": [1], "z": [1]}, random_batch(0, 1)[1]), random_batch(1, 2)]
    with Engine.open(models / "ranker" / "1") as engine:
        stream = engine.stream(batches)
        assert len(next(stream)["like"]) == 2
        with pytest.raises(IdsOutside, match=r"^batch 1: feature 'x': expected an id in \[0, 50\), got 50"):
            next(stream)
        first, error, last = engine.stream(batches, errors="yield")
        assert (len(first["like"]), len(last["like"])) == (2, 2)
        assert str(error).startswith("batch 1: feature 'x': ")


@pytest.mark.usefixtures("small_chunks")
def test_an_error_says_which_samples_of_the_batch_it_counts(models: Path) -> None:
    bags, dense = random_batch(0, 10)
    bags["z"] = [[0]] * 7 + [[10]] * 3
    with Engine.open(models / "ranker" / "1") as engine:
        with pytest.raises(
            IdsOutside, match=r"batch 0: samples \d to \d of the batch \(sample 0 below is sample \d\): feature 'z'"
        ) as refused:
            next(engine.stream([(bags, dense)]))
        _, first, sample = map(int, re.findall(r"sample (\d)", str(refused.value)))
        assert first + sample == 7
        assert f"samples {first} to " in str(refused.value)


@pytest.mark.parametrize(
    ("batch", "method", "message"),
    [
        pytest.param(({}, {}, {}), "score", r"batch 0: expected features, or \(features, dense\)", id="of three"),
        pytest.param(({}, {}), "lookup", "batch 0: expected features, got a tuple of 2", id="dense of a lookup"),
        pytest.param([1], "score", "batch 0: features: expected ids by feature", id="a list"),
    ],
)
def test_other_batches_are_refused(models: Path, batch: Any, method: Any, message: str) -> None:
    with Engine.open(models / "ranker" / "1") as engine, pytest.raises(InvalidRequest, match=message):
        next(engine.stream([batch], method=method))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "rows"}, "method: expected 'score' or 'lookup', got 'rows'"),
        ({"errors": "skip"}, "errors: expected 'raise' or 'yield', got 'skip'"),
    ],
)
def test_invalid_stream_options_are_refused_at_once(models: Path, arguments: dict[str, Any], message: str) -> None:
    with Engine.open(models / "ranker" / "1") as engine, pytest.raises(ConfigurationError, match=message):
        engine.stream([], **arguments)
