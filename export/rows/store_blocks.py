"""Quantize all tables into the ranks' files, block by block, on all cores."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch

from export.rows.quantize import quantize
from export.rows.shard_files import write_rows
from export.rows.table_error import TableError
from export.trained.checkpoint import Checkpoint, block_bounds, block_rows
from export.trained.tables import TrainedTable
from serving.bundle.manifest import Manifest
from serving.bundle.plan import Shard, row_blocks
from serving.bundle.rows import Floats
from serving.bundle.tables import Table

T = TypeVar("T")
R = TypeVar("R")

# A thread holds a block and a few copies of it, about 30 MB. The disk is the limit long before this many.
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class StoredRows:
    """What is stored of a table.

    Attributes:
        table: its name.
        stop: all rows below this one are written, of those that are stored at all.
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
        table: [shard for shard in each if shard.rank in files_of_ranks]
        for table, each in manifest.plan.shards_by_table.items()
    }
    cores = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    with ExitStack() as stack:
        files = {rank: stack.enter_context(path.open("wb")).fileno() for rank, path in files_of_ranks.items()}
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # in each of our threads: more would be more threads than cores
        pool = stack.enter_context(ThreadPoolExecutor(cores))
        store = partial(_store_block, files, weights, _scratches(trained, cores))
        blocks = _blocks(trained, manifest.tables, shards)
        errors: dict[str, TableError] = {}
        for block, found in _in_order(pool, store, blocks, ahead=2 * cores):
            error = errors.setdefault(block.trained.name, TableError(found.dtype))
            error.join(found)
            yield StoredRows(block.trained.name, block.stop, error, found.tally.elements)


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows [start, stop) of a table, and the shards that may have some of them."""

    trained: TrainedTable
    stored: Table
    shards: Sequence[Shard]
    start: int
    stop: int


def _blocks(
    trained: Sequence[TrainedTable], tables: Sequence[Table], shards: Mapping[str, Sequence[Shard]]
) -> Iterator[_Block]:
    """The rows of some shards of all tables, each row once."""
    for table, stored in zip(trained, tables, strict=True):
        for start, stop in _bounds(table, shards[table.name]):
            yield _Block(table, stored, shards[table.name], start, stop)


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


def _in_order(pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], *, ahead: int) -> Iterator[R]:
    """`pool.map` in bounded memory: at most `ahead` results wait to be taken."""
    waiting: deque[Future[R]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
