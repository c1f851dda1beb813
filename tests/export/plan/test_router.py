"""With hosts as models: what the router holds itself, and what is left to hosts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torchrec import EmbeddingBagCollection

from examples.hosts.dlrm import IDS_PER_SAMPLE, dlrm_tables
from export import ExportConfig, Sharding, WeightDtype
from export.errors import PlanError
from export.pipeline import plan_model
from export.plan.report import PlanReport, report_plan
from export.plan.router_plan import router_tables
from serving.bundle.manifest import Manifest
from serving.bundle.plan import ROUTER
from serving.errors import ConfigurationError
from serving.requests.captured import CapturedRequest
from tests.support.models import Spec, collection, int8_table

# INT8: 20 kB, 200 kB, 2 MB. All save alike.
SIZES = tuple(
    Spec(name, rows, 16, "SUM", (f"{name}_id",)) for name, rows in (("s", 1000), ("m", 10_000), ("l", 100_000))
)


def planned(sharding: Sharding, module: EmbeddingBagCollection | None = None, **dtype: WeightDtype) -> Manifest:
    return plan_model(module or collection(SIZES), ExportConfig(sharding=sharding, dtype=dtype))


def hosts(**settings: Any) -> Sharding:
    return Sharding(hosts_as_models=True, **({"ranks": 4, "ranks_per_host": 2, "memory_bytes": 1 << 30} | settings))


def in_router(manifest: Manifest) -> set[str]:
    return {shard.table for shard in manifest.plan.shards if shard.rank == 0}


def names_of(manifest: Manifest) -> set[str]:
    return {table.name for table in manifest.tables}


def test_small_tables_are_in_the_router() -> None:
    manifest = planned(hosts(router_bytes=300_000))
    assert in_router(manifest) == {"s", "m"}
    assert [(rank.host, rank.weights_file) for rank in manifest.plan.ranks] == [
        (ROUTER, "weights.0.bin"),
        *((host, None) for host in range(len(manifest.plan.ranks) - 1)),
    ]
    assert {shard.table for shard in manifest.plan.shards if shard.rank > 0} == {"l"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({}, {"s"}, id="small"),
        # 100 times the bytes of `s`, and saves 4 · 2000 + 68 bytes of a sample where `s` saves 72.
        pytest.param({"pooling_factors": {"l": 2000}}, {"l"}, id="hot"),
        pytest.param({"pooling_factors": {"l": 1700}}, {"s"}, id="not hot enough"),
    ],
)
def test_the_router_takes_what_saves_most_for_its_bytes(settings: Any, expected: set[str]) -> None:
    """It can hold `l` alone or the other two; whoever is first leaves no room."""
    manifest = planned(hosts(router_bytes=2_010_000, types={"m": "table_wise"}, **settings))
    assert in_router(manifest) == expected


def test_a_tables_savings_count_each_feature_and_column() -> None:
    """Both tables are asked for two ids of a sample."""
    specs = (Spec("once", 1000, 16, "SUM", ("c",)), Spec("twice", 1000, 16, "SUM", ("a", "b")))
    sharding = hosts(router_bytes=20_100, pooling_factors={"once": 2})
    assert in_router(planned(sharding, collection(specs))) == {"twice"}


def test_a_table_too_large_for_the_router_leaves_room_for_others() -> None:
    manifest = planned(hosts(router_bytes=250_000, pooling_factors={"l": 1e5}))
    assert in_router(manifest) == {"s", "m"}


def test_explicit_types_are_kept() -> None:
    """`data_parallel` is in the router, all other types are on hosts, even if the router has room for them."""
    manifest = planned(hosts(types={"s": "row_wise", "m": "data_parallel", "l": "table_wise"}))
    assert in_router(manifest) == {"m"}
    kinds = {table: kind.value for table, kind in manifest.plan.sharding.items()}
    assert kinds == {"s": "row_wise", "m": "table_wise", "l": "table_wise"}
    types = {"s": ["data_parallel"], "m": ["row_wise", "data_parallel"], "l": ["row_wise", "table_wise"]}
    assert in_router(planned(hosts(types=types))) == {"s", "m"}
    assert in_router(planned(hosts(types=types, router_bytes=30_000))) == {"s"}


def test_a_table_fixed_to_the_router_takes_its_bytes_once() -> None:
    sharding = hosts(types={"m": "data_parallel"}, pooling_factors={"m": 1e5}, router_bytes=410_000)
    assert in_router(planned(sharding)) == {"s", "m"}


def test_hosts_get_no_copies() -> None:
    """TorchRec's planner would copy small tables to all ranks: they would end up in the router, beyond its memory."""
    manifest = planned(hosts(router_bytes=0))
    assert in_router(manifest) == set()
    assert report_plan(manifest, hosts(router_bytes=0)).bytes <= 2.3e6


def test_one_rank_on_one_host() -> None:
    manifest = planned(hosts(ranks=1, ranks_per_host=None, router_bytes=30_000))
    assert in_router(manifest) == {"s"}
    assert {(shard.table, shard.rank) for shard in manifest.plan.shards} == {("s", 0), ("m", 1), ("l", 1)}


def test_assumed_settings_are_noted() -> None:
    sharding = hosts(memory_bytes=None, machine_bytes=8_000_000, types={"l": "row_wise"})
    report = report_plan(planned(sharding), sharding)
    assert (report.memory_bytes, report.memory_assumed) == (4_000_000, True)  # a host is a machine like this
    assert (report.router_bytes, report.router_assumed) == (1_000_000_000, True)
    assert report.notes == [
        "a rank was taken to hold 4.0 MB, 1/2 of this machine's memory: --memory-per-rank says what yours can",
        "the router was taken to hold 1.0 GB: --router-memory says what yours can",
    ]
    said = hosts(types={"l": "row_wise"}, router_bytes=10**6)
    assert report_plan(planned(said), said).notes == []


def test_a_host_without_tables_is_left_out_and_noted() -> None:
    sharding = hosts(ranks=8, types={"l": "table_wise"}, router_bytes=10**6)
    report = report_plan(planned(sharding), sharding)
    assert [rank.host for rank in report.ranks] == [ROUTER, 0]
    assert report.notes == ["3 of 4 hosts would hold nothing: the plan has 1"]


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        pytest.param(
            hosts(),
            "hosts: expected a table on at least one, the router would hold all: plan without --hosts-as-models, or "
            "with less --router-memory",
            id="all-in-the-router",
        ),
        pytest.param(
            hosts(router_bytes=100_000, types={"m": "data_parallel"}),
            "the router would hold 200,000 bytes, 100,000 more than its 100,000: its largest shard is 200,000 bytes of "
            "table 'm': give more --router-memory, or cut tables over hosts",
            id="data_parallel-that-does-not-fit",
        ),
        pytest.param(
            hosts(router_bytes=0, ranks=1, ranks_per_host=None, memory_bytes=2_000_000),
            "host 0 would hold 2,220,000 bytes, 220,000 more than its 2,000,000: its largest shard is 2,000,000 bytes of "
            "table 'l': give more --memory-per-rank or --ranks",
            id="a-host",
        ),
        pytest.param(
            hosts(router_bytes=0, types={"*": "table_wise"}, memory_bytes=1_500_000),
            "table 'l': a shard of it takes 2,000,000 bytes, 500,000 more than any of 4 ranks has left of its 1,500,000: "
            "all tables take 2,220,160 bytes: give more --memory-per-rank or --ranks, allow types that cut smaller, or "
            "store narrower dtypes",
            id="a-rank",
        ),
    ],
)
def test_impossible_router_plans_are_refused_by_name(sharding: Sharding, message: str) -> None:
    with pytest.raises(PlanError) as refused:
        planned(sharding)
    assert str(refused.value) == message


def test_a_router_s_memory_without_a_router_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="router_memory: expected hosts_as_models with it"):
        Sharding(router_bytes=1000)


@pytest.mark.parametrize(
    ("dtype", "router_bytes", "tables", "stored"),
    [
        pytest.param(WeightDtype.INT8, 300_000_000, 20, 147_395_424, id="int8, 300 MB"),
        pytest.param(WeightDtype.INT8, 600_000_000, 21, 552_365_616, id="int8, 600 MB"),
        pytest.param(WeightDtype.INT4, 300_000_000, 21, 284_551_984, id="int4, 300 MB"),
    ],
)
def test_few_of_the_tables_of_dlrm_are_on_hosts(
    dtype: WeightDtype, router_bytes: int, tables: int, stored: int
) -> None:
    """MLPerf's DLRM-v2: five tables of 40 M rows are what needs four hosts."""
    ids = {f"t{number}": float(ids) for number, ids in enumerate(IDS_PER_SAMPLE)}
    sharding = hosts(ranks_per_host=1, memory_bytes=16 * 10**9, router_bytes=router_bytes, pooling_factors=ids)
    manifest = planned(sharding, dlrm_tables(), **{"*": dtype})
    report: PlanReport = report_plan(manifest, sharding)
    assert len(in_router(manifest)) == tables
    assert report.ranks[0].bytes == stored
    assert len(report.ranks) == 5
    assert {transfer.table for transfer in report.transfers} == names_of(manifest) - in_router(manifest)
    assert json.loads(msgspec.json.encode(report))["ranks"][0]["host"] == ROUTER


def test_a_table_is_sharded_over_hosts_where_the_network_is_fast() -> None:
    """A host has two ranks. Between them nothing travels over the network."""
    module = collection((Spec("t", 100_000, 64, "SUM", ("a",)),))

    def kind(network_bytes_per_s: int | None) -> str:
        sharding = hosts(router_bytes=0, pooling_factors={"t": 100}, network_bytes_per_s=network_bytes_per_s)
        return planned(sharding, module).plan.sharding["t"].value

    assert [kind(10**9), kind(None), kind(10**11)] == ["table_row_wise", "table_row_wise", "row_wise"]


def test_hot_tables_are_found_in_captured_requests(tmp_path: Path) -> None:
    lengths = [1, 1, 3000]
    line = CapturedRequest(at="", why="slow: 9 ms", values=[0] * sum(lengths), lengths=lengths)
    (tmp_path / "m.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    sharding = hosts(router_bytes=2_010_000, types={"m": "table_wise"})
    assert in_router(planned(sharding)) == {"s"}
    assert in_router(planned(replace(sharding, traffic=tmp_path / "m.jsonl"))) == {"l"}


def test_a_table_that_fills_the_router_to_the_byte_is_in_it() -> None:
    stored = -(-1000 * 20 // 128) * 128  # INT8 of dim 16, up to where another shard could begin
    assert in_router(planned(hosts(router_bytes=stored))) == {"s"}
    assert in_router(planned(hosts(router_bytes=stored - 1, memory_bytes=1 << 30))) == set()


def test_savings_include_weights_of_ids() -> None:
    """64 + 4 bytes for a bag of either; 10 ids of 8 bytes are more than 18 of 4."""
    tables = [
        msgspec.structs.replace(int8_table(name, 1000, 16), weighted=name == "weighted")
        for name in ("weighted", "plain")
    ]
    readers = {"weighted": ["w"], "plain": ["p"]}
    for factor, expected in ((18, "weighted"), (22, "plain")):
        sharding = hosts(router_bytes=20_096, pooling_factors={"weighted": 10.0, "plain": float(factor)})
        assert router_tables(tables, readers, sharding) == {expected}
