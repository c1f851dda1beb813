"""Read-ahead for a bundle that is larger than memory: all pages of a batch are requested before its lookup.

A lookup reads one row after another, and waits for the disk at each row that is not in memory. Disks are faster if
they get many reads at once. So all pages of the batch are first requested from the kernel (posix_fadvise(2)).
"""

import mmap
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serving.bundle.manifest import Manifest
from serving.bundle.segments import segments_by_rank
from serving.requests.batches import Batch
from serving.requests.offsets import concatenate
from serving.requests.types import Ids


class _Shard(NamedTuple):
    """The place of rows [first, last) of a feature's table: in `file`, a descriptor, from `offset_bytes` on."""

    file: int
    first: int
    last: int
    row_bytes: int
    offset_bytes: int


class ReadAhead:
    """Requests the rows of batches from the disk.

    Args:
        manifest: the manifest of the bundle.
        files: the weights files on this machine, by name. The shards of other ranks are ignored.
    """

    def __init__(self, manifest: Manifest, files: Mapping[str, Path]) -> None:
        opened = {name: os.open(path, os.O_RDONLY | os.O_CLOEXEC) for name, path in files.items()}
        self._opened = opened
        self._first_pages = dict.fromkeys(opened.values(), 0)
        weakref.finalize(self, _close, [*opened.values()])
        tables = {table.name: table for table in manifest.tables}
        self._shards: dict[int, list[_Shard]] = {}
        for rank, segments in zip(manifest.plan.ranks, segments_by_rank(manifest), strict=True):
            if rank.weights_file in opened:
                for feature, shard, _, _ in segments:
                    row_bytes = tables[shard.table].dtype.row_bytes(shard.width)
                    shard_file = _Shard(opened[rank.weights_file], *shard.rows, row_bytes, shard.offset_bytes)
                    self._shards.setdefault(feature, []).append(shard_file)

    def ask(self, batch: Batch) -> None:
        """Request the rows of a batch. This returns before they are read."""
        for file, pages in self.pages_of(batch).items():
            for page in pages[pages >= self._first_pages[file]].tolist():
                os.posix_fadvise(file, page * mmap.PAGESIZE, mmap.PAGESIZE, os.POSIX_FADV_WILLNEED)

    def leave_out(self, name: str, size_bytes: int) -> None:
        """Stop requesting the first `size_bytes` of a file, which another thread reads as a whole."""
        self._first_pages[self._opened[name]] = -(-size_bytes // mmap.PAGESIZE)

    def pages_of(self, batch: Batch) -> dict[int, Ids]:
        """The pages that hold the rows of a batch, by file descriptor: sorted page numbers, each once, int64 [n]."""
        if not batch.values.size:
            return {}
        bounds = batch.offsets[:: (batch.offsets.size - 1) // len(batch.feature_set.names)]
        touched: dict[int, list[Ids]] = {}
        for position, start, stop in zip(batch.feature_set.positions.tolist(), bounds[:-1], bounds[1:], strict=True):
            ids = batch.values[start:stop]
            for shard in self._shards.get(position, ()):
                local = ids[(ids >= shard.first) & (ids < shard.last)]
                begin = (local - shard.first) * shard.row_bytes + shard.offset_bytes
                pages = touched.setdefault(shard.file, [])
                for page in range(-(-(shard.row_bytes - 1) // mmap.PAGESIZE) + 1):
                    last = np.minimum(begin + page * mmap.PAGESIZE, begin + shard.row_bytes - 1)
                    pages.append(last // mmap.PAGESIZE)
        return {file: np.unique(concatenate(pages)) for file, pages in touched.items()}


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
