"""What a server says of its models: which versions it serves, and their configs."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import grpc
import numpy as np

from serving.bundle.scores import DenseInput, InputDtype, ScoreDtype
from serving.client.connection import Connection
from serving.client.messages import ModelInfo
from serving.errors import ServingError
from serving.files import Strict
from serving.protocol.messages import (
    DataType,
    ModelReadyRequest,
    ModelStatisticsRequest,
    ServerMetadataRequest,
    unary,
)
from serving.requests.types import EMBEDDINGS, IDS, LOOKED_UP, SHARED

_TYPE_FP16, _TYPE_INT32 = DataType.TYPE_FP16, DataType.TYPE_INT32


def info_of(config: Any) -> ModelInfo:
    """The model with this config, a ModelConfig of Triton's. tbe-export made it."""
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    features, dims = parameters["features"].split(","), [int(dim) for dim in parameters["dims"].split(",")]
    keys: dict[str, tuple[str, ...]] = {}
    for key, feature in zip(parameters.get("keys", parameters["features"]).split(","), features, strict=True):
        keys[key] = (*keys.get(key, ()), feature)
    types = {each.name: each.data_type for each in (*config.input, *config.output)}
    names, of_ids = ([*filter(None, parameters.get(each, "").split(","))] for each in ("by_id", "by_id_keys"))
    by_id = dict(zip(names, of_ids, strict=True))
    return ModelInfo(
        dims=dict(zip(features, dims, strict=True)),
        keys=keys,
        weighted=tuple(filter(None, parameters.get("weighted", "").split(","))),
        output_dtype=np.dtype(np.float16 if types.get(EMBEDDINGS) == _TYPE_FP16 else np.float32),
        schema_digest=parameters["schema_digest"],
        ids_dtype=np.dtype(np.int32 if types.get("values") == _TYPE_INT32 else np.int64),
        sequences=frozenset(filter(None, parameters.get("sequences", "").split(","))),
        tables=dict(zip(parameters["tables"].split(","), dims, strict=True)) if "tables" in parameters else {},
        dense=tuple(_dense_input(each, by_id.get(each.name)) for each in config.input if each.name not in IDS),
        scores={each.name: tuple(each.dims[1:]) for each in config.output if each.name not in LOOKED_UP},
        score_dtypes={
            each.name: ScoreDtype(_kserve_name(each)).numpy for each in config.output if each.name not in LOOKED_UP
        },
        by_id=by_id,
        takes_shared=any(each.name == SHARED for each in config.output),
    )


def _dense_input(tensor: Any, key: str | None) -> DenseInput:
    return DenseInput(tensor.name, tuple(tensor.dims[1:]), InputDtype(_kserve_name(tensor)), key=key)


def _kserve_name(tensor: Any) -> str:
    name: str = DataType.Name(tensor.data_type)
    return name.removeprefix("TYPE_")


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

        def call(method: str, request: Any) -> Any:
            metadata = connection.call_metadata(None)
            try:
                return unary(channel, method)(request, timeout=connection.timeout_s, metadata=metadata)
            except grpc.RpcError as error:
                raise connection.error_of(error) from None

        try:
            triton = call("ServerMetadata", ServerMetadataRequest()).version
            loaded = call("ModelStatistics", ModelStatisticsRequest()).model_stats
            models: dict[str, tuple[int, ...]] = {}
            for name, version in sorted((each.name, int(each.version)) for each in loaded):
                if call("ModelReady", ModelReadyRequest(name=name, version=str(version))).ready:
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
