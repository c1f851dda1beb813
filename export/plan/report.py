"""What a plan comes to: the bytes of each rank and table, and the bytes that a request moves.

The report as JSON is also a plan file (`export.plan.file`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from export.plan.notes import plan_notes
from export.plan.sharding import Sharding
from export.plan.traffic import HostTraffic, host_traffic, shard_traffic, sums_pattern
from serving.bundle.hosts import ROUTER
from serving.bundle.manifest import Manifest
from serving.bundle.plan import Block, Rank, Shard, ShardingType
from serving.bundle.rows import WeightDtype
from serving.bundle.tables import OutputDtype, Table


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
        host: the number of its host; −1 for a router's own rank.
        bytes: stored bytes.
        memory_bytes: what it can hold; None where nobody said.
        share: its part of all ranks' bytes.
        bytes_in: the ids, lengths and weights that a request sends it, for ids spread evenly over rows. With hosts as
            models, this and `bytes_out` travel over the network; nothing travels to the router's own rank.
        bytes_out: the sums that it answers with.
        shards: how many it holds.
        tables: its stored bytes by table.
    """

    host: int
    bytes: int
    memory_bytes: int | None
    share: float
    bytes_in: int
    bytes_out: int
    shards: int
    tables: dict[str, int]


class Transfer(msgspec.Struct, frozen=True):
    """What a request moves between the router and a host for one table.

    Attributes:
        host: the number of the host.
        table: the table's name.
        pattern: how the sums of the table come together, in TorchRec's words: reduce-scatter where its rows are cut
            over hosts, all-to-all where each host answers whole columns.
        to_host_bytes: ids, lengths and weights.
        to_router_bytes: partial sums.
    """

    host: int
    table: str
    pattern: str
    to_host_bytes: int
    to_router_bytes: int


class PlanReport(msgspec.Struct, frozen=True):
    """A whole plan.

    Attributes:
        batch_size: samples of the request that traffic is counted for.
        bytes: stored bytes of all ranks, copies included.
        table_bytes: stored bytes of all tables, each counted once.
        memory_bytes: what a rank can hold; None where nothing limits it.
        memory_assumed: nobody set `memory_bytes`; it is an equal part of this machine's memory.
        router_bytes: what the router's own rank can hold; None where nothing limits it, or there is no router.
        router_assumed: nobody set `router_bytes`.
        notes: what a person would not expect, a sentence each.
        ranks: the ranks, by number.
        tables: the tables, by name.
        transfers: with hosts as models, what a request moves; empty otherwise. What the router holds is not in it.
    """

    batch_size: int
    bytes: int
    table_bytes: int
    memory_bytes: int | None
    memory_assumed: bool
    router_bytes: int | None
    router_assumed: bool
    notes: list[str]
    ranks: list[RankReport]
    tables: dict[str, TableReport]
    transfers: list[Transfer]

    @property
    def names(self) -> list[str]:
        """What people call each rank: "router" and "host 0" with hosts as models, else its number."""
        if not self.transfers:
            return [str(number) for number in range(len(self.ranks))]
        return ["router" if rank.host == ROUTER else f"host {rank.host}" for rank in self.ranks]


def report_plan(manifest: Manifest, sharding: Sharding, sums_dtype: OutputDtype = OutputDtype.FP32) -> PlanReport:
    """Add up the plan of `manifest`, for requests as `sharding` expects them, and hosts that answer `sums_dtype`.

    Raises:
        ConfigurationError: the captured requests of `sharding.traffic` cannot be used.
    """
    notes = list(plan_notes(manifest, sharding))
    sharding = sharding.measured(manifest.features)
    traffic = host_traffic(manifest, sharding, sharding.batch_size, sums_dtype)
    shards = manifest.plan.shards_by_table
    tables = {table.name: _table_report(manifest, table, shards[table.name]) for table in manifest.tables}
    return PlanReport(
        batch_size=sharding.batch_size,
        bytes=sum(table.bytes for table in tables.values()),
        table_bytes=sum(table.rows * table.row_bytes for table in manifest.tables),
        memory_bytes=sharding.rank_bytes if sharding.memory_assumed else sharding.memory_bytes,
        memory_assumed=sharding.memory_assumed,
        router_bytes=sharding.own_bytes if sharding.hosts_as_models else None,
        router_assumed=sharding.router_assumed,
        notes=notes,
        ranks=_rank_reports(manifest, tables, sharding, traffic),
        tables=tables,
        transfers=[
            Transfer(
                host=host,
                table=table,
                pattern=sums_pattern(shards[table]),
                to_host_bytes=round(there.to_host[table]),
                to_router_bytes=round(there.to_router[table]),
            )
            for host, there in traffic.items()
            for table in there.to_host
        ],
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


def _rank_reports(
    manifest: Manifest, tables: Mapping[str, TableReport], sharding: Sharding, traffic: Mapping[int, HostTraffic]
) -> list[RankReport]:
    total = sum(table.bytes for table in tables.values())
    moved = _moved(manifest, sharding, traffic)
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
                memory_bytes=_memory(rank, sharding),
                share=held.total() / total,
                bytes_in=round(moved[number][0]),
                bytes_out=round(moved[number][1]),
                shards=len(here),
                tables=dict(held),
            )
        )
    return reports


def _moved(manifest: Manifest, sharding: Sharding, traffic: Mapping[int, HostTraffic]) -> list[tuple[float, float]]:
    """The bytes that a request moves to and from each rank."""
    ranks = manifest.plan.ranks
    if traffic:
        nothing = HostTraffic({}, {})
        there = [traffic.get(rank.host, nothing) for rank in ranks]
        return [(sum(each.to_host.values()), sum(each.to_router.values())) for each in there]
    moved = [(0.0, 0.0)] * len(ranks)
    for shard, sent, answered in shard_traffic(manifest, sharding, sharding.batch_size):
        before = moved[shard.rank]
        moved[shard.rank] = before[0] + sent, before[1] + answered
    return moved


def _memory(rank: Rank, sharding: Sharding) -> int | None:
    """What a rank can hold, as far as somebody said. In an explicit plan, the ranks of a host are not known here."""
    if not sharding.hosts_as_models:
        return sharding.memory_bytes
    if rank.host == ROUTER:
        return sharding.router_bytes
    known = sharding.memory_bytes is not None and sharding.plan is None
    return sharding.memory_bytes * sharding.local_ranks if known else None  # type: ignore[operator]
