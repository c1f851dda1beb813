"""Written plans of a router and its hosts: fed back, taken as they say, and refused by name."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from export import Sharding
from export.errors import PlanError
from export.plan.report import report_plan
from serving.bundle.manifest import Manifest
from serving.bundle.plan import ROUTER
from serving.engine import Engine
from serving.errors import ConfigurationError
from tests.export.plan.test_router import hosts, in_router, planned
from tests.support.models import MIXED, Spec, collection, random_bags
from tests.support.sharded_exports import sharded


def as_file(tmp_path: Path, report: Any) -> Path:
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(report))
    return path


def cut_everywhere() -> tuple[Sharding, Manifest]:
    types = {"user": "row_wise", "item": "column_wise", "genre": "data_parallel", "word": "table_row_wise"}
    sharding = hosts(types=types)
    return sharding, planned(sharding, collection(MIXED))


def placed(manifest: Manifest) -> Any:
    return [rank.host for rank in manifest.plan.ranks], manifest.plan.sharding, manifest.plan.shards


@pytest.mark.parametrize("as_models", [True, False])
def test_a_router_s_plan_can_be_fed_back(tmp_path: Path, as_models: bool) -> None:
    """As the same plan, or as the same in one process."""
    sharding, before = cut_everywhere()
    path = as_file(tmp_path, report_plan(before, sharding))
    after = planned(Sharding(plan=path, hosts_as_models=as_models), collection(MIXED))
    assert placed(after) == placed(before)
    files = [rank.weights_file for rank in after.plan.ranks]
    assert files == (["weights.0.bin", None, None] if as_models else [f"weights.{rank}.bin" for rank in range(3)])
    assert bool(report_plan(after, Sharding(plan=path, hosts_as_models=as_models)).transfers) == as_models


def explicit(tmp_path: Path, ranks: list[int], shards: list[tuple[int, list[int]]], **settings: Any) -> Manifest:
    """The plan of a table `t` of 100 rows, cut by rows."""
    plan = {
        "ranks": [{"host": host} for host in ranks],
        "tables": {
            "t": {
                "sharding_type": "row_wise",
                "shards": [{"rank": rank, "rows": rows, "columns": [0, 16]} for rank, rows in shards],
            }
        },
    }
    sharding = Sharding(plan=as_file(tmp_path, plan), hosts_as_models=True, **settings)
    return planned(sharding, collection((Spec("t", 100, 16, "SUM", ("a",)),)))


def test_a_written_plan_names_the_router_s_ranks(tmp_path: Path) -> None:
    manifest = explicit(tmp_path, [5, ROUTER, 2], [(0, [0, 40]), (1, [40, 60]), (2, [60, 100])])
    assert [(manifest.plan.ranks[shard.rank].host, shard.rows) for shard in manifest.plan.shards] == [
        (1, (0, 40)),
        (ROUTER, (40, 60)),
        (0, (60, 100)),
    ]


def test_without_a_rank_of_its_own_the_router_is_empty(tmp_path: Path) -> None:
    manifest = explicit(tmp_path, [0, 1], [(0, [0, 40]), (1, [40, 100])], router_bytes=0)
    assert [rank.host for rank in manifest.plan.ranks] == [ROUTER, 0, 1]
    assert in_router(manifest) == set()


@pytest.mark.parametrize(
    ("ranks", "shards", "settings", "error", "message"),
    [
        pytest.param(
            [0, -2], [(0, [0, 40]), (1, [40, 100])], {}, ConfigurationError,
            "plan.json: ranks: rank 1: expected a host >= 0, or -1 for the router, got -2", id="no-such-host",
        ),
        pytest.param(
            [0, 1], [(0, [0, 40]), (2, [40, 100])], {}, ConfigurationError, "no rank 2: expected one of 2", id="no-such-rank"
        ),
        pytest.param(
            [0, 1], [(0, [0, 40]), (1, [50, 100])], {}, ConfigurationError, "look at row 40", id="a-gap"
        ),
        pytest.param(
            [ROUTER], [(0, [0, 100])], {}, PlanError, "hosts: expected a table on at least one", id="no-host"
        ),
        pytest.param(
            [ROUTER, 0], [(0, [0, 40]), (1, [40, 100])], {"router_bytes": 700}, PlanError,
            "the router would hold 800 bytes, 100 more than its 700", id="router-full",
        ),
        pytest.param(
            [0, 0, 1], [(0, [0, 40]), (1, [40, 80]), (2, [80, 100])], {"memory_bytes": 700}, PlanError,
            "host 0 would hold 1,600 bytes, 200 more than its 1,400", id="two-ranks-of-a-host-full",
        ),
    ],
)  # fmt: skip
def test_a_written_plan_that_cannot_be_is_refused_by_name(
    tmp_path: Path, ranks: Any, shards: Any, settings: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        explicit(tmp_path, ranks, shards, **settings)


@pytest.mark.parametrize("router", [True, False], ids=["with-tables-in-the-router", "nothing-in-the-router"])
def test_a_router_s_plan_answers_in_one_process(tmp_path: Path, one_rank: Engine, router: bool) -> None:
    sharding, manifest = cut_everywhere()
    if not router:
        sharding = hosts(types={"user": "row_wise", "item": "column_wise"}, router_bytes=0)
        manifest = planned(sharding, collection(MIXED))
    path = as_file(tmp_path, report_plan(manifest, sharding))
    engine = sharded(tmp_path, Sharding(plan=path))
    assert bool(in_router(engine.bundle.manifest)) == router
    bags = random_bags(np.random.default_rng(3), MIXED, 50)
    for feature, rows in engine.lookup(bags).items():
        np.testing.assert_allclose(rows, one_rank.lookup(bags)[feature], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("as_models", [True, False])
@pytest.mark.parametrize("ranks", [[0], [0, 1]], ids=["one copy", "a copy on each of its ranks"])
def test_data_parallel_tables_may_be_on_router_ranks_only(tmp_path: Path, as_models: bool, ranks: list[int]) -> None:
    plan = {
        "ranks": [{"host": ROUTER}, {"host": ROUTER}, {"host": 0}],
        "tables": {
            "s": {
                "sharding_type": "data_parallel",
                "shards": [{"rank": rank, "rows": [0, 100], "columns": [0, 16]} for rank in ranks],
            },
            "t": {"sharding_type": "table_wise", "shards": [{"rank": 2, "rows": [0, 100], "columns": [0, 16]}]},
        },
    }
    module = collection((Spec("s", 100, 16, "SUM", ("a",)), Spec("t", 100, 16, "SUM", ("b",))))
    manifest = planned(Sharding(plan=as_file(tmp_path, plan), hosts_as_models=as_models), module)
    hosts = {shard.table: manifest.plan.ranks[shard.rank].host for shard in manifest.plan.shards}
    assert hosts == {"s": ROUTER, "t": 0}
    assert len(manifest.plan.shards) == 2


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([(1, [0, 100])], "expected a whole copy on each of 2 ranks, got them on \\[1\\]"),
        ([(0, [0, 60])], "its shards do not cover rows exactly once: look at row 60"),
        ([(0, [0, 60]), (0, [60, 100])], "expected a whole copy on each of 2 ranks, got them on \\[\\]"),
        ([(2, [0, 100])], "no rank 2: expected one of 2"),
    ],
    ids=["a host's rank", "not whole", "in pieces", "no such rank"],
)
def test_partial_copies_are_refused(tmp_path: Path, shards: list[tuple[int, list[int]]], message: str) -> None:
    plan = {
        "ranks": [{"host": ROUTER}, {"host": 0}],
        "tables": {
            "t": {
                "sharding_type": "data_parallel",
                "shards": [{"rank": rank, "rows": rows, "columns": [0, 16]} for rank, rows in shards],
            }
        },
    }
    sharding = Sharding(plan=as_file(tmp_path, plan), hosts_as_models=True)
    with pytest.raises(ConfigurationError, match=message):
        planned(sharding, collection((Spec("t", 100, 16, "SUM", ("a",)),)))
