"""Measure a placement in turn with the same tables on one rank, round by round."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from export.parity.answers import Arguments
from export.plan.sharding import Sharding
from export.plan.traffic import shard_traffic
from serving.bench.report import Figure
from serving.bundle.manifest import Manifest
from serving.bundle.plan import ShardingType
from serving.lookup.one_rank_program import OneRankProgram
from serving.lookup.sharded_program import ShardedProgram
from serving.torchscript import torchscript


def traffic_between(manifest: Manifest, sharding: Sharding) -> npt.NDArray[np.float64]:
    """Bytes from each rank to each other for one batch of `sharding.batch_size` samples.

    A rank sends the ids, lengths and per-id weights of its samples to the ranks that hold the rows, and gets FP32
    sums back. Ids are assumed to be spread evenly over rows. Bytes that stay on a rank are not counted, so a table
    with a copy on every rank moves nothing.

    Returns:
        float64 [W, W]; element (r, s) is sent from rank r to rank s.
    """
    ranks = len(manifest.plan.ranks)
    moved = np.zeros((ranks, ranks))
    for shard, bytes_in, bytes_out in shard_traffic(manifest, sharding, sharding.batch_size / ranks):
        if manifest.plan.sharding[shard.table] is not ShardingType.DATA_PARALLEL:
            moved[:, shard.rank] += bytes_in
            moved[shard.rank, :] += bytes_out
    np.fill_diagonal(moved, 0)
    return moved


_ROUNDS = 9
_LEAST_CALLS = 4
_WARM_UP_CALLS = 5
# An interval is from the second to the eighth of nine sorted rounds. It misses the true median as rarely as nine
# coins show at most one head, or at most one tail.
CONFIDENCE = 1 - 2 * (1 + _ROUNDS) / 2**_ROUNDS


@dataclass(frozen=True, slots=True)
class Times:
    """Times of calls, in seconds.

    Each round gives the median of its calls. A Figure has the median of the rounds, and their range without the
    smallest and the largest.

    Attributes:
        latency_s: a call of the placement.
        latency_p99_s: 99 % of all its calls took no longer.
        one_rank_s: a call of one rank, made beside it.
        one_rank_p99_s: 99 % of all those calls took no longer.
        over_one_rank: the placement's time ÷ one rank's.
        side_by_side_over_one_rank: the sum of the three steps ÷ one rank's time.
        split_s: the step that splits a request by ranks.
        slowest_rank_s: the lookup of the rank that took longest.
        merge_s: the step that merges the ranks' sums.
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
    program: nn.Module,
    one_rank: nn.Module,
    requests: Sequence[Arguments],
    ranks: int,
    seconds: float,
) -> Times:
    """Call `program`, `one_rank` and the steps of `program` in turn.

    Args:
        program: the placement's program.
        one_rank: the program of the same tables on one rank.
        requests: the arguments of calls, used again and again.
        ranks: the number of ranks of `program`.
        seconds: how long all rounds take together.
    """
    placed, single = _forward(program), _forward(one_rank)
    endless = cycle(requests)

    def calls(least: int, seconds: float) -> npt.NDArray[np.float64]:
        """Seconds of each call [n, 5]: the placement, one rank, and the three steps."""
        end = time.perf_counter() + seconds
        timed: list[tuple[float, ...]] = []
        while len(timed) < least or time.perf_counter() < end:
            request = next(endless)
            # The second call finds the rows in the cache, so the two take turns in being second.
            if len(timed) % 2:
                placed_s, single_s = _timed(placed, request), _timed(single, request)
            else:
                single_s, placed_s = _timed(single, request), _timed(placed, request)
            timed.append((placed_s, single_s, *_steps(program, ranks, request)))
        return np.array(timed)

    calls(_WARM_UP_CALLS, 0)
    return summarize([calls(_LEAST_CALLS, seconds / _ROUNDS) for _ in range(_ROUNDS)])


def summarize(rounds: Sequence[npt.NDArray[np.float64]]) -> Times:
    """Summarize rounds.

    Args:
        rounds: for each round, the seconds of its n calls, float64 [n, 5]: the placement, one rank beside it, and the
            three steps.
    """
    latency, one, *steps = np.array([np.median(times, axis=0) for times in rounds]).T
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


def _forward(program: nn.Module) -> Callable[..., Tensor]:
    """The forward of a program: frozen, if it is TorchScript."""
    if isinstance(program, OneRankProgram | ShardedProgram):
        return program.forward
    with torchscript():
        frozen: nn.Module = torch.jit.freeze(program.eval())
    return frozen.forward


def _timed(forward: Any, request: Arguments) -> float:
    start = time.perf_counter()
    forward(*request, None)
    return time.perf_counter() - start


def _steps(program: Any, ranks: int, request: Arguments) -> tuple[float, float, float]:
    """Seconds of splitting, of the slowest rank's lookup, and of merging. One rank has only the lookup."""
    if not hasattr(program, "split"):
        return 0.0, _timed(program.forward, request), 0.0
    start = time.perf_counter()
    parts = program.split(*request, None)
    split = time.perf_counter() - start
    sums, lookups = [], []
    for rank in range(ranks):
        start = time.perf_counter()
        sums.append(program.lookup(rank, *parts[rank], None))
        lookups.append(time.perf_counter() - start)
    start = time.perf_counter()
    program.merge(sums, request[1], None)
    return split, max(lookups), time.perf_counter() - start
