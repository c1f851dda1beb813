"""Hosts that lie: servers in this process that know a host's sums, and what they send instead."""

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from serving.backend.answering import check_bundle
from serving.bundle.hosts import path_of
from serving.bundle.opening import open_bundle
from serving.engine import Engine
from serving.errors import ModelNotFound
from serving.ranks.message import METHOD
from serving.request.tensors import Tensors

# What is sent in place of an answer: messages, and a status at the end. It may end the call through the context.
Lie = Callable[[Any, Any], Iterator[bytes]]
_INPUTS = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32}
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def truth(response: Any, _: Any) -> Iterator[bytes]:
    """No lie."""
    yield response.SerializeToString()


def edited(edit: Callable[[Any], None]) -> Lie:
    """The answer, changed."""

    def lie(response: Any, _: Any) -> Iterator[bytes]:
        edit(response)
        yield response.SerializeToString()

    return lie


def sent(*messages: bytes) -> Lie:
    """Other messages, and the status OK."""
    return lambda response, context: iter(messages)  # noqa: ARG005


def told(code: grpc.StatusCode, details: str = "told so", *, after: Lie | None = None) -> Lie:
    """A status, which may come behind messages."""

    def lie(response: Any, context: Any) -> Iterator[bytes]:
        yield from () if after is None else after(response, context)
        context.abort(code, details)

    return lie


class LyingHost(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A host of a router's plan, at `address`. It answers as its bundle says, until it is told to lie.

    Attributes:
        lie: what it does with its answers.
        refuses: how many attempts it refuses as UNAVAILABLE before it does so.
        asked: how many attempts there were.
    """

    def __init__(self, bundle: Path) -> None:
        self._engine = Engine.open(bundle)
        self._one_at_a_time = threading.Lock()
        self.lie: Lie = truth
        self.refuses = self.asked = 0
        self.address = ""

    def service(self, details: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(self._infer) if details.method == METHOD else None

    def _infer(self, message: bytes, context: Any) -> Iterator[bytes]:
        self.asked += 1
        if self.refuses > 0:
            self.refuses -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        yield from self.lie(self.answer(pb.ModelInferRequest.FromString(message), context), context)

    def answer(self, request: Any, context: Any) -> Any:
        """The truth."""
        parameters = {name: each.string_param for name, each in request.parameters.items()}
        arrays = {
            each.name: np.frombuffer(raw, _INPUTS[each.datatype])
            for each, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        tensors = Tensors(
            parameters["features"].split(",") if "features" in parameters else None,
            arrays["values"],
            arrays["lengths"],
            arrays.get("weights"),
            bundle=parameters.get("bundle"),
            part_of=parameters.get("part_of"),
        )
        try:
            check_bundle(self._engine.bundle, tensors)
        except ModelNotFound as error:
            context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        with self._one_at_a_time:
            sums = self._engine.answer(tensors)
        response = pb.ModelInferResponse(model_name=request.model_name, model_version=request.model_version)
        response.outputs.add(name="embeddings", datatype="FP32", shape=[1, *sums.shape])
        response.raw_output_contents.append(sums.tobytes())
        return response


@contextmanager
def lying_hosts(router: Path) -> Iterator[Mapping[int, LyingHost]]:
    """The hosts of a router's bundle, by their number. All are honest for now."""
    found = {each.host: LyingHost(path_of(router, each)) for each in open_bundle(router).manifest.hosts}
    servers = []
    for each in found.values():
        server = grpc.server(futures.ThreadPoolExecutor(8), handlers=[each], options=UNLIMITED)
        each.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        servers.append(server)
    try:
        yield found
    finally:
        for server in servers:
            server.stop(None).wait()


# Frames of HTTP/2, https://www.rfc-editor.org/rfc/rfc9113#section-6
DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """A frame."""
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def headers(stream: int, *fields: tuple[str, str], end: bool = False, first: bool = True) -> bytes:
    """Headers, or trailers. Names and values are as long as one byte says."""
    content = b"\x88" if first else b""  # :status 200
    for name, value in fields:
        content += bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, content)


GRPC = ("content-type", "application/grpc")


def begun(stream: int, content: bytes, size: int) -> bytes:
    """An answer that says it has `size` bytes, and what comes of it."""
    return headers(stream, GRPC) + frame(DATA, 0, stream, struct.pack(">BI", 0, size) + content)


# What a server does on the wire with a stream that it was asked on; None hangs up.
Wire = Callable[[int, bytes], "bytes | None"]
WIRES: dict[str, Wire] = {
    "silence": lambda stream, answer: b"",  # noqa: ARG005
    "silence behind headers": lambda stream, answer: headers(stream, GRPC),  # noqa: ARG005
    "silence in mid-message": lambda stream, answer: begun(stream, answer[:-1], len(answer)),
    "silence behind the message": lambda stream, answer: begun(stream, answer, len(answer)),
    "end in mid-message": lambda stream, answer: (
        begun(stream, answer[:-1], len(answer)) + headers(stream, ("grpc-status", "0"), end=True, first=False)
    ),
    "reset in mid-message": lambda stream, answer: (
        begun(stream, answer[:-1], len(answer)) + frame(RST_STREAM, 0, stream, bytes(4))
    ),
    "end without a status": lambda stream, answer: (
        begun(stream, answer, len(answer)) + frame(DATA, END_STREAM, stream)
    ),
    "a status that does not exist": lambda stream, answer: (
        begun(stream, answer, len(answer)) + headers(stream, ("grpc-status", "99"), end=True, first=False)
    ),
    "a status that is no number": lambda stream, answer: (
        begun(stream, answer, len(answer)) + headers(stream, ("grpc-status", "well"), end=True, first=False)
    ),
    "a message of 4 GB": lambda stream, answer: begun(stream, answer, 2**32 - 1),
    "a message that says it is compressed": lambda stream, answer: (
        headers(stream, GRPC) + frame(DATA, 0, stream, struct.pack(">BI", 1, len(answer)) + answer)
    ),
    "another content type": lambda stream, answer: headers(stream, ("content-type", "text/html"), end=True),  # noqa: ARG005
    "frames that are none": lambda stream, answer: b"\xff" * 64,  # noqa: ARG005
    "it hangs up": lambda stream, answer: None,  # noqa: ARG005
}


@contextmanager
def on_the_wire(does: Wire, answer: bytes) -> Iterator[str]:
    """A server of HTTP/2 that does as told with every request; gets its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.put(connection)
                threading.Thread(target=_serve, args=(connection, does, answer), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        while not connections.empty():
            with suppress(OSError):
                connections.get().shutdown(socket.SHUT_RDWR)


def _serve(connection: socket.socket, does: Wire, answer: bytes) -> None:
    with connection, suppress(OSError), connection.makefile("rb") as sent_to_us:
        connection.sendall(frame(SETTINGS, 0, 0))
        sent_to_us.read(_PREFACE)
        while len(head := sent_to_us.read(9)) == 9:
            size, kind, flags, stream = struct.unpack(">IBBI", b"\0" + head)
            content = sent_to_us.read(size)
            if kind in (SETTINGS, PING) and not flags & ACK:
                connection.sendall(frame(kind, ACK, 0, content if kind == PING else b""))
            elif kind == DATA and flags & END_STREAM:
                if (told_so := does(stream, answer)) is None:
                    return
                connection.sendall(told_so)
