"""Where the shards of a rank lie in its weights file."""

from collections.abc import Mapping, Sequence

import msgspec

from serving.bundle.manifest import SHARD_ALIGNMENT
from serving.bundle.plan import Shard
from serving.bundle.tables import Table
from serving.files.page_cache import HUGE_PAGE

# A shard of so many bytes starts at a huge page: what lies unused before it is 3 % of it at most.
_LARGE = 32 * HUGE_PAGE


def whole_shard(table: Table, rank: int) -> Shard:
    """One shard with all of `table`; its offset is still 0."""
    return Shard(table=table.name, rank=rank, rows=(0, table.rows), columns=(0, table.dim), offset_bytes=0)


def with_offsets(tables: Sequence[Table], shards: Mapping[str, Sequence[Shard]]) -> tuple[Shard, ...]:
    """Lay shards one after another into their ranks' files, each at a cache line, and a large one at a huge page."""
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
