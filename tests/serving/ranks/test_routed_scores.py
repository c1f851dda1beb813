"""Scores of a model whose ranks are on other hosts: those of the same plan in one process, bit for bit."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import Sharding
from serving.client import LookupClient
from serving.engine import AsyncEngine, Engine
from serving.errors import ServerUnavailable
from tests.support.hosts import MODEL, export_hosts, fleet, in_one_process
from tests.support.quick_reload import quick_reload
from tests.support.scored import EXACT, own_scores, random_request, trained, two_tower


def test_scores_through_a_router_are_those_of_one_process(tmp_path: Path) -> None:
    module = trained(two_tower())
    types = {"user": "row_wise", "word": "table_wise", "item": "column_wise", "seen": "data_parallel"}
    config = replace(EXACT, sharding=Sharding(ranks=3, ranks_per_host=1, types=types, min_partition={"item": 4}))
    with quick_reload():
        router = export_hosts(tmp_path, module, config)
        one = Engine.open(in_one_process(tmp_path, module, config, router))
    bags, dense = random_request(module, np.random.default_rng(0), 12)
    expected = own_scores(module, bags, dense)
    alone = one.score(bags, dense)

    async def by_asyncio(addresses: dict[int, list[str]]) -> Any:
        async with await AsyncEngine.open(router, addresses) as engine:
            return await engine.score(bags, dense)

    with fleet(tmp_path, router) as served, LookupClient(served.router.grpc, MODEL, 20) as client:
        addresses = {host: list(found) for host, found in served.addresses.items()}
        with Engine.open(router, addresses) as engine:
            answers = [client.score(bags, dense), engine.score(bags, dense), asyncio.run(by_asyncio(addresses))]
        for answer in answers:
            for name, numbers in alone.items():
                np.testing.assert_array_equal(answer[name], numbers)
                np.testing.assert_allclose(numbers, expected[name], rtol=0, atol=1e-5)
        host, (server,) = next(iter(served.servers.items()))
        server.process.terminate()
        server.process.wait()
        with pytest.raises(ServerUnavailable, match=f"host {host} "):
            client.score(bags, dense, timeout_s=5)
