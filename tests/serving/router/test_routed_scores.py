"""Scores of a model whose ranks are on other hosts: those of the same plan in one process, bit for bit."""

import signal
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import Sharding
from serving.bundle.load import open_bundle
from serving.client import LookupClient, Retries
from serving.engine import Engine
from serving.errors import ServerUnavailable, ServingError
from serving.router.hosts_config import OnShardFailure
from serving.server import Supervisor
from tests.support.host_faults import until
from tests.support.hosts import MODEL, export_hosts, fleet, in_one_process
from tests.support.long_cases import BREATH_S
from tests.support.models import MIXED
from tests.support.raw_id_ranker import RAW, Whole, random_whole
from tests.support.scored_models import EXACT, ON_HOSTS, own_scores, random_request, trained, two_tower
from tests.support.servers import lose


@pytest.mark.long
def test_scores_through_a_router_are_those_of_one_process(tmp_path: Path) -> None:
    module = trained(two_tower())
    router = export_hosts(tmp_path, module, ON_HOSTS)
    one = Engine.open(in_one_process(tmp_path, module, ON_HOSTS, router))
    bags, dense = random_request(module, np.random.default_rng(0), 12)
    expected = own_scores(module, bags, dense)
    alone = one.score(bags, dense)

    with fleet(tmp_path, router) as served, LookupClient(served.router.grpc, MODEL, 20) as client:
        with Engine.open(router, served.hosts) as engine:
            answers = [client.score(bags, dense), engine.score(bags, dense)]
        for answer in answers:
            for name, numbers in alone.items():
                np.testing.assert_array_equal(answer[name], numbers)
                np.testing.assert_allclose(numbers, expected[name], rtol=0, atol=1e-5)
        host, server = next(iter(served.servers.items()))
        lose(server)
        with pytest.raises(ServerUnavailable, match=f"host {host} "):
            client.score(bags, dense)


# `user` and `raw` are each on one host, `item` on both, `genre` on the router.
TYPES = {
    "user": "table_wise",
    "item": "row_wise",
    "genre": "data_parallel",
    "word": "table_wise",
    "raw": "table_wise",
}
WHOLE = replace(EXACT, sharding=Sharding(ranks=2, ranks_per_host=1, types=TYPES))
# A call takes milliseconds: this leaves time to a machine that is busy with other things.
TIMEOUT_S = 2.0


def without(bags: dict[str, Any], tables: set[str]) -> dict[str, Any]:
    """The same without ids of some tables."""
    lost = {feature for spec in (*MIXED, RAW) if spec.name in tables for feature in spec.features}
    return {name: [[] for _ in bag] if name in lost else bag for name, bag in bags.items()}


@pytest.mark.promise("Scores that need a lost host are refused in the same way, also when merged with others")
def test_scores_that_need_a_lost_host_are_refused_by_its_name(tmp_path: Path) -> None:
    """Under load, merged with one another. When it is back, all are right; what has zeros for it is scored with them."""
    module = Whole().eval()
    router = export_hosts(tmp_path, module, WHOLE)
    one = Engine.open(in_one_process(tmp_path, module, WHOLE, router))
    plan = open_bundle(router).manifest.plan
    hosts = {name: {plan.ranks[shard.rank].host for shard in shards} for name, shards in plan.shards_by_table.items()}
    (lost,) = hosts["user"]
    needed = {name for name, host in hosts.items() if lost in host}
    bags, dense = zip(*(random_whole(np.random.default_rng(seed), 1 + seed) for seed in range(8)), strict=True)
    for request in bags:
        request["user_id"][0] = [1, 2]
    requests = [*zip(bags, dense, strict=True), *zip((without(bag, needed) for bag in bags), dense, strict=True)]
    expected = [one.score(*request) for request in requests]
    # By number of the request: right answers since it was last looked at, wrong ones, and what others were told.
    right, wrong, failures, stopped = Counter[int](), list[int](), list[tuple[int, str]](), threading.Event()

    def ask(first: int) -> None:
        with LookupClient(served.router.grpc, MODEL, 20, retries=Retries(attempts=1)) as client:
            while not stopped.wait(BREATH_S):
                for number in range(first, len(requests), 4):
                    try:
                        answer = client.score(*requests[number])
                    except ServingError as error:
                        failures.append((number, str(error)))
                        continue
                    pairs = ((answer[name], numbers) for name, numbers in expected[number].items())
                    if all(np.allclose(*pair, rtol=0, atol=1e-5) for pair in pairs):
                        right[number] += 1
                    else:
                        wrong.append(number)

    def until_all_are_right(numbers: range) -> None:
        right.clear()
        until(lambda: all(right[number] for number in numbers), "right answers")

    zeroed = dict.fromkeys(needed, OnShardFailure.ZERO)
    with (
        fleet(tmp_path, router, "--shard-timeout-ms", f"{1000 * TIMEOUT_S:.0f}") as served,
        Engine.open(router, replace(served.hosts, on_shard_failure=zeroed)) as engine,
        ThreadPoolExecutor(5) as pool,
    ):
        supervisor = Supervisor(served.servers[lost], True)
        askers: list[Future[Any]] = [pool.submit(ask, first) for first in range(4)]
        try:
            until_all_are_right(range(16))
            assert not failures
            served.servers[lost].process.kill()
            until(lambda: len({number for number, _ in failures[:]}) == 8, "refusals")
            askers.append(pool.submit(supervisor.wait))  # it is started anew only now, however soon all were asked
            until_all_are_right(range(16))
        finally:
            stopped.set()
            supervisor.stop(signal.SIGTERM)
        for asker in askers:
            asker.result()
        assert not wrong
        for number, said in failures:
            assert number < 8, said
            assert f": host {lost} ({MODEL}-host-{lost} version 1" in said
        scores = engine.score(bags[3], dense[3])
        looked_up = engine.lookup(bags[3])
    assert not looked_up["user_id"].any()
    embeddings = np.concatenate([looked_up[feature.name] for feature in one.bundle.manifest.features], axis=1)
    for name, numbers in module.dense_answer(embeddings, dense[3]).items():
        np.testing.assert_allclose(scores[name], numbers, rtol=0, atol=1e-5)
        assert np.abs(scores[name] - expected[3][name]).max() > 1e-3
