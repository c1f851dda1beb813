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


MEGABYTES = 200


def another(**fields: Any) -> Lie:
    """Other fields of the response."""

    def edit(response: Any) -> None:
        for name, value in fields.items():
            setattr(response, name, value)

    return edited(edit)


def output(**fields: Any) -> Lie:
    """Other fields of its output."""

    def edit(response: Any) -> None:
        for name, value in fields.items():
            setattr(response.outputs[0], name, value)

    return edited(edit)


def reshaped(*shape: int) -> Lie:
    return edited(lambda response: response.outputs[0].shape.__setitem__(slice(None), shape))


def numbers(change: Any) -> Lie:
    """Other bytes."""

    def edit(response: Any) -> None:
        response.raw_output_contents[0] = change(response.raw_output_contents[0])

    return edited(edit)


def halved(response: Any) -> None:
    """FP16, as another bundle would answer."""
    response.outputs[0].datatype = "FP16"
    raw = np.frombuffer(response.raw_output_contents[0], np.float32)
    response.raw_output_contents[0] = raw.astype(np.float16).tobytes()


def typed(response: Any) -> None:
    """Numbers in the output itself, as KServe allows, and not as bytes."""
    raw = np.frombuffer(response.raw_output_contents.pop(), np.float32)
    response.outputs[0].contents.fp32_contents.extend(raw)


def unlike_utf8(response: Any, _: Any) -> Iterator[bytes]:
    yield b"\x0a\x02\xff\xfe" + response.SerializeToString()


def twice(response: Any, _: Any) -> Iterator[bytes]:
    yield from [response.SerializeToString()] * 2


def on_and_on(response: Any, context: Any) -> Iterator[bytes]:
    while context.is_active():
        yield response.SerializeToString()


def of_zeros(response: Any, _: Any) -> Iterator[bytes]:
    """Far more bytes than there can be, which travel compressed as few."""
    response.raw_output_contents[0] = bytes(MEGABYTES << 20)
    yield response.SerializeToString()


def compressed(response: Any, context: Any) -> Iterator[bytes]:
    context.set_compression(grpc.Compression.Gzip)
    yield from of_zeros(response, context)


TOO_LARGE = r"RESOURCE_EXHAUSTED: .*larger than max"
# What is sent, and what is said of it.
LIES: dict[str, tuple[Lie, str]] = {
    "another model": (
        another(model_name="movies-host-9"),
        r"expected an answer of 'movies-host-\d' version '1', got",
    ),
    "no model": (another(model_name=""), r"got one of '' version '1'$"),
    "another version": (another(model_version="2"), r"got one of 'movies-host-\d' version '2'$"),
    "no version": (another(model_version=""), r"got one of 'movies-host-\d' version ''$"),
    "a model called by control characters": (another(model_name="\x1b[2J\n" * 99), r"got one of '\\x1b\[2J\\n\\x1b"),
    "another output": (output(name="sequences"), r"expected 'embeddings' of FP32 .*, got 'sequences'"),
    "no name of an output": (output(name=""), r"got '' of 'FP32'"),
    "FP16": (edited(halved), r"expected 'embeddings' of FP32 .*, got 'embeddings' of 'FP16'"),
    "INT32": (output(datatype="INT32"), r"of 'INT32'"),
    "no dtype": (output(datatype=""), r"of ''"),
    "another shape of as many numbers": (reshaped(2, 2, 5), r"expected 'embeddings' of FP32 \[1, \d+, \d+\], got"),
    "no shape": (reshaped(), r"of 'FP32' \[\]$"),
    "a negative shape": (reshaped(-1, -1, -1), r"\[-1, -1, -1\]"),
    "a shape of many": (reshaped(*range(1000)), r"of 'FP32' \[0, 1, 2, 3\]$"),
    "no output": (
        edited(lambda response: response.ClearField("outputs")),
        r"expected one output, got 0, and bytes of 1",
    ),
    "two outputs": (edited(lambda response: response.outputs.add(name="once")), r"got 2, and bytes of 1"),
    "no bytes": (edited(lambda response: response.ClearField("raw_output_contents")), r"got 1, and bytes of 0"),
    "bytes twice": (edited(lambda response: response.raw_output_contents.append(b"")), r"got 1, and bytes of 2"),
    "typed numbers": (edited(typed), r"got 1, and bytes of 0"),
    "a byte less": (numbers(lambda raw: raw[:-1]), r"expected FP32 \[1, \d+, \d+\], got \d+ bytes"),
    "a byte more": (numbers(lambda raw: raw + b"\0"), r"expected FP32 \[1, \d+, \d+\], got \d+ bytes"),
    "200 MB": (of_zeros, TOO_LARGE),
    "200 MB, compressed": (compressed, TOO_LARGE),
    "no message": (sent(), r"expected a response, got none$"),
    "an empty message": (sent(b""), r"got one of '' version ''$"),
    "bytes that are no message": (sent(b"\xff" * 100), r"expected a ModelInferResponse, got other bytes$"),
    "half a message": (sent(b"\x0a\x7fmovies"), r"expected a ModelInferResponse, got other bytes$"),
    "a name that is not UTF-8": (unlike_utf8, r"expected a ModelInferResponse, got other bytes$"),
    "two messages": (twice, r"expected one response, got more$"),
    "messages without end": (on_and_on, r"expected one response, got more$"),
    **{
        f"{code.name} behind the message": (told(code, after=truth), r"told so$")
        for code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS)
    },
    **{
        f"{code.name}": (told(code), r"told so|no answer within")
        for code in grpc.StatusCode
        if code is not grpc.StatusCode.OK
    },
    "a status of control characters": (
        told(grpc.StatusCode.INTERNAL, "\x1b[2J\r\n\u202e"),
        r"\\x1b\[2J\\r\\n\\u202e$",
    ),
    "a status of 6,000 characters": (told(grpc.StatusCode.INTERNAL, 6000 * "x"), r"INTERNAL: x{280,}…$"),
}


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
