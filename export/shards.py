"""A table's stored rows, cut into the shards of a plan, and read back from them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from export.dequantize import Bytes, dequantize
from serving.bundle import Manifest, Table, WeightDtype
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


def read_rows(
    directory: Path, manifest: Manifest, shards: Sequence[Shard], table: Table, ids: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The numbers of rows `ids` of `table`, as its shards hold them.

    Args:
        shards: make the table up once.

    Returns:
        The numbers [n, dim], and the sizes that rounding acts on in computing them: |code × scale| + |bias|, which
        may cancel to a small number [n, dim].
    """
    numbers = np.zeros((len(ids), table.dim))
    sizes = np.zeros_like(numbers)
    for shard in shards:
        here = np.flatnonzero((ids >= shard.rows[0]) & (ids < shard.rows[1]))
        stored = _mapped(directory, manifest, shard, table.dtype)[ids[here] - shard.rows[0]]
        rows = dequantize(stored, table.dtype).astype(np.float64)
        bias = stored[:, 2:4].copy().view(np.float16).astype(np.float64) if table.dtype.quantized else 0.0
        columns = slice(*shard.columns)
        numbers[here, columns] = rows
        sizes[here, columns] = np.abs(rows - bias) + np.abs(bias)
    return numbers, sizes


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


def _mapped(directory: Path, manifest: Manifest, shard: Shard, dtype: WeightDtype) -> Bytes:
    return np.memmap(
        directory / manifest.plan.ranks[shard.rank].weights,
        np.uint8,
        mode="r",
        offset=shard.offset_bytes,
        shape=(shard.height, dtype.row_bytes(shard.width)),
    )
