"""What a plan comes to: bytes of each rank and table, and what a request moves to and from the ranks.

As JSON it is a plan file too (`export.plan_file`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import msgspec
from rich.filesize import decimal

from export.sharding import Sharding
from serving.bundle import Manifest, WeightDtype
from serving.plan import Block, Shard, ShardingType

# What travels to and from a rank.
ID_BYTES = 8
LENGTH_BYTES = 8
WEIGHT_BYTES = 4
SUM_BYTES = 4
# Ranks that hold this many times what the tables do are worth a word, and so many of the tables that make it so.
_MULTIPLIED = 1.1
_NAMED = 3


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
    """A rank: its stored bytes in all and by table, its share of all ranks' bytes, and a request's traffic.

    `bytes_in` are the ids, lengths and weights of a request that the rank is sent, on average over ids spread evenly
    over rows; `bytes_out` are the FP32 sums that it answers.
    """

    host: int
    bytes: int
    share: float
    bytes_in: int
    bytes_out: int
    shards: int
    tables: dict[str, int]


class PlanReport(msgspec.Struct, frozen=True):
    """Ranks and tables by name.

    Attributes:
        batch_size: what the traffic is for.
        bytes: of all ranks, copies included; `table_bytes` of all tables, each once.
        memory_bytes: what a rank can hold; None where nothing limits it. `memory_assumed`: nobody said so, and it is
            a part of this machine's memory.
        notes: what one should know of it, a sentence each.
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
    plan = manifest.plan
    specs = {table.name: table for table in manifest.tables}
    tables = {}
    by_rank: list[dict[str, int]] = [defaultdict(int) for _ in plan.ranks]
    counts = [0] * len(plan.ranks)
    for name, shards in plan.shards_by_table.items():
        spec = specs[name]
        sizes = [spec.shard_bytes(shard) for shard in shards]
        for shard, size in zip(shards, sizes, strict=True):
            by_rank[shard.rank][name] += size
            counts[shard.rank] += 1
        tables[name] = TableReport(
            sharding_type=plan.sharding[name],
            rows=spec.rows,
            dim=spec.dim,
            dtype=spec.dtype,
            bytes=sum(sizes),
            shards=[
                ShardReport(rank=shard.rank, rows=shard.rows, columns=shard.columns, bytes=size)
                for shard, size in zip(shards, sizes, strict=True)
            ],
        )
    total = sum(table.bytes for table in tables.values())
    bytes_in, bytes_out = _traffic(manifest, sharding)
    ranks = [
        RankReport(
            host=rank.host,
            bytes=sum(sizes.values()),
            share=sum(sizes.values()) / total,
            bytes_in=round(bytes_in[number]),
            bytes_out=bytes_out[number],
            shards=counts[number],
            tables=dict(sizes),
        )
        for number, (rank, sizes) in enumerate(zip(plan.ranks, by_rank, strict=True))
    ]
    own = {name: spec.rows * spec.row_bytes for name, spec in specs.items()}
    assumed = sharding.memory_bytes is None and sharding.ranks > 1
    return PlanReport(
        batch_size=sharding.batch_size,
        bytes=total,
        table_bytes=sum(own.values()),
        memory_bytes=sharding.rank_bytes if assumed else sharding.memory_bytes,
        memory_assumed=assumed,
        notes=list(_notes(tables, own, sharding, assumed=assumed)),
        ranks=ranks,
        tables=tables,
    )


def _notes(
    tables: Mapping[str, TableReport], own: Mapping[str, int], sharding: Sharding, *, assumed: bool
) -> Iterator[str]:
    """What a person would not expect: bytes that are stored several times, and a limit that nobody set."""
    total, once = sum(table.bytes for table in tables.values()), sum(own.values())
    if total > _MULTIPLIED * once:
        more = sorted(tables, key=lambda name: own[name] - tables[name].bytes)
        named = ", ".join(
            f"{name!r} ({tables[name].sharding_type.value}) {decimal(tables[name].bytes - own[name])}"
            for name in more[:_NAMED]
            if tables[name].bytes > own[name]
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


def _traffic(manifest: Manifest, sharding: Sharding) -> tuple[Mapping[int, float], Mapping[int, int]]:
    """Bytes to and from each rank for one request over all features."""
    bytes_in: dict[int, float] = defaultdict(float)
    bytes_out: dict[int, int] = defaultdict(int)
    pieces: dict[str, tuple[Shard, ...]] = manifest.plan.pieces_by_table
    id_bytes = ID_BYTES + (WEIGHT_BYTES if manifest.weighted else 0)
    samples = sharding.batch_size
    for table in manifest.tables:
        readers = sum(feature.table == table.name for feature in manifest.features)
        ids = samples * sum(sharding.pooling_factors_of(table.name, readers))
        for shard in pieces[table.name]:
            bytes_in[shard.rank] += ids * shard.height / table.rows * id_bytes + readers * samples * LENGTH_BYTES
            bytes_out[shard.rank] += readers * samples * shard.width * SUM_BYTES
    return bytes_in, bytes_out
