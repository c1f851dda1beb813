"""Rankings: 500 items for one user, with the user once or repeated, beside the best other server with the same model.

The other server is the fastest of those that `peers_scores` measures. It runs the same network, once with the user's
ids repeated, and once with the user looked up once and expanded, as its users would write it.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np
import psutil
import torch

from benchmarks.measure import Result, interleave, p50, ratio, ratio_of
from benchmarks.model_memory import in_memory
from benchmarks.peer_servers import HERE, PEERS, running
from benchmarks.rankings_workload import ITEMS, KINDS, OUTPUT, RankingsWorkload, wire_bytes
from serving.bundle.tensor_names import SHARED
from serving.client import LookupClient
from serving.client.messages import infer_request
from serving.engine import Engine
from serving.protocol.messages import ModelInferResponse
from serving.requests.types import Tensors
from serving.server import Ports, run_server

METHOD = "/inference.GRPCInferenceService/ModelInfer"
CLIENTS = 8
PEER = "grpc_aio"
WAYS = ("once", "repeated")
# How far 8-bit rows may move scores, as a share of their standard deviation.
_TOLERANCE = 0.3
_TIMEOUT_S = 60
_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        kinds: of models.
        repeats: of which a ratio is the median.
        rounds: of one client, in a repeat.
        seconds: of several clients, in a repeat.
    """

    kinds: Sequence[str]
    repeats: int
    rounds: int
    seconds: float


ALL, QUICK = Size(tuple(KINDS), 5, 20, 2.0), Size(("din",), 1, 5, 0.5)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server that answers rankings.

    Attributes:
        call: sends a serialized request, and returns the serialized answer.
        messages: its requests.
        process: the server's process. Its children may answer requests as well.
    """

    call: Callable[[bytes], bytes]
    messages: Sequence[bytes]
    process: psutil.Process


def run(folder: Path, size: Size = ALL) -> Iterator[Result]:
    """All kinds of models: in process, and served to one client and to eight."""
    torch.set_num_threads(1)
    for kind in size.kinds:
        workload = RankingsWorkload.make(kind)
        bundle = workload.export(folder / kind / "repository")
        engine = in_memory(bundle)
        yield from _in_process(workload, engine, size)
        yield from _served(workload, folder / kind, size)
    yield from _lookups(engine, workload, folder / kind, size)


def _in_process(workload: RankingsWorkload, engine: Engine, size: Size) -> Iterator[Result]:
    requests = {way: workload.tensors(repeated=way == "repeated") for way in WAYS}
    right = workload.answer(0)
    for way in WAYS:
        _expect_right(engine.outputs(requests[way][0])[OUTPUT], right)
    turns = {way: cycle(tensors) for way, tensors in requests.items()}
    candidates: dict[str, Callable[[], Any]] = {
        way: (lambda turn=turn: engine.outputs(next(turn)))  # type: ignore[misc]
        for way, turn in turns.items()
    }
    yield from _times_and_ratio(candidates, f"scores_{workload.name}_inprocess", size)


def _times_and_ratio(candidates: Mapping[str, Callable[[], Any]], what: str, size: Size) -> Iterator[Result]:
    """The times of both ways, and their ratio."""
    repeats = [
        {way: p50(seconds) for way, seconds in interleave(candidates, size.rounds, warm_up=3).items()}
        for _ in range(size.repeats)
    ]
    for way in WAYS:
        yield Result(f"user_side_{what}_{way}_p50_n{ITEMS}_s", median(repeat[way] for repeat in repeats))
    ratios = (repeat["repeated"] / repeat["once"] for repeat in repeats)
    yield ratio_of(f"repeated_over_once_{what}_p50_n{ITEMS}", ratios)


def _served(workload: RankingsWorkload, folder: Path, size: Size) -> Iterator[Result]:
    """Ours and the other server, each with the user once and repeated; called in turn."""
    name = f"rank_{workload.name}"
    absent = ""
    with ExitStack() as stack:
        server = stack.enter_context(run_server(folder / "repository", Ports(grpc=0, http=0, operations=0)))
        client = stack.enter_context(LookupClient(server.grpc, workload.name, _TIMEOUT_S))
        candidates: dict[str, Candidate] = {}
        for way in WAYS:
            tensors = workload.tensors(repeated=way == "repeated")
            messages = [infer_request(workload.name, one, client.info()).SerializeToString() for one in tensors]
            process = psutil.Process(server.process.pid)
            candidates[f"ours_{way}"] = Candidate(_connected(stack, server.grpc), messages, process)
        for way in WAYS:
            try:
                candidates[f"{PEER}_{way}"] = _peer(stack, workload, folder, way)
            except OSError as error:
                absent = str(error)
                break
        right = workload.answer(0)
        for candidate in candidates.values():
            _expect_right(_scores(_first_answer(candidate)), right)
        repeats = [_measured(candidates, size) for _ in range(size.repeats)]
    for who, candidate in candidates.items():
        yield Result(f"{name}_{who}_p50_s", median(repeat[who].p50_s for repeat in repeats))
        yield Result(f"{name}_{who}_c{CLIENTS}_rps", median(repeat[who].per_s for repeat in repeats), unit="/s")
        yield Result(f"{name}_{who}_cpu_s", median(repeat[who].cpu_s for repeat in repeats))
        yield Result(f"{name}_{who}_sent", wire_bytes(candidate.messages), unit="B")
    if absent:
        yield Result(f"{name}_{PEER}_absent", 1, unit="", note=absent)
        return
    peers = [f"{PEER}_{way}" for way in WAYS]
    yield ratio_of(
        f"best_peer_over_ours_{name}_p50",
        (min(repeat[peer].p50_s for peer in peers) / repeat["ours_once"].p50_s for repeat in repeats),
    )
    yield ratio_of(
        f"best_peer_over_ours_{name}_c{CLIENTS}",
        (repeat["ours_once"].per_s / max(repeat[peer].per_s for peer in peers) for repeat in repeats),
    )


def _peer(stack: ExitStack, workload: RankingsWorkload, folder: Path, way: str) -> Candidate:
    """Start the other server.

    Raises:
        OSError: it is not installed.
    """
    rows = folder / f"rows_{way}"
    workload.write(rows, repeated=way == "repeated")
    before = {process.pid for process in psutil.Process().children()}
    address = stack.enter_context(running(PEERS["grpc_aio_int8"], rows, folder / f"{PEER}_{way}.log"))
    (process,) = (process for process in psutil.Process().children() if process.pid not in before)
    sys.path.insert(0, str(HERE))
    from kserve import request

    messages = [request(arrays).SerializeToString() for arrays in workload.arrays(repeated=way == "repeated")]
    return Candidate(_connected(stack, address), messages, process)


def _connected(stack: ExitStack, address: str) -> Callable[[bytes], bytes]:
    channel = stack.enter_context(grpc.insecure_channel(address, _UNLIMITED))
    call = channel.unary_unary(METHOD)
    return lambda message: call(message, timeout=_TIMEOUT_S, wait_for_ready=True)


def _first_answer(candidate: Candidate) -> bytes:
    return candidate.call(candidate.messages[0])


def _scores(answer: bytes) -> Any:
    (content,) = ModelInferResponse.FromString(answer).raw_output_contents
    return np.frombuffer(content, np.float32)


def _expect_right(scores: Any, right: Any) -> None:
    allowed = _TOLERANCE * float(right.std())
    np.testing.assert_allclose(scores.reshape(-1, 1), right, rtol=0, atol=allowed)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a candidate did in a repeat.

    Attributes:
        p50_s: of one client.
        per_s: rankings a second of `CLIENTS` clients.
        cpu_s: processor time of a thousand of these.
    """

    p50_s: float
    per_s: float
    cpu_s: float


def _measured(candidates: Mapping[str, Candidate], size: Size) -> dict[str, Measured]:
    calls = {who: _in_turn(candidate) for who, candidate in candidates.items()}
    times = {who: p50(seconds) for who, seconds in interleave(calls, size.rounds, warm_up=3).items()}
    result = {}
    for who in np.random.default_rng().permutation([*candidates]).tolist():
        before = _cpu_s(candidates[who].process)
        count, seconds = _closed_loop(candidates[who], size.seconds)
        cpu_s = (_cpu_s(candidates[who].process) - before) / count * 1000
        result[who] = Measured(times[who], count / seconds, cpu_s)
    return result


def _in_turn(candidate: Candidate) -> Callable[[], bytes]:
    """Sends the next request."""
    messages = cycle(candidate.messages)
    return lambda: candidate.call(next(messages))


def _closed_loop(candidate: Candidate, seconds: float) -> tuple[int, float]:
    """The answers that clients got, each asking again when it was answered; and how long that took."""
    counts = [0] * CLIENTS
    started = time.perf_counter()

    def ask(client: int) -> None:
        turn = client
        while time.perf_counter() < started + seconds:
            candidate.call(candidate.messages[turn % len(candidate.messages)])
            turn += 1
            counts[client] += 1

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts), time.perf_counter() - started


def _cpu_s(process: psutil.Process) -> float:
    """The processor time of a server until now."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(usage.user + usage.system for usage in times))


def _lookups(engine: Engine, workload: RankingsWorkload, folder: Path, size: Size) -> Iterator[Result]:
    """Embeddings alone of the last kind, in process and served."""
    requests: dict[str, list[Tensors]] = {}
    for way in WAYS:
        outputs = ("embeddings", SHARED)[: 1 + (way == "once")]
        requests[way] = [
            replace(tensors, outputs=outputs, dense={}) for tensors in workload.tensors(repeated=way == "repeated")
        ]
    turns = {way: cycle(tensors) for way, tensors in requests.items()}
    yield from _times_and_ratio(
        {way: (lambda turn=turn: engine.outputs(next(turn))) for way, turn in turns.items()},  # type: ignore[misc]
        "lookup_inprocess",
        size,
    )
    with (
        run_server(folder / "repository", Ports(grpc=0, http=0, operations=0)) as server,
        LookupClient(server.grpc, workload.name, _TIMEOUT_S) as client,
        ExitStack() as stack,
    ):
        call = _connected(stack, server.grpc)
        sent = {
            way: cycle([infer_request(workload.name, one, client.info()).SerializeToString() for one in tensors])
            for way, tensors in requests.items()
        }
        calls = {way: (lambda messages=messages: call(next(messages))) for way, messages in sent.items()}
        yield from _times_and_ratio(calls, "lookup", size)
    ids = {way: tensors[0].values.size for way, tensors in requests.items()}
    yield ratio(f"repeated_over_once_ids_n{ITEMS}", ids["repeated"] / ids["once"])
