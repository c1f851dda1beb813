"""Score parts in this process, or in several at once."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any

from serving.batch.inputs import Part
from serving.batch.part_scores import Job, score_part
from serving.errors import InternalError
from serving.freed_memory import FreedMemory

# How often rows are counted that other processes have scored, in seconds.
_COUNT_S = 0.5
# prctl(2)
_PR_SET_PDEATHSIG = 1

_worker: "_Worker | None" = None


def score_parts(job: Job, parts: Sequence[Part], workers: int, rows_done: Callable[[int], object]) -> None:
    """Score parts.

    Args:
        job: what is done to each.
        parts: the parts.
        workers: how many processes share them. 1: this one scores them all.
        rows_done: called with numbers of rows that are done, from time to time.

    Raises:
        InternalError: a process was killed.
        Exception: as `score_part`. Other parts that are being scored are finished before.
    """
    if workers == 1 or len(parts) <= 1:
        if parts:
            with job.batch_scores.source.open() as model:
                for part in parts:
                    score_part(model, job, part, rows_done)
        return
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    counted = 0
    workers = min(workers, len(parts))
    initial = (job, counter, os.getpid())
    with ProcessPoolExecutor(workers, context, initializer=_start, initargs=initial) as pool:
        waiting = iter(parts)
        futures = {pool.submit(_score, part) for part in islice(waiting, 2 * workers)}
        try:
            while futures:
                done, futures = wait(futures, _COUNT_S, FIRST_COMPLETED)
                total = counter.value
                rows_done(total - counted)
                counted = total
                for future in done:
                    future.result()
                    futures |= {pool.submit(_score, part) for part in islice(waiting, 1)}
        except BrokenProcessPool as error:
            raise InternalError(
                "one of the --workers was killed: if memory was short, `dmesg` says so: run the command again to go "
                "on, with fewer --workers"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Worker:
    """What a process scores parts with. The model is opened for the first part: an error belongs to a part."""

    def __init__(self, job: Job, counter: Any) -> None:
        self.job = job
        self.counter = counter
        self.model: Any = None


def _start(job: Job, counter: Any, parent: int) -> None:
    """Prepare a process that scores parts, on one core.

    It ends when its parent does. So it does not write into the folder of the next run.
    """
    global _worker
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before that
        sys.exit(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    FreedMemory()  # malloc keeps the memory of a batch for the next one
    _worker = _Worker(job, counter)


def _score(part: Part) -> None:
    worker = _worker
    if worker is None:
        raise RuntimeError("a process scored a part before it was prepared")
    if worker.model is None:
        worker.model = worker.job.batch_scores.source.open()

    def rows_done(rows: int) -> None:
        with worker.counter.get_lock():
            worker.counter.value += rows

    score_part(worker.model, worker.job, part, rows_done)
