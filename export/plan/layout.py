"""The byte offsets of shards in their rank's weights file, and a check that they fit its memory."""

from collections.abc import Mapping, Sequence

import msgspec

from export.errors import PlanError
from serving.bundle.manifest import SHARD_ALIGNMENT
from serving.bundle.plan import ROUTER, Plan, Shard
from serving.bundle.tables import Table
from serving.tables.page_cache import HUGE_PAGE

# A shard of at least so many bytes starts at a huge page. The unused bytes before it are at most 3 % of it.
_LARGE = 32 * HUGE_PAGE


def whole_shard(table: Table, rank: int) -> Shard:
    """One shard with all of `table`, at byte offset 0."""
    return Shard(table=table.name, rank=rank, rows=(0, table.rows), columns=(0, table.dim), offset_bytes=0)


def with_offsets(tables: Sequence[Table], shards: Mapping[str, Sequence[Shard]]) -> tuple[Shard, ...]:
    """Place shards one after another in their ranks' files: each at a cache line, a large one at a huge page."""
    ends: dict[int, int] = {}
    placed = []
    for table in tables:
        for shard in shards[table.name]:
            size = table.shard_bytes(shard)
            offset = _up(ends.get(shard.rank, 0), HUGE_PAGE if size >= _LARGE else SHARD_ALIGNMENT)
            ends[shard.rank] = offset + aligned(size)
            placed.append(msgspec.structs.replace(shard, offset_bytes=offset))
    return tuple(placed)


def aligned(size_bytes: int) -> int:
    """Round the bytes of a shard up to where the next shard may start."""
    return _up(size_bytes, SHARD_ALIGNMENT)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


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
        here = [(by_name[each.table].shard_bytes(each), each.table) for each in plan.shards if each.rank == rank]
        total = sum(size for size, _ in here)
        if limit is not None and total > limit:
            size, name = max(here)
            who, what_to_do = _named(plan, rank)
            raise PlanError(
                f"{who} would hold {total:,} bytes, {total - limit:,} more than its {limit:,}: "
                f"its largest shard is {size:,} bytes of table {name!r}: give {what_to_do}"
            )


def _named(plan: Plan, rank: int) -> tuple[str, str]:
    """The name of a rank for a message, and the option that raises its limit."""
    more = "more --memory-per-rank or --ranks"
    if all(each.weights_file is not None for each in plan.ranks):
        return f"rank {rank}", more
    host = plan.ranks[rank].host
    return (
        ("the router", "more --router-memory, or cut tables over hosts") if host == ROUTER else (f"host {host}", more)
    )


def overflow_of(pieces: Sequence[tuple[int, str]], ranks: int, memory_bytes: int) -> str | None:
    """Try to place shards, the largest first, each on the emptiest rank.

    Args:
        pieces: the bytes of each shard, and its table.
        ranks: number of ranks.
        memory_bytes: the most bytes of each.

    Returns:
        A message about the first shard that does not fit. None: all fit.
    """
    free = [memory_bytes] * ranks
    total = sum(size for size, _ in pieces)
    for size, name in sorted(pieces, reverse=True):
        rank = free.index(max(free))
        if size > free[rank]:
            return (
                f"table {name!r}: a shard of it takes {size:,} bytes, {size - free[rank]:,} more than any of {ranks} "
                f"ranks has left of its {memory_bytes:,}: all tables take {total:,} bytes: give more "
                "--memory-per-rank or --ranks, allow types that cut smaller, or store narrower dtypes"
            )
        free[rank] -= size
    return None
