"""The one message that is known to kill a model's process on Triton 2.51, before any code of ours sees it."""

import threading
import time
from contextlib import suppress

import grpc
from tritonclient.grpc import service_pb2 as pb

from serving.client import LookupClient
from serving.errors import ServingError
from serving.server import Server, Supervisor
from tests.fuzz.contract import Model
from tests.fuzz.run import METHOD

_PATIENCE_S = 120


def killer(model: Model) -> bytes:
    """An INT64 input whose size in bytes is 2^64 + 8, which wraps around to the 8 that it has."""
    request = pb.ModelInferRequest(model_name=model.name, raw_input_contents=[bytes(8), bytes(4)])
    request.inputs.add(name="values", datatype="INT64", shape=[1, (1 << 61) + 1])
    request.inputs.add(name="lengths", datatype="INT32", shape=[1, 1])
    request.parameters["features"].string_param = next(iter(model.features))
    message: bytes = request.SerializeToString()
    return message


def recovery_s(server: Server, model: Model) -> float:
    """Send it to a server under `tbe-serve run`'s supervisor; seconds from its refusal to the next right answer.

    The server is stopped afterwards.
    """
    request = {next(iter(model.features)): [[1, 2]]}
    with LookupClient(server.grpc, model.name, 10) as client, grpc.insecure_channel(server.grpc) as channel:
        (expected,) = client.lookup(request).values()
        supervisor = Supervisor(server, True)
        watching = threading.Thread(target=supervisor.wait)
        watching.start()
        try:
            with suppress(grpc.RpcError):
                channel.unary_unary(METHOD)(killer(model), timeout=10)
            started = time.monotonic()
            while True:
                try:
                    (answer,) = client.lookup(request).values()
                    break
                except ServingError:
                    assert time.monotonic() < started + _PATIENCE_S
                    time.sleep(0.02)
            assert (answer == expected).all()
            return time.monotonic() - started
        finally:
            supervisor.stop(15)
            watching.join()
