"""Quantize all tables into the ranks' files: block by block, on all cores, cut into shards."""

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Self

import numpy as np
import torch

from export.rows.quantize import quantize
from export.rows.table_error import TableError
from export.trained.checkpoint import Checkpoint, block_bounds, block_rows
from export.trained.tables import TrainedTable
from serving.bundle.formats import Bytes, Floats
from serving.bundle.manifest import FileDigest, Manifest
from serving.bundle.plan import Shard, row_blocks
from serving.bundle.tables import Table
from serving.ordered_map import map_in_order

_READ_BYTES = 1 << 18  # stays in a core's cache between being read and hashed


class RunningDigests:
    """The digests of files that are written during a `with` block.

    Each file is read again from its start, as far as all its bytes are written. So the digest is that of the file's
    own bytes, with padding. If a rank has several shards of one table, the rest of its file is read in `finish`.

    Args:
        files_of_ranks: the files, by number of the rank. They are made if they are missing.
        manifest: tables and plan.
    """

    def __init__(self, files_of_ranks: Mapping[int, Path], manifest: Manifest) -> None:
        self._files_of_ranks = files_of_ranks
        row_bytes = {table.name: table.dtype.row_bytes for table in manifest.tables}
        # For each rank, its shards in the order of the file, each with the bytes of a row.
        self._shards: dict[int, list[tuple[Shard, int]]] = {rank: [] for rank in files_of_ranks}
        for shard in sorted(manifest.plan.shards, key=lambda shard: shard.offset_bytes):
            if shard.rank in files_of_ranks:
                self._shards[shard.rank].append((shard, row_bytes[shard.table](shard.width)))
        self._written: dict[str, int] = {}
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        buffer = memoryview(bytearray(_READ_BYTES))  # for all, since one thread reads
        with ExitStack() as stack:
            self._hashed_files = {
                rank: _HashedFile(stack.enter_context(path.open("a+b", buffering=0)).fileno(), buffer)
                for rank, path in self._files_of_ranks.items()
            }
            self._thread = ThreadPoolExecutor(1)
            stack.callback(self._thread.shutdown, cancel_futures=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def written(self, table: str, stop: int) -> None:
        """Note that all rows of `table` below `stop` are written, as far as these ranks have them.

        Raises:
            OSError: a file cannot be read.
        """
        self._written[table] = stop
        for rank, shards in self._shards.items():
            if any(shard.table == table for shard, _ in shards):
                self._hash_to(rank, self._whole_bytes(rank))
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft().result()

    def finish(self) -> dict[int, FileDigest]:
        """The digests of the whole files, by number of the rank. Call it when all rows are written.

        Raises:
            OSError: a file cannot be read.
        """
        sizes = {rank: os.fstat(hashed_file.file).st_size for rank, hashed_file in self._hashed_files.items()}
        for rank, size in sizes.items():
            self._hash_to(rank, size)
        for task in self._waiting:
            task.result()
        return {
            rank: FileDigest(size_bytes=sizes[rank], sha256=hashed_file.sha256.hexdigest())
            for rank, hashed_file in self._hashed_files.items()
        }

    def _whole_bytes(self, rank: int) -> int:
        """How many bytes at the start of a rank's file are written."""
        whole = 0
        for shard, row_bytes in self._shards[rank]:
            rows = min(max(self._written.get(shard.table, 0) - shard.rows[0], 0), shard.row_count)
            if rows:  # else the padding before it is not there yet
                whole = shard.offset_bytes + rows * row_bytes
            if rows < shard.row_count:
                break
        return whole

    def _hash_to(self, rank: int, stop: int) -> None:
        self._waiting.append(self._thread.submit(self._hashed_files[rank].hash_to, stop))


class _HashedFile:
    """A file that is hashed from its start, as far as it is written."""

    def __init__(self, file: int, buffer: memoryview) -> None:
        self.file = file
        self._buffer = buffer
        self.sha256 = hashlib.sha256()
        self._hashed = 0

    def hash_to(self, stop: int) -> None:
        """Hash the next bytes, up to `stop`."""
        while self._hashed < stop:
            size = os.preadv(self.file, [self._buffer[: stop - self._hashed]], self._hashed)
            if not size:
                raise OSError(f"expected {stop} bytes, got {self._hashed}: the file shrank while it was written")
            self.sha256.update(self._buffer[:size])
            self._hashed += size


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
            rows = table.shard_columns(stored[first - start : last - start], shard)
            _write(files[shard.rank], rows, shard.offset_bytes + (first - shard.rows[0]) * rows.shape[1])


def _write(file: int, rows: Bytes, offset: int) -> None:
    data = np.ascontiguousarray(rows).data.cast("B")
    while data:  # one write takes at most 2 GiB, and less if a signal comes
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


# A thread holds a block and a few copies of it, about 30 MB. The disk is the limit long before this many.
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class StoredRows:
    """What is stored of a table.

    Attributes:
        table: its name.
        stop: all stored rows below this one are written.
        error: of these rows.
        elements: the number of elements in the rows since the last time.
    """

    table: str
    stop: int
    error: TableError
    elements: int


def store_rows(
    files_of_ranks: Mapping[int, Path], trained: Sequence[TrainedTable], manifest: Manifest, weights: Checkpoint
) -> Iterator[StoredRows]:
    """Quantize rows, write each to every shard that has it, and compare it with what was stored.

    Only the rows are read that a shard of these ranks has.

    Several blocks are worked on at once, but their results are joined in the order of their rows. So the errors found
    and the row that an exception names do not depend on the number of cores.

    Args:
        files_of_ranks: where the rows of each rank go, by its number.
        trained: the trained tables, in the order of `manifest.tables`.
        manifest: tables and plan. Its parity and files are not read.
        weights: the checkpoint with the rows.

    Returns:
        What is stored after each block.

    Raises:
        QuantizeError: a row does not fit its dtype.
        OSError: a file cannot be written.
    """
    shards = {
        table: [shard for shard in shards_of_table if shard.rank in files_of_ranks]
        for table, shards_of_table in manifest.plan.shards_by_table.items()
    }
    cores = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    with ExitStack() as stack:
        files = {rank: stack.enter_context(path.open("wb")).fileno() for rank, path in files_of_ranks.items()}
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        # One in each thread: more would be more threads than cores. torch sets MKL's number of threads for the
        # calling thread only. MKL sums the squares, and the last bits of a sum depend on that number.
        torch.set_num_threads(1)
        pool = stack.enter_context(ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)))
        store = partial(_store_block, files, weights, _scratches(trained, cores))
        blocks = (
            _Block(table, stored, shards[table.name], start, stop)
            for table, stored in zip(trained, manifest.tables, strict=True)
            for start, stop in _bounds(table, shards[table.name])
        )
        errors: dict[str, TableError] = {}
        for block, block_error in map_in_order(pool, store, blocks, ahead=2 * cores):
            error = errors.setdefault(block.trained.name, TableError(block_error.dtype))
            error.join(block_error)
            yield StoredRows(block.trained.name, block.stop, error, block_error.tally.elements)


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows [start, stop) of a table, and the shards that may have some of them."""

    trained: TrainedTable
    stored: Table
    shards: Sequence[Shard]
    start: int
    stop: int


def _bounds(table: TrainedTable, shards: Sequence[Shard]) -> Iterator[tuple[int, int]]:
    """The rows of some shards of a table, in blocks [start, stop), each row once."""
    for first, last in row_blocks(shards):
        for start, stop in block_bounds(table):
            if max(start, first) < min(stop, last):
                yield max(start, first), min(stop, last)


def _scratches(trained: Sequence[TrainedTable], count: int) -> SimpleQueue[Floats]:
    """Memory for `count` threads: float32 [the most numbers in a block], at the start of a cache line.

    Sums of squares differ in their last bit by where in a cache line the numbers start.
    """
    most = max(block_rows(table) * table.dim for table in trained)
    free: SimpleQueue[Floats] = SimpleQueue()
    for _ in range(count):
        free.put(torch.empty(most).numpy())
    return free


def _store_block(
    files: Mapping[int, int], weights: Checkpoint, free: SimpleQueue[Floats], block: _Block
) -> tuple[_Block, TableError]:
    """Store a block, and say how far its rows moved."""
    rows = weights.rows(block.trained, block.start, block.stop)
    bytes_ = quantize(block.trained.name, block.start, rows, block.stored.dtype).numpy()
    write_rows(files, block.stored, block.shards, block.start, bytes_)
    error = TableError(block.stored.dtype)
    scratch = free.get()
    try:
        error.add(block.start, rows.float().numpy(), bytes_, scratch[: rows.numel()].reshape(rows.shape))
    finally:
        free.put(scratch)  # else another thread waits for it
    return block, error
