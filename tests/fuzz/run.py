"""Send messages to a server and judge every answer; among them, requests that must be answered right."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import psutil
from tritonclient.grpc import service_pb2 as pb

from tests.fuzz.answers import Answer
from tests.fuzz.contract import Model, judge
from tests.fuzz.good import good
from tests.fuzz.messages import bad, inputs_of, is_known_to_hang, is_known_to_kill, thieves

DEADLINE_S = 60
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
# What is said where something of ours failed, which no message may bring about.
OUR_FAULT = "lookup failed: the server's log says why"
DIED = "a process of the server died"
# So many messages are in flight at once, and so many good ones among them.
TOGETHER, WELL = 20, 4
# How often memory is looked at.
LOOKS = 10


@dataclass
class Outcome:
    """What was seen.

    Attributes:
        statuses: how often each came, OK among them.
        said: how often each message came with it, its names and numbers left out.
        wrong: what should not have been, a line each.
        memory_bytes: what the server's processes had to themselves, after each tenth of the messages.
    """

    sent: int = 0
    well: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    said: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)

    def line(self) -> str:
        """All in one."""
        statuses = ", ".join(f"{count:,} {status}" for status, count in self.statuses.most_common())
        return (
            f"{self.sent:,} messages: {statuses}; {self.well:,} good requests among them; "
            f"memory {', '.join(f'{size / 1e6:.0f}' for size in self.memory_bytes)} MB; {len(self.wrong)} wrong"
        )


def fuzz(
    address: str, server: psutil.Process, models: Sequence[Model], count: int, seed: int = 0, most_wrong: int = 10
) -> Outcome:
    """Send `count` messages, many at once to one of the models and good ones among them. Stop when `most_wrong` answers
    were wrong.
    """
    outcome = Outcome()
    random = np.random.default_rng(seed)
    processes = _processes(server)
    with grpc.insecure_channel(address, LIMITS) as channel:
        call = channel.unary_unary(METHOD)
        while len(outcome.wrong) < most_wrong and outcome.sent < count:
            model = models[int(random.integers(len(models)))]
            well = [good(model, random) for _ in range(WELL)]
            hostile = _hostile(model, random, min(TOGETHER, count - outcome.sent))
            send_together(call, models, well, hostile, random, outcome)
            if outcome.sent * LOOKS >= count * (len(outcome.memory_bytes) + 1):
                outcome.memory_bytes.append(_memory_bytes(server))
    if ended := processes.keys() - _processes(server):
        outcome.wrong.append(f"{DIED}: {', '.join(processes[pid] for pid in sorted(ended))}")
    return outcome


def _hostile(model: Model, random: np.random.Generator, count: int) -> list[bytes]:
    """One in ten is half of a pair whose lengths add up only together."""
    messages: list[bytes] = []
    while len(messages) < count:
        few = thieves(model, random) if random.random() < 0.05 else [bad(model, random)]
        messages += [message for message in few if not is_known_to_hang(message) and not is_known_to_kill(message)]
    return messages[:count]


def send_together(
    call: Any,
    models: Sequence[Model],
    well: Sequence[bytes],
    hostile: Sequence[bytes],
    random: np.random.Generator,
    outcome: Outcome,
) -> None:
    """All in flight at once, so that the server merges them; each is judged by itself."""
    # Where hostile ones lie side by side, as pairs do, good ones come before and behind.
    position = int(random.integers(len(hostile) + 1))
    messages = [*well[: WELL // 2], *hostile[:position], *well[WELL // 2 :], *hostile[position:]]
    sent = [call.future(message, timeout=DEADLINE_S) for message in messages]
    is_well = set(map(id, well))
    for message, answer in zip(messages, sent, strict=True):
        (_judge_well if id(message) in is_well else _judge)(answer, models, message, outcome)


def _judge(answer: Any, models: Sequence[Model], message: bytes, outcome: Outcome) -> None:
    outcome.sent += 1
    verdict = judge(models, message)
    try:
        response = pb.ModelInferResponse.FromString(answer.result())
    except grpc.RpcError as error:
        status, said = error.code().name, error.details() or ""
        outcome.statuses[status] += 1
        outcome.said.setdefault(status, Counter())[re.sub(r"[0-9]+|'[^']*'", "…", said)[:120]] += 1
        if status not in TOLD or "Traceback" in said or 'File "' in said or not said or said == OUR_FAULT:
            outcome.wrong.append(f"{status}: {said[:300]!r} for {message[:200]!r}")
        elif verdict.answer is not None and verdict.must:
            outcome.wrong.append(f"refused though it is right: {status}: {said[:300]!r} for {message[:300]!r}")
        return
    outcome.statuses["OK"] += 1
    if verdict.answer is None:
        verdict = judge(models, as_triton_reads(message))
    if verdict.answer is None:
        if not _is_lenient(message):
            outcome.wrong.append(f"answered though it is not right: {message[:300]!r}")
    elif (why := _differs(response, verdict.answer)) is not None and verdict.must:
        outcome.wrong.append(f"{why} for {message[:300]!r}")


def _judge_well(answer: Any, models: Sequence[Model], message: bytes, outcome: Outcome) -> None:
    outcome.well += 1
    expected = judge(models, message).answer
    assert expected is not None
    try:
        response = pb.ModelInferResponse.FromString(answer.result())
    except grpc.RpcError as error:
        outcome.wrong.append(f"a good request got {error.code().name}: {error.details()}")
        return
    if (why := _differs(response, expected)) is not None:
        outcome.wrong.append(f"a good request: {why}")


def _differs(response: Any, expected: Answer) -> str | None:
    shapes_answered = {output.name: list(output.shape) for output in response.outputs}
    shapes = {name: [1, *numbers.shape] for name, numbers in expected.items()}
    if len(response.outputs) != len(expected) or shapes_answered != shapes:
        return f"expected shapes {shapes}, got {shapes_answered}"
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        numbers = expected[output.name]
        if output.datatype != "FP32":  # Triton's classification, which a message may have asked for
            return f"expected FP32, got {output.datatype}"
        answer = np.frombuffer(raw, np.float32).reshape(numbers.shape)
        if not np.allclose(answer, numbers, rtol=1e-4, atol=1e-4, equal_nan=True):
            return f"expected other numbers in {output.name!r}"
    return None


def as_triton_reads(message: bytes) -> bytes:
    """The message that Triton 2.51 passes to the model.

    Triton reads the lower 32 bits of each first dimension. If they are 0, it takes the first dimension of the other
    inputs, which is 1 in a right request.
    """
    if not inputs_of(message):
        return message
    request = pb.ModelInferRequest.FromString(message)
    for tensor in request.inputs:
        if tensor.shape and tensor.shape[0] >= 2**32:
            tensor.shape[0] = tensor.shape[0] % 2**32 or 1
    return bytes(request.SerializeToString())


def _is_lenient(message: bytes) -> bool:
    """Triton takes numbers in typed fields too, which the contract does not promise."""
    return any(tensor.HasField("contents") for tensor in inputs_of(message))


def _processes(server: psutil.Process) -> dict[int, str]:
    """What each of them is called, by its number."""
    names_by_pid = {}
    for child in (server, *server.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            names_by_pid[child.pid] = child.name()
    return names_by_pid


def _memory_bytes(server: psutil.Process) -> int:
    """What the server and its models have to themselves."""
    return sum(child.memory_full_info().uss for child in (server, *server.children(recursive=True)))
