"""The copies of a data-parallel table have to be equal: any one of them answers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from serving.bundle.manifest import Manifest
from serving.bundle.plan import Shard, ShardingType
from serving.bundle.tables import Table
from serving.bundle.weights import weights_path

_BLOCK_BYTES = 16 << 20


def differing_copies(directory: Path, manifest: Manifest) -> Iterator[str]:
    """A line for each copy that is not, byte for byte, the one on the lowest rank.

    Args:
        directory: of the bundle.
        manifest: of the bundle.
    """
    plan = manifest.plan
    for table in manifest.tables:
        if plan.sharding[table.name] is not ShardingType.DATA_PARALLEL:
            continue
        first, *others = sorted(plan.shards_by_table[table.name], key=lambda shard: shard.rank)
        rows = _rows(directory, manifest, table, first)
        for other in others:
            row = _first_difference(rows, _rows(directory, manifest, table, other))
            if row is not None:
                yield (
                    f"table {table.name!r}: row {row} of its copy on rank {other.rank} differs from that on rank "
                    f"{first.rank}, expected equal copies: export it again"
                )


def _rows(directory: Path, manifest: Manifest, table: Table, shard: Shard) -> npt.NDArray[np.uint8]:
    """The bytes of a whole copy, uint8 [rows, row bytes], mapped."""
    file = weights_path(directory, manifest, shard.rank)
    return np.memmap(file, np.uint8, mode="r", offset=shard.offset_bytes, shape=(table.rows, table.row_bytes))


def _first_difference(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> int | None:
    step = max(1, _BLOCK_BYTES // one.shape[1])
    for start in range(0, len(one), step):
        differs = (one[start : start + step] != other[start : start + step]).any(axis=1)
        if differs.any():
            return start + int(differs.argmax())
    return None
