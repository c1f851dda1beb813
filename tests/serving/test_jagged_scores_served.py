"""Scores that are made of sequences, from a server and from a router: by both clients, JSON lines, and replayed."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import Sharding, export_model
from serving.bundle.load import open_bundle
from serving.bundle.manifest import Capability
from serving.client import AsyncLookupClient, LookupClient, Retries
from serving.engine import Engine
from serving.errors import HostUnavailable, InvalidRequest, ServerUnavailable
from serving.model.settings import ServingSettings
from serving.router.hosts_config import OnShardFailure
from tests.support.history_model import assert_scores, expected, random_histories, with_histories
from tests.support.hosts import MODEL, export_hosts, fleet
from tests.support.sequence_models import FP32, Mixed, assert_mixed
from tests.support.servers import Running, at_once, lose, metric, running, tbe_serve

MODULE = Mixed()


@dataclass(frozen=True)
class Served:
    server: Running
    bundle: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    serving = ServingSettings(max_sequence_bytes=1 << 20)
    bundle = with_histories(export_model(MODULE, folder / "r", "m", replace(FP32, serving=serving)))
    with running(folder / "r") as server:
        yield Served(server, bundle)


def check_client(client: LookupClient) -> None:
    """Scores of all lengths and lookups at once, and requests that are refused among them."""
    random = np.random.default_rng(0)
    requests = [random_histories(random, number % 6, longest=number % 5 * 4) for number in range(48)]
    bad = [({**bags, "words": [[1000]] * len(bags["words"])}, dense) for bags, dense in requests[1:6]]
    calls: list[Any] = [partial(client.score, *request) for request in requests]
    calls += [partial(client.score, *request) for request in bad]
    calls += [partial(client.lookup, bags) for bags, _ in requests[:8]]
    answers = at_once(calls)
    for request, answer in zip(requests, answers, strict=False):
        assert_scores(answer, expected(MODULE, *request))
    for refused in answers[48:53]:
        assert isinstance(refused, InvalidRequest), refused
    for (bags, _), answer in zip(requests, answers[53:], strict=False):
        assert_mixed(answer, MODULE, bags)


def shared(seed: int, samples: int) -> tuple[Any, Any, Any]:
    """A user's sequence once, and the same repeated."""
    bags, dense = random_histories(np.random.default_rng(seed), samples)
    user = {**bags, "recent": [[1, 2, 3, 7]], "genres": [[5]]}
    return user, {**bags, **{name: user[name] * samples for name in ("recent", "genres")}}, dense


def test_clients_score_sequences_merged_with_others(served: Served) -> None:
    with LookupClient(served.server.grpc, "m", 60) as client:
        check_client(client)
        user, repeated, dense = shared(1, 50)
        scores = client.score(user, dense, shared=["recent", "genres"])
        assert_scores(scores, expected(MODULE, repeated, dense))
        assert list(client.score(user, dense, outputs=["total"], shared=["recent", "genres"])) == ["total"]
        with pytest.raises(
            InvalidRequest, match=r"bytes of sequences: expected at most 1048576 in a request, got \d+"
        ):
            client.score({**user, "recent": [[1] * 200]}, dense, shared=["recent", "genres"])
    assert metric(served.server, "tbe_calls_total") < metric(served.server, "tbe_requests_total"), "none was merged"

    async def run() -> None:
        async with AsyncLookupClient(served.server.grpc, "m", 60) as client:
            requests = [random_histories(np.random.default_rng(seed), seed) for seed in range(1, 9)]
            answers = await asyncio.gather(*(client.score(*request) for request in requests))
            for request, answer in zip(requests, answers, strict=True):
                assert_scores(answer, expected(MODULE, *request))

    asyncio.run(run())


def test_lines_of_json_are_scored(served: Served) -> None:
    bags, dense = random_histories(np.random.default_rng(2), 3)
    line = json.dumps({"features": bags, "dense": {name: numbers.tolist() for name, numbers in dense.items()}})
    answered = tbe_serve("score", "m", "--url", served.server.grpc, stdin=line)
    assert answered.returncode == 0, answered.stderr
    assert_scores(
        {name: np.array(value) for name, value in json.loads(answered.stdout).items()}, expected(MODULE, bags, dense)
    )


@pytest.mark.long
def test_bench_checks_scores_of_sequences(served: Served) -> None:
    options = ("--bundle", str(served.bundle), "--scores", "--clients", "2", "--seconds", "0.4", "--repeats", "1")
    answered = tbe_serve("bench", "m", "--url", served.server.grpc, *options, "--warm-up", "0", "--check", "1")
    assert answered.returncode == 0, answered.stderr
    assert "all right" in answered.stdout


@pytest.mark.long
def test_a_router_scores_sequences_of_its_hosts(tmp_path: Path) -> None:
    types = {"item": "row_wise", "word": "column_wise", "user": "table_wise", "genre": "data_parallel"}
    sharding = Sharding(ranks=4, ranks_per_host=2, types=types)
    router = with_histories(export_hosts(tmp_path, MODULE, replace(FP32, sharding=sharding)))
    assert {Capability.DENSE_PART, Capability.HOSTS} <= set(open_bundle(router).manifest.requires)
    with fleet(tmp_path, router) as served:
        with LookupClient(served.router.grpc, MODEL, 60) as client:
            check_client(client)
            user, repeated, dense = shared(3, 20)
            right = expected(MODULE, repeated, dense)
            assert_scores(client.score(user, dense, shared=["recent", "genres"]), right)
        with Engine.open(served.bundle, served.hosts) as engine:
            assert_scores(engine.score(repeated, dense), right)


@pytest.mark.long
def test_scores_that_need_rows_of_a_lost_host_fail_alone_or_use_zeros(tmp_path: Path) -> None:
    """Rows of `item` are on one host, those of `word` on the other."""
    types = {"item": "table_wise", "word": "table_wise", "user": "data_parallel", "genre": "data_parallel"}
    sharding = Sharding(ranks=2, ranks_per_host=1, types=types)
    router = with_histories(export_hosts(tmp_path, MODULE, replace(FP32, sharding=sharding)))
    manifest = open_bundle(router).manifest
    (lost,) = (manifest.plan.ranks[shard.rank].host for shard in manifest.plan.shards_by_table["item"])
    bags, dense = random_histories(np.random.default_rng(1), 3)
    bags["recent"], bags["seen"] = [[1, 2], [], [3]], [[4], [], []]
    without: dict[str, Any] = {**bags, "recent": [[], [], []]}  # rows of `seen` are in no score
    with (
        fleet(tmp_path, router, "--shard-timeout-ms", "1000") as served,
        LookupClient(served.router.grpc, MODEL, 60, retries=Retries(attempts=1)) as client,
        Engine.open(served.bundle, replace(served.hosts, on_shard_failure={"item": OnShardFailure.ZERO})) as engine,
    ):
        assert_scores(client.score(bags, dense), expected(MODULE, bags, dense))
        lose(served.servers[lost])
        answers = at_once([partial(client.score, features, dense) for features in (bags, without) * 4])
        for needs, needs_none in zip(answers[::2], answers[1::2], strict=True):
            assert isinstance(needs, HostUnavailable | ServerUnavailable), needs
            assert "tables 'item': host" in str(needs)
            assert_scores(needs_none, expected(MODULE, without, dense))
        scores, right = engine.score(bags, dense), expected(MODULE, bags, dense)
        assert not scores["attended"].any()
        assert_scores(scores, {**right, "attended": np.zeros((3, 32))})
