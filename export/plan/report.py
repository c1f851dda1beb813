"""The report of a plan: the bytes of each rank and table, and the bytes that a request moves.

As JSON, it can be read as an explicit plan (`export.plan.planner`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from rich.filesize import decimal

from export.plan.sharding import ROUTER_BYTES, Sharding
from export.plan.traffic import HostTraffic, host_traffic, shard_traffic, sums_pattern
from serving.bundle.formats import WeightDtype
from serving.bundle.manifest import Manifest
from serving.bundle.plan import ROUTER, Block, Rank, Shard, ShardingType
from serving.bundle.tables import OutputDtype, Table
from serving.requests.captured import SkippedLines, read_captured

# A note says so if ranks hold more than this many times the tables' bytes. The number of tables that it names.
_COPIES_NOTED = 1.1
_TABLES_NAMED = 3


def plan_notes(manifest: Manifest, sharding: Sharding) -> Iterator[str]:
    """Notes on a plan: tables with copies, assumed limits, hosts without a shard, unreadable lines of the traffic.

    Args:
        manifest: tables and plan.
        sharding: the settings of the plan, before `Sharding.measured`.
    """
    yield from _copies(manifest)
    if sharding.memory_assumed:
        yield (
            f"a rank was taken to hold {decimal(sharding.rank_bytes)}, 1/{sharding.machine_ranks} of this machine's "
            "memory: --memory-per-rank says what yours can"
        )
    if sharding.router_assumed:
        yield f"the router was taken to hold {decimal(ROUTER_BYTES)}: --router-memory says what yours can"
    if sharding.hosts_as_models and sharding.plan is None:
        hosts = len(manifest.plan.ranks) - 1
        if hosts < sharding.hosts:
            yield f"{sharding.hosts - hosts} of {sharding.hosts} hosts would hold nothing: the plan has {hosts}"
    if sharding.traffic is not None:
        skipped, path = SkippedLines(), Path(sharding.traffic)
        for _ in read_captured(path, skipped, follow=True):
            pass
        yield from skipped.report(path)


def _copies(manifest: Manifest) -> Iterator[str]:
    shards = manifest.plan.shards_by_table
    stored = {table.name: sum(map(table.shard_bytes, shards[table.name])) for table in manifest.tables}
    more = {table.name: stored[table.name] - table.rows * table.row_bytes for table in manifest.tables}
    total = sum(stored.values())
    without_copies = total - sum(more.values())
    if total > _COPIES_NOTED * without_copies:
        named = ", ".join(
            f"{name!r} ({manifest.plan.sharding[name].value}) {decimal(more[name])}"
            for name in sorted(more, key=lambda name: -more[name])[:_TABLES_NAMED]
            if more[name] > 0
        )
        yield (
            f"ranks hold {decimal(total)} for {decimal(without_copies)} of tables, {total / without_copies:.1f} "
            f"times as much; most of it for {named}: a smaller --memory-per-rank, or --sharding, has fewer copies"
        )


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
    """A rank: its bytes, and its traffic for one request.

    Attributes:
        host: the number of its host. −1: a router's own rank.
        bytes: stored bytes.
        memory_bytes: the most bytes that it can hold. None: no limit was set.
        share: its share of all ranks' bytes, in [0, 1].
        bytes_in: bytes of ids, lengths and per-id weights that it gets, for ids spread evenly over rows. With hosts
            as models, this and `bytes_out` go over the network, except those of the router's own rank, which are 0.
        bytes_out: bytes of the sums that it sends.
        shards: number of its shards.
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
    """The bytes that a request moves between the router and a host for one table.

    Attributes:
        host: the number of the host.
        table: the table's name.
        pattern: how the partial sums are merged, in TorchRec's words. reduce-scatter: the table's rows are cut over
            hosts. all-to-all: each host answers whole columns.
        to_host_bytes: bytes of ids, lengths and per-id weights.
        to_router_bytes: bytes of partial sums.
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
        memory_bytes: the most bytes that a rank can hold. None: no limit.
        memory_assumed: whether `memory_bytes` was not set, and is an equal part of this machine's memory.
        router_bytes: the most bytes that the router's own rank can hold. None: no limit, or no router.
        router_assumed: whether `router_bytes` was not set.
        notes: surprising properties of the plan, a sentence each.
        ranks: the ranks, by number.
        tables: the tables, by name.
        transfers: with hosts as models, the bytes that a request moves. Otherwise empty. The router's own tables move
            none.
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
        """The name of each rank: "router" or "host 0" with hosts as models, otherwise its number."""
        if not self.transfers:
            return [str(number) for number in range(len(self.ranks))]
        return ["router" if rank.host == ROUTER else f"host {rank.host}" for rank in self.ranks]


def report_plan(manifest: Manifest, sharding: Sharding, sums_dtype: OutputDtype = OutputDtype.FP32) -> PlanReport:
    """The report of the plan of `manifest`, for requests as in `sharding`, and hosts that answer in `sums_dtype`.

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
                to_host_bytes=round(transfers.to_host[table]),
                to_router_bytes=round(transfers.to_router[table]),
            )
            for host, transfers in traffic.items()
            for table in transfers.to_host
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
        shards = [(name, shard.bytes) for name, t in tables.items() for shard in t.shards if shard.rank == number]
        table_bytes: Counter[str] = Counter()
        for name, size in shards:
            table_bytes[name] += size
        reports.append(
            RankReport(
                host=rank.host,
                bytes=table_bytes.total(),
                memory_bytes=_memory(rank, sharding),
                share=table_bytes.total() / total,
                bytes_in=round(moved[number][0]),
                bytes_out=round(moved[number][1]),
                shards=len(shards),
                tables=dict(table_bytes),
            )
        )
    return reports


def _moved(manifest: Manifest, sharding: Sharding, traffic: Mapping[int, HostTraffic]) -> list[tuple[float, float]]:
    """The bytes that a request moves to and from each rank."""
    ranks = manifest.plan.ranks
    if traffic:
        nothing = HostTraffic({}, {})
        transfers = [traffic.get(rank.host, nothing) for rank in ranks]
        return [(sum(transfer.to_host.values()), sum(transfer.to_router.values())) for transfer in transfers]
    moved = [(0.0, 0.0)] * len(ranks)
    for shard, sent, answered in shard_traffic(manifest, sharding, sharding.batch_size):
        before = moved[shard.rank]
        moved[shard.rank] = before[0] + sent, before[1] + answered
    return moved


def _memory(rank: Rank, sharding: Sharding) -> int | None:
    """The most bytes of a rank, if it is known. In an explicit plan, the ranks of a host are not known here."""
    if not sharding.hosts_as_models:
        return sharding.memory_bytes
    if rank.host == ROUTER:
        return sharding.router_bytes
    if sharding.memory_bytes is None or sharding.plan is not None:
        return None
    return sharding.memory_bytes * sharding.local_ranks
