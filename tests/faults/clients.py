"""Clients that go away, do not wait, or are slow."""

import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from serving.client import LookupClient, Retries
from serving.server import Access, Server, run_server
from tests.faults.tools import Oracle, publish
from tests.fuzz.run import METHOD
from tests.support.servers import (
    FREE,
    add_gate,
    gate_closed,
    metric,
    running,
    until_answered,
    wait_for_execution,
    wait_for_pending,
)


def message(values: int = 1) -> bytes:
    """A request for feature x of the model m."""
    request = pb.ModelInferRequest(
        model_name="m", raw_input_contents=[bytes(8 * values), np.array([values], np.int32).tobytes()]
    )
    request.inputs.add(name="values", datatype="INT64", shape=[1, values])
    request.inputs.add(name="lengths", datatype="INT32", shape=[1, 1])
    request.parameters["features"].string_param = "x"
    content: bytes = request.SerializeToString()
    return content


@dataclass
class Gone:
    """Figures of `gone`: requests that were sent and given up, and how many of them were looked up all the same."""

    sent: int
    looked_up: int
    neighbours_right: int

    def line(self) -> str:
        return (
            f"of {self.sent:,} requests whose callers had gone {self.looked_up} were looked up; "
            f"{self.neighbours_right} neighbours answered right"
        )


def disconnected(folder: Path, sent: int, *, cancelled: bool, settle_s: float = 1.0) -> Gone:
    """A storm of requests whose callers cancel, or whose deadlines pass, `settle_s` before their turn comes."""
    bundle = publish(folder)
    oracle = Oracle(bundle)
    add_gate(bundle)
    with run_server(folder / "r", FREE, log=folder / "log") as server, ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(server.grpc))
        client = stack.enter_context(LookupClient(server.grpc, "m", 60, retries=Retries(attempts=1)))
        until_answered(client.lookup, oracle.requests[0])  # a busy machine may not connect in time
        assert oracle.is_right(client, 0)
        call = channel.unary_unary(METHOD)
        with gate_closed(bundle):
            first = call.future(message(), timeout=60)
            wait_for_execution(bundle)
            before = metric(server, "tbe_requests_total", model="m")
            storm = [call.future(message(), timeout=60 if cancelled else 1) for _ in range(sent)]
            if cancelled:
                wait_for_pending(server, "m", sent)
            for stream in storm if cancelled else ():
                stream.cancel()
            codes = {call.code() for call in storm}
            time.sleep(settle_s)
        first.result()
        right = sum(oracle.is_right(client, number) for number in range(len(oracle.requests)))
        looked_up = metric(server, "tbe_requests_total", model="m") - before - 1 - right
    assert codes == {grpc.StatusCode.CANCELLED if cancelled else grpc.StatusCode.DEADLINE_EXCEEDED}
    return Gone(sent, round(looked_up), right)


@dataclass
class GivenUp:
    """Figures of `give_up`: calls that their callers gave up within milliseconds, and what came of the server.

    Attributes:
        answers: right ones afterwards, of 16.
        code, said: how a stop ended, and what `tbe-serve run` said.
    """

    sent: int
    answers: int
    code: int
    said: str

    def line(self) -> str:
        return (
            f"of {self.sent:,} calls given up within 20 ms tritonserver died {self.said.count('; restarting, ')} times; "
            f"{self.answers} of 16 answers right afterwards, and a stop exited with {self.code}"
        )


def give_up(folder: Path, seconds: float) -> GivenUp:
    """Deadlines of 0.5 to 20 ms, and cancels, under load. Triton 2.51 dies of it in some runs, or loses requests."""
    oracle = Oracle(publish(folder))
    sent = [0] * 4
    with running(folder / "r") as server:
        until = time.monotonic() + seconds

        def storm(seed: int) -> None:
            random = np.random.default_rng(seed)
            with grpc.insecure_channel(server.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                while time.monotonic() < until:
                    deadlines = random.uniform(0.0005, 0.02, 16)
                    calls = [
                        channel.unary_unary(METHOD).future(message(100), timeout=deadline) for deadline in deadlines
                    ]
                    for call in calls[::3]:
                        call.cancel()
                    for call in calls:
                        call.code()  # waits for it
                    sent[seed] += len(calls)

        with ThreadPoolExecutor(len(sent)) as pool:
            list(pool.map(storm, range(len(sent))))
        with LookupClient(server.grpc, "m", 5) as client:
            # It may die when it has answered already: some of the calls are still being given up.
            is_right = partial(oracle.is_right, client)
            right = sum(until_answered(is_right, number) for number in range(len(oracle.requests)))
        server.process.terminate()
        code = server.process.wait()
        assert server.process.stderr is not None
        return GivenUp(sum(sent), right, code, server.process.stderr.read())


# HTTP/2 (RFC 9113): the preface, empty SETTINGS, and HEADERS of a gRPC call with literal fields (RFC 7541).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FIELDS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": METHOD,
    ":authority": "localhost",
    "content-type": "application/grpc",
    "te": "trailers",
}


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def _headers() -> bytes:
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in _FIELDS.items()
    )


def slow_starts() -> list[bytes]:
    """Beginnings of calls that never go on: no preface, no headers, half a message."""
    called = _PREFACE + _frame(4, 0, 0, b"") + _frame(1, 4, 1, _headers())
    half = b"\0" + struct.pack(">I", 1 << 20) + message()[:20]
    return [b"", _PREFACE[:10], _PREFACE + _frame(4, 0, 0, b""), called, called + _frame(0, 0, 1, half)]


@dataclass
class Slow:
    """Figures of `slow`: connections that say no more, and lookups beside them."""

    connections: int
    requests: int
    right: int

    def line(self) -> str:
        return f"beside {self.connections} connections that say no more {self.right} of {self.requests} lookups answered right"


def slow(folder: Path, per_kind: int) -> Slow:
    """Connections that begin a call, and trickle; lookups beside them are answered."""
    oracle = Oracle(publish(folder))
    access = Access(http=True)
    with run_server(folder / "r", FREE, access=access, log=folder / "log") as server, ExitStack() as stack:
        opened = [_stall(stack, server, start) for start in slow_starts() for _ in range(per_kind)]
        opened += [
            _stall(stack, server, b"POST /v2/models/m/infer HTTP/1.1\r\nHost", http=True) for _ in range(per_kind)
        ]
        right = 0
        with LookupClient(server.grpc, "m", 30, retries=Retries(attempts=1)) as client:
            for number in range(200):
                if number % 50 == 0:
                    for connection in opened:
                        _trickle(connection)
                right += oracle.is_right(client, number % len(oracle.requests))
        return Slow(len(opened), 200, right)


def _stall(stack: ExitStack, server: Server, start: bytes, *, http: bool = False) -> socket.socket:
    address = server.http if http else server.grpc
    assert address is not None
    host, _, port = address.rpartition(":")
    connection = stack.enter_context(socket.create_connection((host, int(port))))
    connection.sendall(start)
    return connection


def _trickle(connection: socket.socket) -> None:
    try:
        connection.send(b"\0")
    except OSError:  # the server has had enough of it
        return
