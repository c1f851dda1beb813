"""One request on several threads: the same engine with one and with more, in process."""

import os
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np
import torch

from benchmarks.inprocess import lookup
from benchmarks.measure import Result, interleave, p50, ratio_of
from benchmarks.model_memory import in_memory
from benchmarks.workload import Arrays, Workload
from serving.engine import Engine

COUNTS = (2, 4)
# Requests, by their samples, and how often they are asked in each repeat.
REQUESTS = 16
ROUNDS = {8: 400, 128: 200, 512: 60, 2048: 20}
REPEATS = 5


def counts() -> list[int]:
    """The numbers of threads that this machine has cores for."""
    return [count for count in COUNTS if count <= (os.cpu_count() or 1)]


def run(workload: Workload) -> Iterator[Result]:
    """Check and lookup of a request in arrays with one thread ÷ with several: how many times as fast those are.

    Of each ratio the median of the repeats, and the least and the most of them.
    """
    torch.set_num_threads(1)
    engines = {count: in_memory(workload.bundle, threads=count) for count in (1, *counts())}
    for samples, rounds in ROUNDS.items():
        requests = [workload.request(samples, seed) for seed in range(min(REQUESTS, 16384 // samples))]
        for request in requests:
            expected = lookup(engines[1], request)
            for engine in engines.values():
                np.testing.assert_array_equal(lookup(engine, request), expected)
        for count in counts():
            pair = {count_: _asking(engines[count_], requests) for count_ in (1, count)}
            repeats = []
            for _ in range(REPEATS):
                times = interleave({str(count_): ask for count_, ask in pair.items()}, rounds)
                repeats.append([p50(times[str(count_)]) for count_ in pair])
            one, several = np.median(repeats, axis=0).tolist()
            if count == counts()[0]:
                yield Result(f"threads_1_p50_b{samples}_s", one)
            yield Result(f"threads_{count}_p50_b{samples}_s", several)
            yield ratio_of(f"threads_{count}_over_1_b{samples}", (repeat[0] / repeat[1] for repeat in repeats))
    for engine in engines.values():
        engine.close()


def _asking(engine: Engine, requests: list[Arrays]) -> Callable[[], Any]:
    endless = cycle(requests)
    return lambda: lookup(engine, next(endless))
