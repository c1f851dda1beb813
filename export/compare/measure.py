"""How long a placement takes, and how many times that of the same tables on one rank, round by round."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from export.probe import Arguments
from serving.engine import torchscript
from serving.load.report import Figure

_ROUNDS = 9
_LEAST_CALLS = 4
_WARM_UP_CALLS = 5
# The median of all rounds one could make lies outside the second to the eighth of nine as rarely as nine coins show
# at most one head, or at most one tail.
CONFIDENCE = 1 - 2 * (1 + _ROUNDS) / 2**_ROUNDS


@dataclass(frozen=True, slots=True)
class Times:
    """In seconds. Figures are of rounds, less the smallest and the largest; a round's are medians.

    Attributes:
        latency_s, one_rank_s: of a call, of the placement and of one rank beside it; `p99` of all calls.
        over_one_rank: of each round, the placement's ÷ one rank's.
        side_by_side_over_one_rank: of each round, the sum of the three steps ÷ one rank's.
    """

    latency_s: Figure
    latency_p99_s: float
    one_rank_s: Figure
    one_rank_p99_s: float
    over_one_rank: Figure
    side_by_side_over_one_rank: Figure
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
    """Call `program`, `one_rank` and the steps of `program` in turn, in rounds that take `seconds` together."""
    with torchscript():
        placed, whole = (torch.jit.freeze(each.eval()).forward for each in (program, one_rank))
    asked = cycle(requests)

    def calls(least: int, seconds: float) -> npt.NDArray[np.float64]:
        """Of each call: the placement, one rank, and the three steps [n, 5]."""
        end = time.perf_counter() + seconds
        seen: list[tuple[float, ...]] = []
        while len(seen) < least or time.perf_counter() < end:
            request = next(asked)
            # In turn, which of them finds the ids in the cache.
            if len(seen) % 2:
                first, second = _timed(placed, request), _timed(whole, request)
            else:
                second, first = _timed(whole, request), _timed(placed, request)
            seen.append((first, second, *_steps(program, ranks, request)))
        return np.array(seen)

    calls(_WARM_UP_CALLS, 0)
    return summarize([calls(_LEAST_CALLS, seconds / _ROUNDS) for _ in range(_ROUNDS)])


def summarize(rounds: Sequence[npt.NDArray[np.float64]]) -> Times:
    """What rounds come to.

    Args:
        rounds: of each call the seconds of the placement, one rank beside it, and the three steps [n, 5].
    """
    latency, one, *steps = np.array([np.median(each, axis=0) for each in rounds]).T
    split, slowest, merge = (float(np.median(step)) for step in steps)
    p99, one_p99, *_ = np.percentile(np.concatenate(rounds), 99, axis=0)
    return Times(
        latency_s=_figure(latency),
        latency_p99_s=float(p99),
        one_rank_s=_figure(one),
        one_rank_p99_s=float(one_p99),
        over_one_rank=_figure(latency / one),
        side_by_side_over_one_rank=_figure(np.sum(steps, axis=0) / one),
        split_s=split,
        slowest_rank_s=slowest,
        merge_s=merge,
    )


def _figure(rounds: npt.NDArray[np.float64]) -> Figure:
    return Figure.of(sorted(rounds.tolist())[1:-1])


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
