"""Which tritonserver release and which model versions each server of a fleet serves."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import grpc

from serving.client.connection import Connection
from serving.errors import ServingError
from serving.files import Strict
from serving.protocol.messages import ModelReadyRequest, ModelStatisticsRequest, ServerMetadataRequest, unary

_MAX_PARALLEL = 32


class ServerInfo(Strict, frozen=True):
    """What a server serves.

    Attributes:
        address: its gRPC address.
        triton: its tritonserver version, or None if it does not answer.
        models: the ready versions of each model, oldest first.
        problem: why it does not answer, or None if it does.
    """

    address: str
    triton: str | None
    models: dict[str, tuple[int, ...]]
    problem: str | None


def query_servers(connection: Connection) -> tuple[ServerInfo, ...]:
    """Query all servers of a connection in parallel. The result has the order of its addresses.

    Raises:
        ConfigurationError: the TLS files cannot be used.
    """
    connections = [replace(connection, addresses=[address]) for address in connection.addresses]
    with ThreadPoolExecutor(min(len(connections), _MAX_PARALLEL)) as pool:
        return tuple(pool.map(_query_server, connections))


def _query_server(connection: Connection) -> ServerInfo:
    (address,) = connection.addresses
    with closing(connection.channel(grpc)) as channel:

        def call(method: str, request: Any) -> Any:
            metadata = connection.call_metadata(None)
            try:
                return unary(channel, method)(request, timeout=connection.timeout_s, metadata=metadata)
            except grpc.RpcError as error:
                raise connection.error_of(error) from None

        try:
            triton = call("ServerMetadata", ServerMetadataRequest()).version
            statistics = call("ModelStatistics", ModelStatisticsRequest()).model_stats
            models: dict[str, tuple[int, ...]] = {}
            for name, version in sorted((model.name, int(model.version)) for model in statistics):
                if call("ModelReady", ModelReadyRequest(name=name, version=str(version))).ready:
                    models[name] = (*models.get(name, ()), version)
        except ServingError as error:
            return ServerInfo(address=address, triton=None, models={}, problem=str(error))
    return ServerInfo(address=address, triton=triton, models=models, problem=None)


def differences(servers: tuple[ServerInfo, ...]) -> Iterator[str]:
    """One line per server that does not answer or serves nothing, and per model whose versions differ."""
    for server in servers:
        if server.problem is not None:
            yield f"{server.address}: does not answer: {server.problem}"
        elif not server.models:
            yield f"{server.address}: serves nothing"
    for model in sorted({model for server in servers for model in server.models}):
        servers_by_versions: dict[tuple[int, ...], list[str]] = {}
        for server in servers:
            if model in server.models:
                servers_by_versions.setdefault(server.models[model], []).append(server.address)
        if len(servers_by_versions) > 1:
            parts = (
                f"{', '.join(map(str, versions))} on {', '.join(addresses)}"
                for versions, addresses in sorted(servers_by_versions.items())
            )
            yield f"{model}: versions differ: {'; '.join(parts)}"
