"""How long a placement takes, called in turn with the same tables on one rank, and how long each of its steps."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch

from export.probe import Arguments
from serving.engine import torchscript

_LEAST_ROUNDS = 30
_WARM_UP_ROUNDS = 5


# (values int64 [N], offsets int64 [F·B + 1], weights float32 [N] or None), as programs take them.


@dataclass(frozen=True, slots=True)
class Times:
    """Medians, in seconds, but for the percentiles."""

    latency_s: float
    latency_p99_s: float
    one_rank_s: float
    one_rank_p99_s: float
    split_s: float
    slowest_rank_s: float
    merge_s: float


def measure(
    program: torch.jit.ScriptModule,
    one_rank: torch.jit.ScriptModule,
    requests: Sequence[Arguments],
    ranks: int,
    seconds: float,
) -> Times:
    """Call `program`, its steps and `one_rank` in turn for `seconds`, and often enough for medians to hold."""
    with torchscript():
        placed, whole = (torch.jit.freeze(each.eval()).forward for each in (program, one_rank))
    asked = cycle(requests)
    latencies, wholes, steps = [], [], []
    end = time.perf_counter() + seconds
    rounds = -_WARM_UP_ROUNDS
    while rounds < _LEAST_ROUNDS or time.perf_counter() < end:
        request = next(asked)
        seen = _timed(placed, request), _timed(whole, request)
        stepped = _steps(program, ranks, request)
        if rounds >= 0:
            latencies.append(seen[0])
            wholes.append(seen[1])
            steps.append(stepped)
        rounds += 1
    split, slowest, merge = np.median(np.array(steps), axis=0)
    return Times(
        latency_s=float(np.median(latencies)),
        latency_p99_s=float(np.percentile(latencies, 99)),
        one_rank_s=float(np.median(wholes)),
        one_rank_p99_s=float(np.percentile(wholes, 99)),
        split_s=float(split),
        slowest_rank_s=float(slowest),
        merge_s=float(merge),
    )


def _timed(forward: Any, request: Arguments) -> float:
    start = time.perf_counter()
    forward(*request, None)
    return time.perf_counter() - start


def _steps(program: Any, ranks: int, request: Arguments) -> tuple[float, float, float]:
    """Seconds of splitting, of the slowest rank's lookup, and of merging; one rank has its lookup alone."""
    if not hasattr(program, "split"):
        return 0.0, _timed(program.forward, request), 0.0
    start = time.perf_counter()
    asked = program.split(*request, None)
    split = time.perf_counter() - start
    sums, lookups = [], []
    for rank in range(ranks):
        start = time.perf_counter()
        sums.append(program.lookup(rank, *asked[rank], None))
        lookups.append(time.perf_counter() - start)
    start = time.perf_counter()
    program.merge(sums, request[1], None)
    return split, max(lookups), time.perf_counter() - start
