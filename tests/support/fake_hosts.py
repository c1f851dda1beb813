"""Fake hosts: servers in this process that compute a host's sums, and the wrong answers that they can send instead."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from serving.bundle.load import open_bundle
from serving.bundle.plan import path_of
from serving.bundle.tensor_names import EMBEDDINGS
from serving.engine import Engine
from serving.errors import ModelNotFound
from serving.requests.accept import check_bundle
from serving.requests.types import Tensors
from serving.router.messages import METHOD

# What a fake host sends, given the correct response: messages. It may end the call with a status through the context.
Behaviour = Callable[[Any, Any], Iterator[bytes]]
_INPUTS = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32}
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def honest(response: Any, _: Any) -> Iterator[bytes]:
    """The correct answer."""
    yield response.SerializeToString()


def edited(edit: Callable[[Any], None]) -> Behaviour:
    """The answer, changed."""

    def behaviour(response: Any, _: Any) -> Iterator[bytes]:
        edit(response)
        yield response.SerializeToString()

    return behaviour


def messages(*contents: bytes) -> Behaviour:
    """Other messages, and the status OK."""
    return lambda response, context: iter(contents)  # noqa: ARG005


def status(code: grpc.StatusCode, details: str = "as told", *, after: Behaviour | None = None) -> Behaviour:
    """A status, which may come behind messages."""

    def behaviour(response: Any, context: Any) -> Iterator[bytes]:
        yield from () if after is None else after(response, context)
        context.abort(code, details)

    return behaviour


class FakeHost(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A host of a router's plan, at `address`. It answers from its bundle, in the way of its behaviour.

    Attributes:
        behaviour: what it sends for each correct answer.
        refuses: how many attempts it refuses as UNAVAILABLE first.
        asked: how many attempts there were.
    """

    def __init__(self, bundle: Path, behaviour: "Behaviour | None" = None) -> None:
        self._engine = Engine.open(bundle)
        self._one_at_a_time = threading.Lock()
        self.behaviour = behaviour or honest
        self.refuses = self.asked = 0
        self.address = ""

    def service(self, details: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(self._infer) if details.method == METHOD else None

    def _infer(self, message: bytes, context: Any) -> Iterator[bytes]:
        self.asked += 1
        if self.refuses > 0:
            self.refuses -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        yield from self.behaviour(self.answer(pb.ModelInferRequest.FromString(message), context), context)

    def answer(self, request: Any, context: Any) -> Any:
        """The correct response."""
        parameters = {name: parameter.string_param for name, parameter in request.parameters.items()}
        arrays = {
            tensor.name: np.frombuffer(raw, _INPUTS[tensor.datatype])
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
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
            sums = self._engine.outputs(tensors)[EMBEDDINGS]
        response = pb.ModelInferResponse(model_name=request.model_name, model_version=request.model_version)
        response.outputs.add(name="embeddings", datatype="FP32", shape=[1, *sums.shape])
        response.raw_output_contents.append(sums.tobytes())
        return response


@contextmanager
def fake_hosts(router: Path) -> Iterator[Mapping[int, FakeHost]]:
    """The hosts of a router's bundle, by their number. All answer correctly until their behaviour is set."""
    hosts = {host.host: FakeHost(path_of(router, host)) for host in open_bundle(router).manifest.hosts}
    servers = []
    for fake in hosts.values():
        server = grpc.server(futures.ThreadPoolExecutor(8), handlers=[fake], options=UNLIMITED)
        fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        servers.append(server)
    try:
        yield hosts
    finally:
        for server in servers:
            server.stop(None).wait()


MEGABYTES = 200


def answer_with(**fields: Any) -> Behaviour:
    """Other fields of the response."""

    def edit(response: Any) -> None:
        for name, value in fields.items():
            setattr(response, name, value)

    return edited(edit)


def output(**fields: Any) -> Behaviour:
    """Other fields of its output."""

    def edit(response: Any) -> None:
        for name, value in fields.items():
            setattr(response.outputs[0], name, value)

    return edited(edit)


def reshaped(*shape: int) -> Behaviour:
    return edited(lambda response: response.outputs[0].shape.__setitem__(slice(None), shape))


def numbers(change: Any) -> Behaviour:
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
# Wrong behaviours, each with a pattern of the error that the router raises.
BEHAVIOURS: dict[str, tuple[Behaviour, str]] = {
    "another model": (
        answer_with(model_name="movies-host-9"),
        r"expected an answer of 'movies-host-\d' version '1', got",
    ),
    "no model": (answer_with(model_name=""), r"got one of '' version '1'$"),
    "another version": (answer_with(model_version="2"), r"got one of 'movies-host-\d' version '2'$"),
    "no version": (answer_with(model_version=""), r"got one of 'movies-host-\d' version ''$"),
    "a model called by control characters": (
        answer_with(model_name="\x1b[2J\n" * 99),
        r"got one of '\\x1b\[2J\\n\\x1b",
    ),
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
    "no message": (messages(), r"expected a response, got none$"),
    "an empty message": (messages(b""), r"got one of '' version ''$"),
    "bytes that are no message": (messages(b"\xff" * 100), r"expected a ModelInferResponse, got other bytes$"),
    "half a message": (messages(b"\x0a\x7fmovies"), r"expected a ModelInferResponse, got other bytes$"),
    "a name that is not UTF-8": (unlike_utf8, r"expected a ModelInferResponse, got other bytes$"),
    "two messages": (twice, r"expected one response, got more$"),
    "messages without end": (on_and_on, r"expected one response, got more$"),
    **{
        f"{code.name} behind the message": (status(code, after=honest), r"as told$")
        for code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS)
    },
    **{
        f"{code.name}": (status(code), r"as told|no answer within")
        for code in grpc.StatusCode
        if code is not grpc.StatusCode.OK
    },
    "a status of control characters": (
        status(grpc.StatusCode.INTERNAL, "\x1b[2J\r\n\u202e"),
        r"\\x1b\[2J\\r\\n\\u202e$",
    ),
    "a status of 6,000 characters": (status(grpc.StatusCode.INTERNAL, 6000 * "x"), r"INTERNAL: x{280,}…$"),
}
