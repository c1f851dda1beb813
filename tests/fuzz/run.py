"""Send messages to a server and judge every answer; between them, requests that must be answered right."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import psutil
from tritonclient.grpc import service_pb2 as pb

from tests.fuzz.contract import Model, judge
from tests.fuzz.messages import bad, good, is_known_to_hang, is_known_to_kill

DEADLINE_S = 10
METHOD = "/inference.GRPCInferenceService/ModelInfer"
LIMITS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
# What a caller may be told. gRPC itself says INTERNAL or CANCELLED where bytes are no message.
TOLD = {
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "UNAVAILABLE",
    "RESOURCE_EXHAUSTED",
    "INTERNAL",
    "UNIMPLEMENTED",
    "CANCELLED",
}
WELL_EVERY = 10
# Memory is looked at once this share of all was sent: caches, pools and shared memory have grown by then.
SETTLED = 0.4


@dataclass
class Outcome:
    """What was seen.

    Attributes:
        statuses: how often each came, OK among them.
        said: how often each message came with it, its names and numbers left out.
        wrong: what should not have been, a line each.
        grown_bytes: of the server's processes, from when they had settled to the end.
    """

    sent: int = 0
    well: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    said: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    grown_bytes: int = 0

    def line(self) -> str:
        """All in one."""
        told = ", ".join(f"{count:,} {status}" for status, count in self.statuses.most_common())
        return (
            f"{self.sent:,} messages: {told}; {self.well:,} good requests between them; "
            f"memory {self.grown_bytes / 1e6:+.1f} MB; {len(self.wrong)} wrong"
        )


def fuzz(address: str, server: psutil.Process, model: Model, count: int, seed: int = 0) -> Outcome:
    """Send `count` messages; stop at the tenth thing that is wrong."""
    outcome = Outcome()
    random = np.random.default_rng(seed)
    processes = _processes(server)
    settled = 0
    with grpc.insecure_channel(address, LIMITS) as channel:
        call = channel.unary_unary(METHOD)
        for message in _messages(model, random, count):
            _send(call, model, message, outcome)
            if outcome.sent % WELL_EVERY == 0:
                _send_well(call, model, random, outcome)
            if outcome.sent == int(SETTLED * count):
                settled = _memory_bytes(server)
            if len(outcome.wrong) >= 10:
                break
        outcome.grown_bytes = _memory_bytes(server) - settled
    if _processes(server) != processes:
        outcome.wrong.append("a process of the server died")
    return outcome


def _messages(model: Model, random: np.random.Generator, count: int) -> Iterator[bytes]:
    made = 0
    while made < count:
        message = bad(model, random)
        if not is_known_to_hang(message) and not is_known_to_kill(message):
            made += 1
            yield message


def _send(call: Callable[..., bytes], model: Model, message: bytes, outcome: Outcome) -> None:
    outcome.sent += 1
    verdict = judge(model, message)
    try:
        response = pb.ModelInferResponse.FromString(call(message, timeout=DEADLINE_S))
    except grpc.RpcError as error:
        status, said = error.code().name, error.details() or ""
        outcome.statuses[status] += 1
        outcome.said.setdefault(status, Counter())[re.sub(r"[0-9]+|'[^']*'", "…", said)[:120]] += 1
        if status not in TOLD or "Traceback" in said or 'File "' in said or not said:
            outcome.wrong.append(f"{status}: {said[:300]!r} for {message[:200]!r}")
        elif verdict.answer is not None and verdict.must:
            outcome.wrong.append(f"refused though it is right: {status}: {said[:300]!r} for {message[:300]!r}")
        return
    outcome.statuses["OK"] += 1
    if verdict.answer is None:
        if not _is_lenient(message):
            outcome.wrong.append(f"answered though it is not right: {message[:300]!r}")
    elif (why := _differs(response, verdict.answer)) is not None and verdict.must:
        outcome.wrong.append(f"{why} for {message[:300]!r}")


def _send_well(call: Callable[..., bytes], model: Model, random: np.random.Generator, outcome: Outcome) -> None:
    message = good(model, random)
    outcome.well += 1
    expected = judge(model, message).answer
    assert expected is not None
    try:
        response = pb.ModelInferResponse.FromString(call(message, timeout=DEADLINE_S))
    except grpc.RpcError as error:
        outcome.wrong.append(f"a good request got {error.code().name}: {error.details()}")
        return
    if (why := _differs(response, expected)) is not None:
        outcome.wrong.append(f"a good request: {why}")


def _differs(response: Any, expected: "np.ndarray[Any, Any]") -> str | None:
    shape = [1, *expected.shape]
    if len(response.outputs) != 1 or list(response.outputs[0].shape) != shape:
        return f"expected shape {shape}, got {[list(each.shape) for each in response.outputs]}"
    answer = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(expected.shape)
    return None if np.allclose(answer, expected, rtol=1e-4, atol=1e-4) else "expected other numbers"


def _is_lenient(message: bytes) -> bool:
    """Triton takes numbers in typed fields too, which the contract does not promise."""
    with suppress(Exception):
        return any(each.HasField("contents") for each in pb.ModelInferRequest.FromString(message).inputs)
    return False


def _processes(server: psutil.Process) -> set[int]:
    return {server.pid, *(each.pid for each in server.children(recursive=True))}


def _memory_bytes(server: psutil.Process) -> int:
    """What the server and its models have to themselves."""
    return sum(each.memory_full_info().uss for each in (server, *server.children(recursive=True)))
