"""Memory that is not there, or is taken and has to be given back."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from serving.client import LookupClient, Retries
from serving.errors import SharedMemoryFull
from tests.faults.clients import message
from tests.faults.tools import Asked, Oracle, publish, published
from tests.fuzz.run import METHOD
from tests.support.servers import Running, running, shared_regions

_UNLIMITED = [("grpc.max_send_message_length", -1)]


@dataclass
class Huge:
    """Figures of `huge`. `kept_bytes`: after each request, more than there was before the first."""

    request_bytes: int
    times: int
    refusals: set[str]
    kept_bytes: list[int]
    right: int

    def line(self) -> str:
        return (
            f"{self.times} requests of {self.request_bytes / 1e9:.1f} GB: {', '.join(sorted(self.refusals))}, "
            f"{self.kept_bytes[-1] / 1e6:+.0f} MB kept"
        )


def huge(folder: Path, content: bytes, times: int, make_oracle: Callable[[Path], Asked] = published) -> Huge:
    """A request far beyond every limit, sent so many times: refused, and its memory given back."""
    oracle = make_oracle(folder)
    refusals, kept_bytes = set(), []
    with running(folder / "r") as server, LookupClient(server.grpc, "m", 30) as client:
        assert oracle.is_right(client, 0)
        before = _memory_bytes(server)
        for _ in range(times):
            with grpc.insecure_channel(server.grpc, _UNLIMITED) as channel:
                refusals.add(_refusal(channel, content))
            assert oracle.is_right(client, 0)
            kept_bytes.append(_memory_bytes(server) - before)
        right = sum(oracle.is_right(client, number) for number in range(len(oracle.requests)))
    return Huge(len(content), times, refusals, kept_bytes, right)


def _memory_bytes(server: Running) -> int:
    """What tritonserver and its models have to themselves, and what they share with one another."""
    processes = [server.triton, *server.triton.children()]
    shared = sum(path.stat().st_blocks * 512 for path in shared_regions(server.triton))
    return shared + sum(process.memory_full_info().uss for process in processes)


def _refusal(channel: grpc.Channel, content: bytes) -> str:
    try:
        channel.unary_unary(METHOD)(content, timeout=120)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def lying_lengths(folder: Path) -> tuple[set[str], int]:
    """Lengths of 2³¹ − 1 with a payload of a few bytes: what they are told, and what memory grew by."""
    publish(folder)
    request = pb.ModelInferRequest.FromString(message())
    request.raw_input_contents[1] = np.array([2**31 - 1] * 64, np.int32).tobytes()
    request.inputs[1].shape[1] = 64
    content = request.SerializeToString()
    with running(folder / "r") as server, grpc.insecure_channel(server.grpc) as channel:
        for _ in range(20):
            _refusal(channel, content)
        before = _memory_bytes(server)
        refusals = {_refusal(channel, content) for _ in range(200)}
        return refusals, _memory_bytes(server) - before


@dataclass
class Full:
    """Figures of `shared_memory_full`: what a request was told that did not fit, and whether later ones were right."""

    message: str
    right: int
    requests: int

    def line(self) -> str:
        return f"/dev/shm full: told {self.message.partition(' for key')[0]!r}, then {self.right} of {self.requests} answered right"


def shared_memory_full(folder: Path) -> Full:
    """A server whose /dev/shm has 24 MB: what does not fit is refused, and what fits is answered as before.

    In a mount namespace of its own; where this process is not root, in a user namespace too.
    """
    oracle = Oracle(publish(folder))
    namespace = ("unshare", "--mount", *(() if os.getuid() == 0 else ("--map-root-user",)))
    small = 'mount -t tmpfs -o size=24m tmpfs /dev/shm && exec "$@"'
    with (
        running(folder / "r", within=(*namespace, "sh", "-c", small, "sh")) as server,
        LookupClient(server.grpc, "m", 30, retries=Retries(attempts=1)) as client,
    ):
        message = "answered"
        try:
            client.lookup({"x": (np.ones(4_000_000, np.int64), np.array([4_000_000], np.int32))})
        except SharedMemoryFull as error:
            message = str(error).rpartition("model 'm': ")[2]
        right = sum(oracle.is_right(client, number) for number in range(len(oracle.requests)))
    return Full(message, right, len(oracle.requests))
