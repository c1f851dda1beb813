"""What a plan comes to, rank by rank."""

import pytest

from export import ExportConfig, Sharding
from export.pipeline import plan_model
from export.plan.report import report_plan
from serving.bundle.plan import ROUTER
from tests.support.models import MIXED, collection

TYPES = {"user": "row_wise", "item": "column_wise", "genre": "data_parallel", "word": "table_wise"}


@pytest.mark.parametrize("as_models", [False, True])
def test_each_rank_is_reported_with_its_bytes_and_capacity(as_models: bool) -> None:
    sharding = Sharding(
        ranks=4,
        ranks_per_host=2,
        memory_bytes=1 << 20,
        types=TYPES,
        batch_size=7,
        hosts_as_models=as_models,
        router_bytes=1 << 19 if as_models else None,
    )
    manifest = plan_model(collection(MIXED), ExportConfig(sharding=sharding))
    report = report_plan(manifest, sharding)
    tables = {table.name: table for table in manifest.tables}
    assert report.batch_size == 7
    assert {name: (table.rows, table.dim, table.dtype) for name, table in report.tables.items()} == {
        name: (table.rows, table.dim, table.dtype) for name, table in tables.items()
    }
    total = sum(tables[shard.table].shard_bytes(shard) for shard in manifest.plan.shards)
    for number, (rank, result) in enumerate(zip(manifest.plan.ranks, report.ranks, strict=True)):
        shards = [shard for shard in manifest.plan.shards if shard.rank == number]
        bytes_by_kind = {
            name: sum(tables[name].shard_bytes(shard) for shard in shards if shard.table == name)
            for name in {shard.table for shard in shards}
        }
        assert (result.host, result.shards, result.tables) == (rank.host, len(shards), bytes_by_kind)
        assert result.share == pytest.approx(sum(bytes_by_kind.values()) / total)
        of_host = 2 << 20 if as_models else 1 << 20
        assert result.memory_bytes == (1 << 19 if rank.host == ROUTER else of_host)
        if rank.host == ROUTER:
            assert (result.bytes_in, result.bytes_out) == (0, 0)
        else:
            assert result.bytes_in > 0
            assert result.bytes_out > 0
