"""Whole rankers with sequences, made at random: each is served as it answers by itself, alone and merged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import ExportConfig, Sharding, export_model
from serving.bundle.scores import DensePart
from serving.client import LookupClient, Retries
from serving.engine import Engine
from serving.lookup import dense_program
from serving.requests.accept import accept
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode
from tests.support.hosts import MODEL, export_hosts, fleet
from tests.support.long_cases import one_in
from tests.support.module_calls import answer_of_call
from tests.support.random_rankers import Ranker, Request, ranker
from tests.support.scored_models import EXACT
from tests.support.servers import at_once

# Of the first 132, those that have between them nearly every two things that may be drawn, each pair once.
SEEDS = (
    0, 1, 5, 6, 7, 8, 17, 19, 20, 21, 23, 24, 33, 39, 43, 46, 47, 53,
    57, 62, 63, 65, 72, 75, 76, 77, 83, 86, 87, 88, 90, 99, 101, 105, 108, 113, 123, 125, 127, 131,
)  # fmt: skip
TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")
# Samples, and the most ids of each: none, more than is read, and many.
SIZES = ((1, 0), (1, 9), (3, 2), (11, 8))
# Ids, dense inputs, the keys that come once, and what the module answers by itself.
Asked = tuple[dict[str, Any], dict[str, Any], list[str], dict[str, Any]]


@pytest.mark.parametrize("seed", one_in(len(SEEDS), SEEDS))
def test_random_rankers_are_served_with_their_own_answers(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank and on several, with ids of some keys once for all samples, and scored some at a time."""
    monkeypatch.setattr(dense_program, "SLICE", 5)
    module = ranker(seed)
    bundle = export_model(module, tmp_path / "r", "m", config(seed), example=example(module))
    with Engine.open(bundle) as engine:
        part = engine.bundle.manifest.dense_part
        assert part is not None
        requests, every = [], requests_of(module, part)
        for bags, dense, shared, right in every:
            scores = engine.score(bags, dense, shared=shared)
            assert [*scores] == [output.name for output in part.outputs]
            assert_right(scores, right, every)
            tensors = encode(bags, [], shared)
            requests.append(replace(tensors, outputs=[*scores], dense=encode_dense(part.inputs, dense)))
        answers = engine.answer([accept(engine.schema, request) for request in requests]).outcomes()
        for merged, (*_, right) in zip(answers, every, strict=True):
            assert isinstance(merged, Mapping), merged
            assert_right(merged, right, every)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 4, 9])
def test_random_rankers_over_hosts(tmp_path: Path, seed: int) -> None:
    """Real servers, asked by many at once."""
    module = ranker(seed)
    types = {spec.name: "row_wise" for spec in module.rowed} | {spec.name: "column_wise" for spec in module.pooled}
    sharding = Sharding(ranks=2, ranks_per_host=1, types=types)
    router = export_hosts(tmp_path, module, replace(EXACT, sharding=sharding, example=example(module)))
    with (
        fleet(tmp_path, router) as served,
        LookupClient(served.router.grpc, MODEL, 60, retries=Retries(attempts=1)) as client,
        Engine.open(served.bundle, served.hosts) as engine,
    ):
        part = engine.bundle.manifest.dense_part
        assert part is not None
        every = 3 * [*requests_of(module, part)]
        calls: list[Callable[[], Any]] = [
            partial(client.score, bags, dense, shared=shared) for bags, dense, shared, _ in every
        ]
        for answer, (_, _, _, right) in zip(at_once(calls), every, strict=True):
            assert_right(answer, right, every)


def config(seed: int) -> ExportConfig:
    """Every second one on several ranks; each table as is drawn."""
    random = np.random.default_rng(seed)
    module = ranker(seed)
    types = {spec.name: str(random.choice(TYPES)) for spec in (*module.pooled, *module.rowed)}
    return EXACT if seed % 2 == 0 else replace(EXACT, sharding=Sharding(ranks=3, types=types))


def example(module: Ranker) -> tuple[Any, ...]:
    return module.example(module.request(np.random.default_rng(module.seed), 5, 8))


def assert_right(answer: Mapping[str, Any], right: Mapping[str, Any], every: Sequence[Asked]) -> None:
    """But for rounding, relative to the largest number of all answers: that of one may be a small difference."""
    for name, numbers in answer.items():
        largest = max(float(np.abs(of[name]).max(initial=0)) for *_, of in every)
        np.testing.assert_allclose(numbers, right[name], rtol=0, atol=1e-5 * largest, err_msg=name)


def requests_of(module: Ranker, part: DensePart) -> list[Asked]:
    """Requests: ids, dense inputs, the keys that come once; and what the module answers by itself."""
    random = np.random.default_rng((module.seed, 1))
    requests = []
    for samples, longest in SIZES:
        request = module.request(random, samples, longest)
        pair = module.events[:2] if module.together else []
        chosen = [key for key in request.bags if random.random() < 0.5 and key not in pair]
        for shared in ([], chosen + (pair if random.random() < 0.5 else [])):
            bags = {key: bag[:1] if key in shared else bag for key, bag in request.bags.items()}
            right = answer_of_call(module, module.example(request.shared(shared, samples)))
            requests.append((bags, dense_of(request, part, shared), shared, right))
    return requests


def dense_of(request: Request, part: DensePart, shared: Sequence[str]) -> dict[str, Any]:
    tensors = {dense_input.name: getattr(request, dense_input.name.rpartition(".")[2]) for dense_input in part.inputs}
    for name, key in part.by_id.items():  # of two keys of one event, it may be either
        (times,) = request.times.values()
        tensors[name] = times[:1] if key in shared else times
    return tensors
