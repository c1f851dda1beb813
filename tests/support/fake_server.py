"""A server of our own that fails as told: real gRPC, so that what arrives is what arrives."""

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from itertools import count
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

# gRPC shares a connection between clients with one address and the same options. A client of a server that has stopped,
# and that no test closed, would fail the calls of a new client to a server that was given the same port. So each server
# has an address of its own.
_HOSTS = (f"127.77.{number >> 8 & 255}.{number & 255}" for number in count(1))


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """A model with one feature `x` of dim 2; each call runs `fail` first, and is remembered."""

    def __init__(self) -> None:
        self.fail: Callable[[Any], None] = lambda _: None
        self.calls: list[tuple[Any, dict[str, str], float]] = []
        self.dim = 2
        self.version = "7"
        self.parameters = {"features": "x", "dims": "2", "weighted": "", "schema_digest": "c"}

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        response = pb.ModelConfigResponse()
        for key, value in self.parameters.items():
            response.config.parameters[key].string_value = value
        response.config.output.add(name="embeddings", data_type=11)
        return response

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append((request, dict(context.invocation_metadata()), context.time_remaining()))
        self.fail(context)
        samples = request.inputs[1].shape[1]
        response = pb.ModelInferResponse(model_name="m", model_version=request.model_version or self.version)
        response.outputs.add(name="embeddings", datatype="FP32", shape=[1, samples, self.dim])
        response.raw_output_contents.append(np.ones(samples * self.dim, np.float32).tobytes())
        return response


@contextmanager
def serving(fake: FakeServer, host: str | None = None, port: int = 0) -> Iterator[str]:
    """Serve on a port of a host, by default one of this machine that no other server of this process had."""
    host = next(_HOSTS) if host is None else host
    options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # gRPC lets servers share a port: another test run's server may then take connections of this test, and reset
        # them when it stops.
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.server(futures.ThreadPoolExecutor(8), options=options)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port(f"{host}:{port}")
    server.start()
    try:
        yield f"{host}:{port}"
    finally:
        server.stop(None).wait()
