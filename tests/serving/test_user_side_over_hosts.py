"""Many items of one user, of tables that are on several hosts."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from export import Sharding
from serving.client import LookupClient
from serving.engine import Engine
from tests.serving.test_user_side_served import SIZES, Served
from tests.support.hosts import MODEL, fleet
from tests.support.random_user_sides import USER_SIDE, meeting
from tests.support.scored_models import EXACT
from tests.support.servers import at_once, metric


@pytest.mark.long
def test_rankings_through_a_router_get_the_models_own_scores(tmp_path: Path) -> None:
    """Some tables are cut over hosts by rows or columns, the history's too."""
    module = meeting(28)
    types = {"*": "row_wise", "t_user_a": "column_wise", "t_item_a": "table_wise"}
    sharding = Sharding(ranks=2, ranks_per_host=1, hosts_as_models=True, types=types, min_partition={"*": 4})
    model = Served(module, USER_SIDE, module.request, replace(EXACT, sharding=sharding))
    router = model.export(tmp_path / "r", MODEL)
    rankings = [model.ranking(seed, size) for seed, size in enumerate(SIZES)]
    many = sum(size >= 16 for size in SIZES)
    with fleet(tmp_path, router) as served, LookupClient(served.router.grpc, MODEL, 60) as client:
        client.info()
        for seed in range(2):
            order = np.random.default_rng(seed).permutation(len(rankings)).tolist()
            answers = at_once([partial(model.score, client, rankings[number]) for number in order])
            for number, answer in zip(order, answers, strict=True):
                model.expect_right(answer, rankings[number])
        assert metric(served.router, "tbe_user_side_total", model=MODEL) == 2 * many
        with Engine.open(router, served.hosts) as engine:
            for request in rankings:
                model.expect_right(engine.score(request.bags, request.dense, shared=USER_SIDE), request)
