"""Lookups under load: by clients that wait for their answers, or arriving whatever the server does."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

from serving.client import AsyncLookupClient, ModelInfo
from serving.encoding import Features
from serving.errors import InvalidRequest, ServingError
from serving.kjt import Array, Lengths, Tensors


@dataclass(slots=True)
class Report:
    """What happened to some lookups.

    Attributes:
        seconds: how long they were made for.
        latencies_s: of each answer; from when the request was due, where it was due at a time.
        errors: how often each kind of error came instead, by class name.
    """

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def answers_per_s(self) -> float:
        """Throughput."""
        return len(self.latencies_s) / self.seconds

    def percentile_s(self, percent: float) -> float:
        """A latency that this share of answers kept to; NaN without answers."""
        return float(np.percentile(self.latencies_s, percent)) if self.latencies_s else float("nan")


async def closed_loop(
    client: AsyncLookupClient, requests: Sequence[Features], clients: int, seconds: float
) -> Report:
    """`clients` at once, each sending its next request when the last is answered."""
    report = Report()
    source = cycle(requests)
    started = time.perf_counter()

    async def one() -> None:
        while time.perf_counter() < started + seconds:
            await _look_up(client, next(source), time.perf_counter(), report)

    await asyncio.gather(*(one() for _ in range(clients)))
    report.seconds = time.perf_counter() - started
    return report


async def open_loop(
    client: AsyncLookupClient, requests: Sequence[Features], rate: float, seconds: float, seed: int = 0
) -> Report:
    """`rate` requests a second at random moments (Poisson), whether or not earlier ones are answered.

    Latency counts from the moment that a request was due, so that a stall of the server, or of this generator,
    shows in every request that it held up.
    """
    report = Report()
    source = cycle(requests)
    random = np.random.default_rng(seed)
    due = started = time.perf_counter()
    running = set()
    while (due := due + random.exponential(1 / rate)) < started + seconds:
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(_look_up(client, next(source), due, report))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    report.seconds = time.perf_counter() - started
    return report


async def _look_up(client: AsyncLookupClient, features: Features, due: float, report: Report) -> None:
    try:
        await client.lookup(features)
    except ServingError as error:
        report.errors[type(error).__name__] += 1
    else:
        report.latencies_s.append(time.perf_counter() - due)


def random_requests(
    rows: dict[str, int], info: ModelInfo, samples: int, ids: int, count: int = 64, seed: int = 0
) -> list[Features]:
    """Requests for every feature, with `ids` uniform ids in each bag.

    Args:
        rows: of each feature's table.
        info: which features are weighted.
    """
    random = np.random.default_rng(seed)
    lengths = np.full(samples, ids, np.int32)
    requests: list[Features] = []
    for _ in range(count):
        columns = {name: (random.integers(0, rows[name], samples * ids), lengths) for name in info.dims}
        requests.append(_weighted(columns, info))
    return requests


def features_of(tensors: Tensors, info: ModelInfo) -> Features:
    """A request that was captured, as a client makes it; with a weight of 1 for each id of a weighted feature.

    Raises:
        InvalidRequest: its lengths are not those of its features and ids.
    """
    names = list(info.dims) if tensors.features is None else list(tensors.features)
    lengths: Lengths = tensors.lengths  # type: ignore[assignment]
    if not names or lengths.size % len(names) or (lengths < 0).any() or lengths.sum() != tensors.values.size:
        raise InvalidRequest("captured request: its lengths are not those of its features and ids")
    bags = lengths.reshape(len(names), -1)
    ends = np.cumsum(bags.sum(axis=1, dtype=np.int64))
    columns = {
        name: (tensors.values[end - row.sum() : end], row) for name, row, end in zip(names, bags, ends, strict=True)
    }
    return _weighted(columns, info)


def _weighted(columns: Mapping[str, tuple[Array, Lengths]], info: ModelInfo) -> Features:
    """Each feature's ids and lengths, with a weight of 1 for each id of a weighted feature."""
    return {
        name: (*column, np.ones(column[0].size, np.float32)) if name in info.weighted else column
        for name, column in columns.items()
    }
