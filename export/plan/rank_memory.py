"""Whether tables fit the memory of ranks; if not, which table does not, and by how much."""

from collections.abc import Sequence

from export.errors import PlanError
from serving.bundle.plan import Plan
from serving.bundle.tables import Table


def check_fits(tables: Sequence[Table], plan: Plan, memory_bytes: int | None) -> None:
    """Refuse a plan in which a rank holds more than `memory_bytes`, unless that is None.

    Raises:
        PlanError: naming the rank, by how many bytes it is too full, and the largest table there.
    """
    if memory_bytes is None:
        return
    by_name = {table.name: table for table in tables}
    for rank in range(len(plan.ranks)):
        here = [(by_name[each.table].shard_bytes(each), each.table) for each in plan.shards if each.rank == rank]
        total = sum(size for size, _ in here)
        if total > memory_bytes:
            size, name = max(here)
            raise PlanError(
                f"rank {rank} would hold {total:,} bytes, {total - memory_bytes:,} more than its {memory_bytes:,}: "
                f"its largest shard is {size:,} bytes of table {name!r}: give more --memory-per-rank or --ranks"
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
