"""Quantize all tables into the ranks' files, block by block, on all cores."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from export.rows.quantize import quantize
from export.rows.shard_files import write_rows
from export.rows.table_error import TableError
from export.trained.checkpoint import Checkpoint, block_bounds
from export.trained.tables import TrainedTable
from serving.bundle.manifest import Manifest
from serving.bundle.plan import Shard, row_blocks
from serving.bundle.tables import Table

T = TypeVar("T")
R = TypeVar("R")

# A thread holds a block and a few copies of it, about 30 MB. The disk is the limit long before this many.
_MOST_THREADS = 8


def store_rows(
    files_of_ranks: Mapping[int, Path], trained: Sequence[TrainedTable], manifest: Manifest, weights: Checkpoint
) -> Iterator[tuple[str, TableError, int]]:
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
        After each block: the name of its table, the error of the table so far, the number of elements in the block.

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
        # One more than cores, since a thread sometimes waits for a file or for the GIL.
        pool = stack.enter_context(ThreadPoolExecutor(cores + 1))
        for table, stored in zip(trained, manifest.tables, strict=True):
            error = TableError(stored.dtype)
            store = partial(_store_block, files, table, stored, shards[table.name], weights)
            for found in _in_order(pool, store, _bounds(table, shards[table.name]), ahead=2 * cores):
                error.join(found)
                yield table.name, error, found.tally.elements


def _bounds(table: TrainedTable, shards: Sequence[Shard]) -> Iterator[tuple[int, int]]:
    """The rows of some shards of a table, in blocks [start, stop), each row once."""
    for first, last in row_blocks(shards):
        for start, stop in block_bounds(table):
            if max(start, first) < min(stop, last):
                yield max(start, first), min(stop, last)


def _store_block(
    files: Mapping[int, int],
    table: TrainedTable,
    stored: Table,
    shards: Sequence[Shard],
    weights: Checkpoint,
    bounds: tuple[int, int],
) -> TableError:
    """Store the rows [start, stop) of a table, and say how far they moved."""
    start, stop = bounds
    rows = weights.rows(table, start, stop)
    bytes_ = quantize(table.name, start, rows, stored.dtype).numpy()
    write_rows(files, stored, shards, start, bytes_)
    error = TableError(stored.dtype)
    error.add(start, rows.float().numpy(), bytes_)
    return error


def _in_order(pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], *, ahead: int) -> Iterator[R]:
    """`pool.map` in bounded memory: at most `ahead` results wait to be taken."""
    waiting: deque[Future[R]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
