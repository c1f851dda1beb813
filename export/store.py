"""Float rows into the ranks' files, block by block, on all cores."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from export.checkpoint import Checkpoint, block_bounds
from export.parity import TableError
from export.quantize import quantize
from export.shards import write_rows
from export.tables import TrainedTable
from serving.bundle import Manifest, Table
from serving.plan import Shard

T = TypeVar("T")
R = TypeVar("R")

# Each holds a block and a few copies of it, about 30 MB; the disk is the limit long before this.
_MOST_THREADS = 8


def store_rows(
    directory: Path, trained: Sequence[TrainedTable], manifest: Manifest, weights: Checkpoint
) -> Iterator[tuple[str, TableError, int]]:
    """Quantize every row, write it wherever the plan has it, and compare what was stored with it.

    Blocks are worked on side by side, and taken note of in the order of their rows: what is found, and the row that
    an error names, do not depend on the number of cores.

    Returns:
        After each block: its table's name, the error of the table so far, the number of elements of the block.

    Raises:
        QuantizeError: a row does not fit its dtype.
        OSError: a file cannot be written.
    """
    shards = manifest.plan.shards_by_table
    cores = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    with ExitStack() as stack:
        files = {
            number: stack.enter_context((directory / rank.weights).open("wb")).fileno()
            for number, rank in enumerate(manifest.plan.ranks)
        }
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # of each of ours: theirs on top would get into one another's way
        # One more than cores: now and then each waits for a file, or for another's Python.
        pool = stack.enter_context(ThreadPoolExecutor(cores + 1))
        for table, stored in zip(trained, manifest.tables, strict=True):
            error = TableError(stored.dtype)
            store = partial(_store_block, files, table, stored, shards[table.name], weights)
            for found in _in_order(pool, store, block_bounds(table), ahead=2 * cores):
                error.join(found)
                yield table.name, error, found.tally.elements


def _store_block(
    files: Mapping[int, int],
    table: TrainedTable,
    stored: Table,
    shards: Sequence[Shard],
    weights: Checkpoint,
    bounds: tuple[int, int],
) -> TableError:
    start, stop = bounds
    rows = weights.rows(table, start, stop)
    bytes_ = quantize(table.name, start, rows, stored.dtype).numpy()
    write_rows(files, stored, shards, start, bytes_)
    error = TableError(stored.dtype)
    error.add(start, rows.float().numpy(), bytes_)
    return error


def _in_order(pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], *, ahead: int) -> Iterator[R]:
    """`pool.map`, but never more than `ahead` items beyond what was taken: memory stays bounded."""
    waiting: deque[Future[R]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
