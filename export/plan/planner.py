"""Place tables on ranks: by an explicit plan, all on one rank, or as TorchRec's planner decides.

An explicit plan is JSON::

    {"ranks": [{"host": 0}, {"host": 0}],
     "tables": {"item": {"sharding_type": "row_wise",
                         "shards": [{"rank": 0, "rows": [0, 500], "columns": [0, 64]},
                                    {"rank": 1, "rows": [500, 1000], "columns": [0, 64]}]}}}

`tbe-export plan --json` prints one, with further keys that are ignored here. A rank with host −1 is the router's own
(`serving.bundle.plan`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from export.errors import PlanError
from export.plan.router_plan import Placement, fold_hosts, hosts_of, router_tables, side_by_side
from export.plan.sharding import Sharding
from serving.bundle.manifest import DEVICE, ROW_ALIGNMENTS, aligned
from serving.bundle.plan import ROUTER, Block, Plan, Rank, Shard, ShardingType, tiling_error
from serving.bundle.tables import Feature, Table
from serving.errors import ConfigurationError
from serving.files import UNREADABLE, read_file
from serving.tables.pages import HUGE_PAGE

# A shard of at least this many bytes starts at a huge page. The unused bytes before it are at most 3 % of it.
_LARGE = 32 * HUGE_PAGE


class _Rank(msgspec.Struct):
    host: int


class _Shard(msgspec.Struct):
    rank: int
    rows: Block
    columns: Block


class _Table(msgspec.Struct):
    sharding_type: ShardingType
    shards: list[_Shard]


class _PlanFile(msgspec.Struct):
    ranks: list[_Rank]
    tables: dict[str, _Table]


def read_plan(path: Path) -> Placement:
    """Read an explicit plan. All byte offsets are 0.

    Raises:
        ConfigurationError: the file is not such a plan.
    """
    try:
        plan = msgspec.json.decode(read_file(path, follow=True), type=_PlanFile)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if not plan.ranks:
        raise ConfigurationError(f"{path}: ranks: expected at least one")
    for number, rank in enumerate(plan.ranks):
        if rank.host < ROUTER:
            raise ConfigurationError(
                f"{path}: ranks: rank {number}: expected a host >= 0, or {ROUTER} for the router, got {rank.host}"
            )
    shards = {
        name: [
            Shard(table=name, rank=shard.rank, rows=shard.rows, columns=shard.columns, offset_bytes=0)
            for shard in table.shards
        ]
        for name, table in plan.tables.items()
    }
    return [rank.host for rank in plan.ranks], {name: t.sharding_type for name, t in plan.tables.items()}, shards


def plan_shards(tables: Sequence[Table], features: Sequence[Feature], sharding: Sharding) -> Plan:
    """Place `tables` on ranks, with the byte offsets of their shards.

    Args:
        tables: the tables with the dtypes that they are stored in: the plan is made for stored bytes.
        features: the features that read them.
        sharding: the ranks, and how to place tables on them.

    Raises:
        ConfigurationError: a constraint or an explicit plan does not fit the tables.
        PlanError: the tables do not fit the ranks. The message names a table, and how many bytes are missing.
    """
    sharding = sharding.measured(features)
    readers = {table.name: [feature.name for feature in features if feature.table == table.name] for table in tables}
    sharding.check_tables(readers)
    placement = _placement(tables, readers, sharding)
    _check_plan(tables, placement)
    limits = _limits(placement, sharding)
    if sharding.hosts_as_models:
        placement = fold_hosts(tables, placement)
    hosts, kinds, shards = placement
    plan = Plan(
        sharding={table.name: kinds[table.name] for table in tables},
        ranks=tuple(
            Rank(host=host, device=DEVICE, weights_file=_weights_file(number, host, sharding))
            for number, host in enumerate(hosts)
        ),
        shards=with_offsets(tables, shards),
        row_alignment=ROW_ALIGNMENTS[DEVICE],
    )
    if sharding.hosts_as_models and len(hosts) == 1:
        raise PlanError(
            "hosts: expected a table on at least one, the router would hold all: plan without --hosts-as-models, or "
            "with less --router-memory"
        )
    check_fits(tables, plan, limits)
    return plan


def _placement(tables: Sequence[Table], readers: Mapping[str, Sequence[str]], sharding: Sharding) -> Placement:
    if sharding.plan is not None:
        return _with_whole_tables(read_plan(Path(sharding.plan)))
    hosts = [rank // sharding.local_ranks for rank in range(sharding.ranks)]
    if not sharding.hosts_as_models:
        return hosts, *_plan_ranks(tables, readers, sharding)
    kept_by_router = router_tables(tables, readers, sharding)
    router = sharding.ranks
    kinds, shards = _plan_ranks([table for table in tables if table.name not in kept_by_router], readers, sharding)
    shards = {name: side_by_side(pieces) for name, pieces in shards.items()}
    for table in tables:
        if table.name in kept_by_router:
            kinds[table.name], shards[table.name] = ShardingType.TABLE_WISE, [table.whole_shard(router)]
    return [*hosts, ROUTER], kinds, shards


def _with_whole_tables(placement: Placement) -> Placement:
    """The placement, with `data_parallel` tables that are only on the router's ranks placed whole on one of them."""
    hosts, kinds, shards = placement
    kinds, shards = dict(kinds), dict(shards)
    routers = {rank for rank, host in enumerate(hosts) if host == ROUTER}
    for table, pieces in shards.items():
        ranks = {shard.rank for shard in pieces}
        is_copied = (
            kinds[table] is ShardingType.DATA_PARALLEL and len({(shard.rows, shard.columns) for shard in pieces}) == 1
        )
        if is_copied and ranks <= routers and len(routers) < len(hosts):
            kinds[table], shards[table] = ShardingType.TABLE_WISE, pieces[:1]
    return hosts, kinds, shards


def _limits(placement: Placement, sharding: Sharding) -> list[int | None]:
    """The most bytes of each rank of the final plan. None: no limit. With --hosts-as-models, the router is first."""
    ranks, memory_bytes = placement[0], sharding.memory_bytes
    if not sharding.hosts_as_models:
        return [memory_bytes] * len(ranks)
    hosts = hosts_of(placement)[1:]
    return [sharding.own_bytes, *(None if memory_bytes is None else memory_bytes * ranks.count(h) for h in hosts)]


def _weights_file(rank: int, host: int, sharding: Sharding) -> str | None:
    """The name of a rank's weights file. None: its host has a bundle of its own."""
    return None if sharding.hosts_as_models and host != ROUTER else f"weights.{rank}.bin"


def _plan_ranks(
    tables: Sequence[Table], readers: Mapping[str, Sequence[str]], sharding: Sharding
) -> tuple[dict[str, ShardingType], dict[str, list[Shard]]]:
    """Place tables on ranks. If there is only one rank, each table is whole on it, whatever its sharding type."""
    if tables and sharding.ranks > 1:
        from export.plan.torchrec_planner import plan_by_torchrec  # torch and torchrec: one rank needs neither

        return plan_by_torchrec(tables, readers, sharding)
    allowed = {table.name: sharding.types_of(table) for table in tables}
    kinds = {name: types[0] if len(types) == 1 else ShardingType.TABLE_WISE for name, types in allowed.items()}
    return kinds, {table.name: [table.whole_shard(0)] for table in tables}


def _check_plan(tables: Sequence[Table], placement: Placement) -> None:
    hosts, kinds, shards = placement
    names = {table.name for table in tables}
    if unknown := kinds.keys() - names:
        raise ConfigurationError(f"plan: table {min(unknown)!r}: the model has no such table")
    for table in tables:
        if table.name not in kinds:
            raise ConfigurationError(f"plan: table {table.name!r}: expected it in the plan, which has no such table")
        wrong = tiling_error(kinds[table.name], table.rows, table.dim, shards[table.name], len(hosts))
        if wrong is not None:
            raise ConfigurationError(f"plan: table {table.name!r} ({table.rows} × {table.dim}): {wrong}")


def with_offsets(tables: Sequence[Table], shards: Mapping[str, Sequence[Shard]]) -> tuple[Shard, ...]:
    """Place shards one after another in their ranks' files: each at a cache line, a large one at a huge page."""
    ends: dict[int, int] = {}
    placed = []
    for table in tables:
        for shard in shards[table.name]:
            size = table.shard_bytes(shard)
            end = ends.get(shard.rank, 0)
            offset = aligned(end, HUGE_PAGE) if size >= _LARGE else end
            ends[shard.rank] = aligned(offset + size)
            placed.append(msgspec.structs.replace(shard, offset_bytes=offset))
    return tuple(placed)


def check_fits(tables: Sequence[Table], plan: Plan, limits: Sequence[int | None]) -> None:
    """Refuse a plan in which a rank holds more bytes than its limit.

    Args:
        tables: the tables.
        plan: their plan.
        limits: the most bytes of each rank. None: no limit.

    Raises:
        PlanError: naming the rank, host or router, how many bytes are too many, and its largest table.
    """
    by_name = {table.name: table for table in tables}
    for rank, limit in enumerate(limits):
        shards = [
            (by_name[shard.table].shard_bytes(shard), shard.table) for shard in plan.shards if shard.rank == rank
        ]
        total = sum(size for size, _ in shards)
        if limit is not None and total > limit:
            size, name = max(shards)
            holder, what_to_do = _named(plan, rank)
            raise PlanError(
                f"{holder} would hold {total:,} bytes, {total - limit:,} more than its {limit:,}: "
                f"its largest shard is {size:,} bytes of table {name!r}: give {what_to_do}"
            )


def _named(plan: Plan, rank: int) -> tuple[str, str]:
    """The name of a rank for a message, and the option that raises its limit."""
    more = "more --memory-per-rank or --ranks"
    if all(rank.weights_file is not None for rank in plan.ranks):
        return f"rank {rank}", more
    host = plan.ranks[rank].host
    return (
        ("the router", "more --router-memory, or cut tables over hosts") if host == ROUTER else (f"host {host}", more)
    )
