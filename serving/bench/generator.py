"""Send traffic to a server, and measure it.

Requests are sent by clients that wait for their answers (a closed loop), or at random moments (an open loop).

The cost of our clients is not measured: requests are serialized beforehand, the clock stops when the bytes of an
answer have arrived, and only answers that are checked are decoded.
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

from serving.bench.checking import Checker
from serving.bench.requests import Prepared
from serving.bundle.load import Bundle
from serving.client import Retries
from serving.client.connection import Connection, Tls
from serving.protocol.messages import path_of
from serving.triton.error_messages import error_of

# Seconds from starting several processes until they begin together: each has to import its modules first.
_HEAD_START_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What to send, and for how long.

    Attributes:
        clients: clients at once. Each sends its next request when its last one is answered. 0: send at `rate`.
        rate: requests a second, at random moments (Poisson). Only if `clients` is 0.
        seconds: how long each repeat takes.
        repeats: how many times the traffic is measured.
        warm_up_s: seconds of the same traffic before the first repeat, not measured.
        check: share of the answers, in [0, 1], that is compared with the bundle.
        seed: of the order of requests, and of the random moments.
    """

    clients: int
    rate: float
    seconds: float
    repeats: int
    warm_up_s: float
    check: float
    seed: int = 0


@dataclass(slots=True)
class Repeat:
    """The measurements of one repeat.

    Attributes:
        seconds: how long it took, until the last answer.
        latencies_s: latency of each answer, in seconds. At a rate, it counts from when the request was due.
        samples, ids: samples and ids of the requests that were answered.
        errors: requests that got an error, by the error's class name.
        errors_s: latency of each error, in seconds.
        checked: answers that were compared with the bundle.
        wrong: the first difference of each of these that was wrong.
        busy: share of the time that the generator itself used the processor, in its busiest process.
        late_s: how late each request was sent, in seconds after it was due.
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

    def join(self, other: "Repeat") -> None:
        """Add the measurements of another process for the same repeat."""
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
    traffic: Traffic,
    timeout_s: float,
    bundle: Bundle | None = None,
    processes: int = 1,
    tls: Tls | None = None,
) -> list[Repeat]:
    """Send `traffic` to the server at `url`, and measure each repeat.

    Args:
        url: gRPC address, "host:port".
        requests: sent in random order, again and again.
        timeout_s: deadline of each request, in seconds.
        bundle: the version that is served. Answers are compared with it. None: do not check them.
        processes: processes that share the traffic, at most one for each client.
        tls: certificates. None: no TLS.
    """
    connection = Connection(addresses=[url], timeout_s=timeout_s, retries=Retries(attempts=1), tls=tls)
    shares = _shares(traffic, processes)
    if len(shares) == 1:
        return _generate(connection, requests, bundle, 0.0, traffic)
    start = partial(_generate, connection, requests, bundle, time.time() + _HEAD_START_S)
    with ProcessPoolExecutor(len(shares), get_context("spawn")) as pool:
        by_process = list(pool.map(start, shares))
    first, *rest = by_process
    for repeats in rest:
        for repeat, same_repeat in zip(first, repeats, strict=True):
            repeat.join(same_repeat)
    return first


def _shares(traffic: Traffic, processes: int) -> list[Traffic]:
    if not traffic.clients:
        return [replace(traffic, rate=traffic.rate / processes, seed=number) for number in range(processes)]
    counts = [len(part) for part in np.array_split(range(traffic.clients), min(processes, traffic.clients))]
    return [replace(traffic, clients=count, seed=number) for number, count in enumerate(counts)]


def _generate(
    connection: Connection, requests: Sequence[Prepared], bundle: Bundle | None, start_at: float, traffic: Traffic
) -> list[Repeat]:
    time.sleep(max(0.0, start_at - time.time()))
    return asyncio.run(_Generator(connection, requests, traffic, bundle).repeats())


class _Generator:
    def __init__(
        self, connection: Connection, requests: Sequence[Prepared], traffic: Traffic, bundle: Bundle | None
    ) -> None:
        self._connection = connection
        self._traffic = traffic
        self._checker = None if bundle is None else Checker(bundle)
        self._random = np.random.default_rng(traffic.seed)
        shuffled = [requests[index] for index in self._random.permutation(len(requests))]
        self._source = cycle(shuffled)
        self._every = round(1 / traffic.check) if traffic.check else 0
        self._answers = 0
        # The answers that were right, by the id() of the request.
        self._right: dict[int, bytes] = {}

    async def repeats(self) -> list[Repeat]:
        async with self._connection.channel(grpc.aio) as channel:
            # No serializers: the call takes and returns bytes.
            self._call = channel.unary_unary(path_of("ModelInfer"))
            if self._traffic.warm_up_s:
                await self._repeat(self._traffic.warm_up_s)
            return [await self._repeat(self._traffic.seconds) for _ in range(self._traffic.repeats)]

    async def _repeat(self, seconds: float) -> Repeat:
        repeat = Repeat()
        checked: list[tuple[Prepared, bytes]] = []
        started, worked = time.perf_counter(), time.thread_time()
        loop = self._closed if self._traffic.clients else self._open
        await loop(repeat, checked, started + seconds)
        repeat.seconds = time.perf_counter() - started
        repeat.busy = (time.thread_time() - worked) / repeat.seconds
        for request, answer in checked:  # after the repeat, as checking takes longer than answering
            if self._right.get(id(request)) == answer:
                continue
            assert self._checker is not None  # noqa: S101  without it `checked` is empty
            if wrong := self._checker.differences_of(request, answer):
                repeat.wrong.append(wrong[0])
            else:
                self._right[id(request)] = answer
        return repeat

    async def _closed(self, repeat: Repeat, checked: list[tuple[Prepared, bytes]], end: float) -> None:
        async def one() -> None:
            while (due := time.perf_counter()) < end:
                await self._ask(repeat, checked, next(self._source), due)

        await asyncio.gather(*(one() for _ in range(self._traffic.clients)))

    async def _open(self, repeat: Repeat, checked: list[tuple[Prepared, bytes]], end: float) -> None:
        """Send at a rate. Latency counts from when a request was due, so a stall shows in all requests it delays."""
        loop = asyncio.get_running_loop()
        running = set()

        def ask(due: float) -> None:
            task = loop.create_task(self._ask(repeat, checked, next(self._source), due))
            running.add(task)
            task.add_done_callback(running.discard)

        def keep_time() -> None:
            due = time.perf_counter()
            while (due := due + self._random.exponential(1 / self._traffic.rate)) < end:
                time.sleep(max(0.0, due - time.perf_counter()))
                loop.call_soon_threadsafe(ask, due)

        await asyncio.to_thread(keep_time)  # asyncio's own clock ticks in milliseconds
        await asyncio.gather(*running)

    async def _ask(
        self, repeat: Repeat, checked: list[tuple[Prepared, bytes]], request: Prepared, due: float
    ) -> None:
        repeat.late_s.append(time.perf_counter() - due)
        try:
            answer: Any = await self._call(request.message, timeout=self._connection.timeout_s)
        except grpc.aio.AioRpcError as error:
            repeat.errors[type(error_of(error.code().name, error.details() or "")).__name__] += 1
            repeat.errors_s.append(time.perf_counter() - due)
            return
        repeat.latencies_s.append(time.perf_counter() - due)
        repeat.samples += request.samples
        repeat.ids += request.tensors.values.size
        if self._every and self._checker is not None:
            if self._answers % self._every == 0:
                repeat.checked += 1
                if self._right.get(id(request)) != answer:
                    checked.append((request, answer))
            self._answers += 1
