"""A table's stored rows, cut into the shards of a plan."""

import os
from collections.abc import Mapping, Sequence

import numpy as np

from serving.bundle import Table
from serving.dequantize import Bytes
from serving.plan import Shard


def write_rows(files: Mapping[int, int], table: Table, shards: Sequence[Shard], start: int, stored: Bytes) -> None:
    """Write the rows `start`, `start` + 1, … of `table` wherever its shards have them.

    Args:
        files: an open file descriptor for each rank.
        stored: uint8 [n, row bytes].
    """
    for shard in shards:
        first, last = max(start, shard.rows[0]), min(start + len(stored), shard.rows[1])
        if first < last:
            rows = _columns(stored[first - start : last - start], table, shard)
            _write(files[shard.rank], rows, shard.offset_bytes + (first - shard.rows[0]) * rows.shape[1])


def _columns(stored: Bytes, table: Table, shard: Shard) -> Bytes:
    if shard.width == table.dim:
        return stored
    # Where a column lies is where a row that ended before it would end; a row of no columns is scale and bias.
    header, first, last = map(table.dtype.row_bytes, (0, *shard.columns))
    return np.concatenate((stored[:, :header], stored[:, first:last]), axis=1)


def _write(file: int, rows: Bytes, offset: int) -> None:
    data = np.ascontiguousarray(rows).data.cast("B")
    while data:  # the kernel writes at most 2 GiB at once, and less when a signal comes
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
