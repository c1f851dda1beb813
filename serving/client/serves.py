"""Ask a server over KServe gRPC which versions of which models it serves."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from serving.client.connection import Connection
from serving.errors import ServingError
from serving.files.strict import Strict
from serving.triton.sayings import error_of

# Most servers that are asked at the same time.
_AT_ONCE = 32


class Serves(Strict, frozen=True):
    """What a server serves.

    Attributes:
        address: its gRPC address.
        triton: the version of tritonserver; None if it does not answer.
        models: the versions of each model that are ready, oldest first.
        problem: why it does not answer; None if it does.
    """

    address: str
    triton: str | None
    models: dict[str, tuple[int, ...]]
    problem: str | None


def ask_all(connection: Connection) -> tuple[Serves, ...]:
    """What each server of a connection serves, in the order of its addresses. All are asked at once.

    Raises:
        ConfigurationError: the TLS files cannot be used.
    """
    each = [replace(connection, addresses=[address]) for address in connection.addresses]
    with ThreadPoolExecutor(min(len(each), _AT_ONCE)) as pool:
        return tuple(pool.map(_ask, each))


def _ask(connection: Connection) -> Serves:
    (address,) = connection.addresses
    with closing(connection.channel(grpc)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def call(method: str, request: Any) -> Any:
            metadata = connection.call_metadata(None)
            try:
                return getattr(stub, method)(request, timeout=connection.timeout_s, metadata=metadata)
            except grpc.RpcError as error:
                raise error_of(error.code().name, error.details() or "") from None

        try:
            triton = call("ServerMetadata", pb.ServerMetadataRequest()).version
            loaded = call("ModelStatistics", pb.ModelStatisticsRequest()).model_stats
            models: dict[str, tuple[int, ...]] = {}
            for name, version in sorted((each.name, int(each.version)) for each in loaded):
                if call("ModelReady", pb.ModelReadyRequest(name=name, version=str(version))).ready:
                    models[name] = (*models.get(name, ()), version)
        except ServingError as error:
            return Serves(address=address, triton=None, models={}, problem=str(error))
    return Serves(address=address, triton=triton, models=models, problem=None)


def differences(servers: tuple[Serves, ...]) -> Iterator[str]:
    """A line for each server that does not answer or serves nothing, and each model whose versions differ."""
    for server in servers:
        if server.problem is not None:
            yield f"{server.address}: does not answer: {server.problem}"
        elif not server.models:
            yield f"{server.address}: serves nothing"
    for model in sorted({model for server in servers for model in server.models}):
        found: dict[tuple[int, ...], list[str]] = {}
        for server in servers:
            if model in server.models:
                found.setdefault(server.models[model], []).append(server.address)
        if len(found) > 1:
            said = (f"{', '.join(map(str, versions))} on {', '.join(at)}" for versions, at in sorted(found.items()))
            yield f"{model}: versions differ: {'; '.join(said)}"
