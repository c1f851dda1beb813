"""Whether tables fit the memory of ranks; if not, which table does not, and by how much."""

from collections.abc import Sequence

from export.errors import PlanError
from serving.bundle.hosts import ROUTER
from serving.bundle.plan import Plan
from serving.bundle.tables import Table


def check_fits(tables: Sequence[Table], plan: Plan, limits: Sequence[int | None]) -> None:
    """Refuse a plan in which a rank holds more than it can.

    Args:
        tables: the tables.
        plan: their plan.
        limits: what each rank can hold, in bytes; None where nothing limits it.

    Raises:
        PlanError: naming the rank, host or router, by how many bytes it is too full, and the largest table there.
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
    """What people call a rank, and what it needs to hold more."""
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
        ranks: how many ranks there are.
        memory_bytes: what each can hold.

    Returns:
        What to tell a person of the first shard that finds no room; None where all do.
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
