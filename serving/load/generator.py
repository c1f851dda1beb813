"""Requests sent by clients that wait for their answers, or at random moments whatever the server does.

Messages are made beforehand and answers are not decoded, but for those that are checked: an answer has come when its
bytes are here. What a client of ours adds is not in these numbers.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from typing import Any

import grpc
import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2

from serving.bundle import Bundle
from serving.client import Retries
from serving.client.connection import Connection, Tls
from serving.client.meaning import error_of
from serving.load.requests import Prepared
from serving.reference import pool

_METHOD = "/inference.GRPCInferenceService/ModelInfer"
# For a new Python and its imports, where several processes are to begin together.
_HEAD_START_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What to send for how long, by one process.

    Attributes:
        clients: how many at once, each sending its next request when the last is answered; or 0, and then
        rate: requests a second, at random moments (Poisson).
        seconds: of each of `repeats`,
        warm_up_s: before the first, not counted.
        check: the share of answers that is compared with what they should be.
    """

    clients: int
    rate: float
    seconds: float
    repeats: int
    warm_up_s: float
    check: float
    seed: int = 0


@dataclass(slots=True)
class Run:
    """One repeat.

    Attributes:
        seconds: how long it took, the last answers included.
        latencies_s: of each answer; from when the request was due, where it was due at a time.
        samples, ids: of the requests that were answered.
        errors: how often each kind of error came instead, by class name,
        errors_s: and after how long.
        checked: how many answers were compared,
        wrong: and what was wrong with some.
        busy: the share of the time that the generator was at work itself, of its busiest process.
        late_s: how long after it was due each request was sent.
    """

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    samples: int = 0
    ids: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    errors_s: list[float] = field(default_factory=list)
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    busy: float = 0.0
    late_s: list[float] = field(default_factory=list)

    def join(self, other: "Run") -> None:
        """Take in what another process saw of the same repeat."""
        self.seconds = max(self.seconds, other.seconds)
        self.latencies_s += other.latencies_s
        self.samples += other.samples
        self.ids += other.ids
        self.errors += other.errors
        self.errors_s += other.errors_s
        self.checked += other.checked
        self.wrong += other.wrong
        self.busy = max(self.busy, other.busy)
        self.late_s += other.late_s


def generate(
    url: str,
    requests: Sequence[Prepared],
    load: Load,
    timeout_s: float,
    bundle: Bundle | None = None,
    processes: int = 1,
    tls: Tls | None = None,
) -> list[Run]:
    """Put `load` on the server at `url`; one Run for each repeat.

    Args:
        timeout_s: deadline of each request.
        bundle: what answers are checked against; they are not where it is None.
        processes: share the load; at most as many as there are clients.
        tls: certificates; in the clear where None.
    """
    connection = Connection(addresses=[url], timeout_s=timeout_s, retries=Retries(attempts=1), tls=tls)
    shares = _shares(load, processes)
    if len(shares) == 1:
        return _generate(connection, requests, bundle, 0.0, load)
    start = partial(_generate, connection, requests, bundle, time.time() + _HEAD_START_S)
    with ProcessPoolExecutor(len(shares), get_context("spawn")) as pool:
        seen = list(pool.map(start, shares))
    for others in seen[1:]:
        for run, other in zip(seen[0], others, strict=True):
            run.join(other)
    return seen[0]


def _shares(load: Load, processes: int) -> list[Load]:
    if not load.clients:
        return [replace(load, rate=load.rate / processes, seed=number) for number in range(processes)]
    counts = [len(part) for part in np.array_split(range(load.clients), min(processes, load.clients))]
    return [replace(load, clients=count, seed=number) for number, count in enumerate(counts)]


def _generate(
    connection: Connection, requests: Sequence[Prepared], bundle: Bundle | None, at: float, load: Load
) -> list[Run]:
    time.sleep(max(0.0, at - time.time()))
    return asyncio.run(_Generator(connection, requests, load, bundle).runs())


class _Generator:
    def __init__(
        self, connection: Connection, requests: Sequence[Prepared], load: Load, bundle: Bundle | None
    ) -> None:
        self._connection = connection
        self._load = load
        self._bundle = bundle
        self._random = np.random.default_rng(load.seed)
        shuffled = [requests[index] for index in self._random.permutation(len(requests))]
        self._source = cycle(shuffled)
        self._every = round(1 / load.check) if load.check else 0
        self._answers = 0
        # By the identity of a request, which keeps it: the answer that was found right.
        self._right: dict[int, bytes] = {}

    async def runs(self) -> list[Run]:
        async with self._connection.channel(grpc.aio) as channel:
            # No serializers: bytes go out and bytes come in.
            self._call = channel.unary_unary(_METHOD)
            if self._load.warm_up_s:
                await self._run(self._load.warm_up_s)
            return [await self._run(self._load.seconds) for _ in range(self._load.repeats)]

    async def _run(self, seconds: float) -> Run:
        run = Run()
        kept: list[tuple[Prepared, bytes]] = []
        started, worked = time.perf_counter(), time.thread_time()
        loop = self._closed if self._load.clients else self._open
        await loop(run, kept, started + seconds)
        run.seconds = time.perf_counter() - started
        run.busy = (time.thread_time() - worked) / run.seconds
        for request, answer in kept:  # afterwards: checking takes longer than answering
            if self._right.get(id(request)) == answer:
                continue
            if wrong := what_is_wrong(self._bundle, request, answer):
                run.wrong += wrong
            else:
                self._right[id(request)] = answer
        return run

    async def _closed(self, run: Run, kept: list[tuple[Prepared, bytes]], end: float) -> None:
        async def one() -> None:
            while (due := time.perf_counter()) < end:
                await self._ask(run, kept, next(self._source), due)

        await asyncio.gather(*(one() for _ in range(self._load.clients)))

    async def _open(self, run: Run, kept: list[tuple[Prepared, bytes]], end: float) -> None:
        """Latency counts from when a request was due: a stall, of the server or here, shows in all it held up."""
        loop = asyncio.get_running_loop()
        running = set()

        def ask(due: float) -> None:
            task = loop.create_task(self._ask(run, kept, next(self._source), due))
            running.add(task)
            task.add_done_callback(running.discard)

        def keep_time() -> None:
            due = time.perf_counter()
            while (due := due + self._random.exponential(1 / self._load.rate)) < end:
                time.sleep(max(0.0, due - time.perf_counter()))
                loop.call_soon_threadsafe(ask, due)

        await asyncio.to_thread(keep_time)  # asyncio's own clock ticks in milliseconds
        await asyncio.gather(*running)

    async def _ask(self, run: Run, kept: list[tuple[Prepared, bytes]], request: Prepared, due: float) -> None:
        run.late_s.append(time.perf_counter() - due)
        try:
            answer: Any = await self._call(request.message, timeout=self._connection.timeout_s)
        except grpc.aio.AioRpcError as error:
            run.errors[type(error_of(error.code().name, error.details() or "")).__name__] += 1
            run.errors_s.append(time.perf_counter() - due)
            return
        run.latencies_s.append(time.perf_counter() - due)
        run.samples += request.samples
        run.ids += request.tensors.values.size
        if self._every and self._bundle is not None:
            if self._answers % self._every == 0:
                run.checked += 1
                if self._right.get(id(request)) != answer:
                    kept.append((request, answer))
            self._answers += 1


def what_is_wrong(bundle: Bundle | None, request: Prepared, answer: bytes) -> list[str]:
    """Lines that say how `answer`, a serialized ModelInferResponse, differs from what `bundle` says it should be."""
    if bundle is None:
        return []
    response = service_pb2.ModelInferResponse.FromString(answer)
    if response.model_version != bundle.path.name:
        return [f"expected answers of version {bundle.path.name}, the bundle's, got {response.model_version}"]
    expected = pool(bundle.path, bundle.manifest, request.tensors)
    output = response.outputs[0]
    embeddings = np.frombuffer(
        response.raw_output_contents[0], np.float16 if output.datatype == "FP16" else np.float32
    )
    shape = [1, *expected.answer.shape]
    if list(output.shape) != shape:
        return [f"expected embeddings of shape {shape}, got {list(output.shape)}"]
    misses = expected.misses(embeddings.reshape(shape[1:]))
    return [f"feature {name!r}: an answer is off by {error:.3g}" for name, error in misses]
