"""A table's stored rows, cut into shards and written to the ranks' files."""

import os
from collections.abc import Mapping, Sequence

import numpy as np

from serving.bundle.plan import Shard
from serving.bundle.rows import Bytes
from serving.bundle.tables import Table


def write_rows(files: Mapping[int, int], table: Table, shards: Sequence[Shard], start: int, stored: Bytes) -> None:
    """Write n consecutive rows of a table to every shard that has some of them.

    Args:
        files: an open file descriptor for each rank, by number of the rank.
        table: the table.
        shards: all shards of the table.
        start: index of the first row.
        stored: uint8 [n, row bytes], the rows.

    Raises:
        OSError: a file cannot be written.
    """
    for shard in shards:
        first, last = max(start, shard.rows[0]), min(start + len(stored), shard.rows[1])
        if first < last:
            rows = _columns(stored[first - start : last - start], table, shard)
            _write(files[shard.rank], rows, shard.offset_bytes + (first - shard.rows[0]) * rows.shape[1])


def _columns(stored: Bytes, table: Table, shard: Shard) -> Bytes:
    """The shard's columns of whole rows: uint8 [n, row bytes] → uint8 [n, row bytes of the shard]."""
    if shard.width == table.dim:
        return stored
    # A column begins where a row that ended before it would end.
    first, last = map(table.dtype.row_bytes, shard.columns)
    header = table.dtype.format.header_bytes
    return np.concatenate((stored[:, :header], stored[:, first:last]), axis=1)


def _write(file: int, rows: Bytes, offset: int) -> None:
    data = np.ascontiguousarray(rows).data.cast("B")
    while data:  # one write takes at most 2 GiB, and less if a signal comes
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
