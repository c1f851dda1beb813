"""Where each table goes, and at which byte of which file."""

from collections.abc import Sequence

from serving.bundle import SHARD_ALIGNMENT, Plan, Rank, Shard, Table


def plan_one_rank(tables: Sequence[Table]) -> Plan:
    """All tables whole on one CPU rank, one after another, each at a cache-line boundary."""
    shards = []
    end = 0
    for table in tables:
        shards.append(Shard(table=table.name, rank=0, rows=(0, table.rows), columns=(0, table.dim), offset_bytes=end))
        end += -(-table.rows * table.row_bytes // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
    return Plan(
        sharding={table.name: "table_wise" for table in tables},
        ranks=(Rank(host=0, device="cpu", weights="weights.0.bin"),),
        shards=tuple(shards),
        row_alignment=1,
    )
