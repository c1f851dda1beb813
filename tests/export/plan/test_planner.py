"""TorchRec's planner, for quantized tables: what fits where, and what is said if nothing does."""

from pathlib import Path

import pytest

from export import ExportConfig, Sharding, export_model
from export.errors import PlanError
from export.pipeline import plan_model
from export.plan.report import PlanReport, report_plan
from serving.bundle.plan import ShardingType
from serving.engine import Engine
from tests.support.models import MIXED, Spec, collection
from tests.support.sharded_exports import sharded


def test_sizes_are_the_quantized_ones(tmp_path: Path) -> None:
    """Four ranks that hold a quarter of the int8 bytes each: a tenth less does not do."""
    spec = Spec("t", 10_000, 64, "SUM", ("x",))
    bytes_ = 10_000 * (64 + 4)

    def export(memory_bytes: int) -> Path:
        sharding = Sharding(ranks=4, memory_bytes=memory_bytes, types={"t": "row_wise"})
        return export_model(collection((spec,)), tmp_path / "r", "m", ExportConfig(sharding=sharding))

    with pytest.raises(PlanError) as refused:
        export(bytes_ // 4 - bytes_ // 40)
    assert str(refused.value) == (
        "table 't': a shard of it takes 170,112 bytes, 17,112 more than any of 4 ranks has left of its 153,000: all "
        "tables take 680,448 bytes: give more --memory-per-rank or --ranks, allow types that cut smaller, or store narrower dtypes"
    )
    manifest = Engine.open(export(bytes_ // 4 + 128)).bundle.manifest
    assert sum(manifest.files[name].size_bytes for name in manifest.weights_files) == bytes_


def test_the_default_memory_of_a_rank_is_its_share_of_the_machine() -> None:
    """Or `auto` copies every table to every rank, for which it is fastest."""
    specs = [Spec(f"t{number}", 10_000, 64, "SUM", (f"x{number}",)) for number in range(4)]
    needed_bytes = 4 * 10_000 * (64 + 4)

    def plan(machine_bytes: int) -> PlanReport:
        config = ExportConfig(sharding=Sharding(ranks=8, machine_bytes=machine_bytes))
        return report_plan(plan_model(collection(specs), config), config.sharding)

    roomy = plan(100 * needed_bytes)
    assert (roomy.bytes, roomy.table_bytes, roomy.memory_bytes) == (
        8 * needed_bytes,
        needed_bytes,
        100 * needed_bytes // 8,
    )
    assert roomy.notes == [
        "ranks hold 21.8 MB for 2.7 MB of tables, 8.0 times as much; most of it for 't0' (data_parallel) 4.8 MB, 't1' "
        "(data_parallel) 4.8 MB, 't2' (data_parallel) 4.8 MB: a smaller --memory-per-rank, or --sharding, has fewer "
        "copies",
        "a rank was taken to hold 34.0 MB, 1/8 of this machine's memory: --memory-per-rank says what yours can",
    ]
    tight = plan(needed_bytes + needed_bytes // 2)
    assert tight.bytes <= needed_bytes + needed_bytes // 2
    with pytest.raises(PlanError) as refused:
        plan(needed_bytes // 2)
    assert str(refused.value).endswith(
        ": a rank was taken to hold 1/8 of this machine's 1,360,000 bytes: --memory-per-rank says what it can"
    )


def test_a_fleet_is_planned_on_any_machine() -> None:
    sharding = Sharding(ranks=8, machine_bytes=1000, memory_bytes=1 << 40)
    report = report_plan(plan_model(collection(MIXED), ExportConfig(sharding=sharding)), sharding)
    assert (report.memory_bytes, report.memory_assumed) == (1 << 40, False)
    assert not any("machine" in note for note in report.notes)


def test_the_planner_cuts_what_does_not_fit_whole(tmp_path: Path) -> None:
    specs = (Spec("big", 10_000, 64, "SUM", ("x",)), Spec("small", 10, 64, "SUM", ("y",)))
    sharding = Sharding(ranks=4, ranks_per_host=2, memory_bytes=300_000)
    plan = Engine.open(
        export_model(collection(specs), tmp_path / "r", "m", ExportConfig(sharding=sharding))
    ).bundle.manifest.plan
    assert plan.sharding["big"] not in (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL)
    assert [rank.host for rank in plan.ranks] == [0, 0, 1, 1]


def test_auto_simple_is_the_rule_of_thumb(tmp_path: Path) -> None:
    specs = (
        Spec("long", 1001, 16, "SUM", ("a",)),
        Spec("wide", 1000, 40, "SUM", ("b",)),
        Spec("long_and_wide", 1001, 40, "SUM", ("c",)),
        Spec("plain", 1000, 32, "SUM", ("d",)),
    )
    sharding = Sharding(ranks=2, types={"*": "auto-simple"}, row_wise_over=1000, column_wise_over=32)
    bundle = export_model(collection(specs), tmp_path / "r", "m", ExportConfig(sharding=sharding))
    plan = Engine.open(bundle).bundle.manifest.plan
    assert {table: kind.value for table, kind in plan.sharding.items()} == {
        "long": "row_wise",
        "wide": "column_wise",
        "long_and_wide": "row_wise",
        "plain": "table_wise",
    }
    assert Sharding().row_wise_over == 1_000_000
    assert Sharding().column_wise_over == 256


@pytest.mark.parametrize(
    "types", [["column_wise", "table_column_wise"], ["row_wise"], ["table_row_wise", "row_wise"]]
)
def test_the_planner_chooses_among_the_types_given(tmp_path: Path, types: list[str]) -> None:
    sharding = Sharding(ranks=4, ranks_per_host=2, types={"user": types}, min_partition={"user": 4})
    plan = sharded(tmp_path, sharding).bundle.manifest.plan
    assert plan.sharding["user"].value in types
    if "column_wise" in types:
        assert {shard.width for shard in plan.shards_by_table["user"]} == {4}
