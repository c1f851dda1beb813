"""What a plan comes to: the bytes of each rank and table, and the bytes that a request moves.

The report as JSON is also a plan file (`export.plan.file`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from rich.filesize import decimal

from export.plan.sharding import Sharding
from export.plan.traffic import shard_traffic
from serving.bundle.manifest import Manifest
from serving.bundle.plan import Block, Shard, ShardingType
from serving.bundle.rows import WeightDtype
from serving.bundle.tables import Table

# A note is made where ranks hold more than this many times the tables' bytes. It names so many tables.
_COPIES_NOTED = 1.1
_TABLES_NAMED = 3


class ShardReport(msgspec.Struct, frozen=True):
    """A shard and its stored bytes."""

    rank: int
    rows: Block
    columns: Block
    bytes: int


class TableReport(msgspec.Struct, frozen=True):
    """A table, how it is placed, and the bytes of all its shards, copies included."""

    sharding_type: ShardingType
    rows: int
    dim: int
    dtype: WeightDtype
    bytes: int
    shards: list[ShardReport]


class RankReport(msgspec.Struct, frozen=True):
    """What a rank holds, and what a request moves.

    Attributes:
        host: the number of its host.
        bytes: stored bytes.
        share: its part of all ranks' bytes.
        bytes_in: the ids, lengths and weights that a request sends it, for ids spread evenly over rows.
        bytes_out: the FP32 sums that it answers with.
        shards: how many it holds.
        tables: its stored bytes by table.
    """

    host: int
    bytes: int
    share: float
    bytes_in: int
    bytes_out: int
    shards: int
    tables: dict[str, int]


class PlanReport(msgspec.Struct, frozen=True):
    """A whole plan.

    Attributes:
        batch_size: samples of the request that traffic is counted for.
        bytes: stored bytes of all ranks, copies included.
        table_bytes: stored bytes of all tables, each counted once.
        memory_bytes: what a rank can hold; None where nothing limits it.
        memory_assumed: nobody set `memory_bytes`; it is an equal part of this machine's memory.
        notes: what a person would not expect, a sentence each.
        ranks: the ranks, by number.
        tables: the tables, by name.
    """

    batch_size: int
    bytes: int
    table_bytes: int
    memory_bytes: int | None
    memory_assumed: bool
    notes: list[str]
    ranks: list[RankReport]
    tables: dict[str, TableReport]


def report_plan(manifest: Manifest, sharding: Sharding) -> PlanReport:
    """Add up the plan of `manifest`, for requests as `sharding` expects them."""
    shards = manifest.plan.shards_by_table
    tables = {table.name: _table_report(manifest, table, shards[table.name]) for table in manifest.tables}
    stored = {table.name: table.rows * table.row_bytes for table in manifest.tables}
    assumed = sharding.memory_bytes is None and sharding.ranks > 1
    return PlanReport(
        batch_size=sharding.batch_size,
        bytes=sum(table.bytes for table in tables.values()),
        table_bytes=sum(stored.values()),
        memory_bytes=sharding.rank_bytes if assumed else sharding.memory_bytes,
        memory_assumed=assumed,
        notes=list(_notes(tables, stored, sharding, assumed=assumed)),
        ranks=_rank_reports(manifest, tables, sharding),
        tables=tables,
    )


def _table_report(manifest: Manifest, table: Table, placed: Iterable[Shard]) -> TableReport:
    shards = [
        ShardReport(rank=shard.rank, rows=shard.rows, columns=shard.columns, bytes=table.shard_bytes(shard))
        for shard in placed
    ]
    return TableReport(
        sharding_type=manifest.plan.sharding[table.name],
        rows=table.rows,
        dim=table.dim,
        dtype=table.dtype,
        bytes=sum(shard.bytes for shard in shards),
        shards=shards,
    )


def _rank_reports(manifest: Manifest, tables: Mapping[str, TableReport], sharding: Sharding) -> list[RankReport]:
    total = sum(table.bytes for table in tables.values())
    bytes_in, bytes_out = [0.0] * len(manifest.plan.ranks), [0.0] * len(manifest.plan.ranks)
    for shard, sent, answered in shard_traffic(manifest, sharding, sharding.batch_size):
        bytes_in[shard.rank] += sent
        bytes_out[shard.rank] += answered
    reports = []
    for number, rank in enumerate(manifest.plan.ranks):
        here = [(name, shard.bytes) for name, t in tables.items() for shard in t.shards if shard.rank == number]
        held: Counter[str] = Counter()
        for name, size in here:
            held[name] += size
        reports.append(
            RankReport(
                host=rank.host,
                bytes=held.total(),
                share=held.total() / total,
                bytes_in=round(bytes_in[number]),
                bytes_out=round(bytes_out[number]),
                shards=len(here),
                tables=dict(held),
            )
        )
    return reports


def _notes(
    tables: Mapping[str, TableReport], stored: Mapping[str, int], sharding: Sharding, *, assumed: bool
) -> Iterator[str]:
    """What a person would not expect: bytes that are stored several times, and a limit that nobody set.

    Args:
        tables: the tables with all their copies.
        stored: the bytes of one copy of each table.
        sharding: what was asked of the planner.
        assumed: whether nobody set the memory of a rank.
    """
    total, once = sum(table.bytes for table in tables.values()), sum(stored.values())
    if total > _COPIES_NOTED * once:
        more = sorted(tables, key=lambda name: stored[name] - tables[name].bytes)
        named = ", ".join(
            f"{name!r} ({tables[name].sharding_type.value}) {decimal(tables[name].bytes - stored[name])}"
            for name in more[:_TABLES_NAMED]
            if tables[name].bytes > stored[name]
        )
        yield (
            f"ranks hold {decimal(total)} for {decimal(once)} of tables, {total / once:.1f} times as much; most "
            f"of it for {named}: a smaller --memory-per-rank, or --sharding, has fewer copies"
        )
    if assumed:
        yield (
            f"a rank was taken to hold {decimal(sharding.rank_bytes)}, 1/{sharding.ranks} of this machine's memory: "
            "--memory-per-rank says what yours can"
        )
