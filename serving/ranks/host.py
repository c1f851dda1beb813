"""One host: its replicas are asked for partial sums, over KServe gRPC.

A call names the version of the host's model and the digest of its bundle. A replica that lacks exactly that answers
NOT_FOUND, and another replica is tried, never another version.
"""

import asyncio
import time
from typing import Any

import grpc
import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from serving.bundle.hosts import HostBundle, IdDtype
from serving.bundle.manifest import Manifest
from serving.bundle.segments import id_dtype_of, segments_by_rank
from serving.client.connection import Connection
from serving.errors import (
    DeadlineExceeded,
    HostUnavailable,
    InternalError,
    ModelNotFound,
    ModelUnavailable,
    ServerUnavailable,
    ServingError,
)
from serving.ranks.counts import HostCounts
from serving.ranks.partial import PartialRequest, PartialSums
from serving.triton.sayings import error_of

METHOD = "/inference.GRPCInferenceService/ModelInfer"
# The request parameter with the digest of the bundle that has to answer.
BUNDLE = "bundle"
# Where another replica may be reached, the first attempt has this share of the time.
_FIRST_SHARE = 0.5
# How often a call is made: where nothing answers, and where replicas lack the version. That is told at once.
_MOST_ATTEMPTS, _MOST_REPLICAS = 3, 10
# The pause before the second attempt, in seconds. It doubles.
_PAUSE_S = 0.002
_DTYPES: dict[str, type[np.floating[Any]]] = {"FP32": np.float32, "FP16": np.float16}
_ID_TYPES = {IdDtype.INT32: np.int32, IdDtype.INT64: np.int64}


class Host:
    """The channel to one host. Make it and use it in one event loop.

    Args:
        bundle: what has to answer.
        id_dtype: of rows, as they travel.
        is_weighted: whether the host takes a weight for each row.
        connection: how its replicas are reached.

    Attributes:
        counts: what was counted of its calls.

    Raises:
        ConfigurationError: certificates cannot be used.
        ServerUnavailable: a name among several addresses cannot be resolved.
    """

    def __init__(self, bundle: HostBundle, id_dtype: IdDtype, is_weighted: bool, connection: Connection) -> None:
        self.counts = HostCounts()
        self._id_dtype = id_dtype
        self._is_weighted = is_weighted
        self._connection = connection
        self._where = (
            f"host {bundle.host} ({bundle.model} version {bundle.version} at {', '.join(connection.addresses)})"
        )
        self._channel = connection.channel(grpc.aio)
        # Requests are bytes: what all have in common is encoded once.
        self._call = self._channel.unary_unary(METHOD, response_deserializer=pb.ModelInferResponse.FromString)
        prefix = pb.ModelInferRequest(model_name=bundle.model, model_version=str(bundle.version))
        prefix.parameters[BUNDLE].string_param = bundle.manifest
        self._prefix: bytes = prefix.SerializeToString()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def sums(self, request: PartialRequest) -> PartialSums:
        """The host's partial sums: float32 or float16 [B, columns].

        Raises:
            HostUnavailable: no replica answered in time, or none has the version.
            InternalError: a replica refused the request, or answered otherwise than its bundle says.
        """
        message = self._message(request)
        started = time.monotonic()
        try:
            response = await self._attempts(message, started + self._connection.timeout_s)
        except (ServerUnavailable, DeadlineExceeded, ModelNotFound) as error:
            self.counts.lost += 1
            raise HostUnavailable(f"{self._where}: {error}") from None
        except ServingError as error:
            self.counts.lost += 1
            raise InternalError(f"{self._where}: {error.code}: {error}") from None
        finally:
            self.counts.took(time.monotonic() - started)
        return self._decoded(response, request)

    async def check(self) -> None:
        """Look nothing up.

        Raises:
            ModelNotFound: no replica that was reached has the version and digest.
            HostUnavailable: no replica answered in time.
            InternalError: a replica answered otherwise.
        """
        weights = np.empty(0, np.float32) if self._is_weighted else None
        empty = PartialRequest(np.empty(0, np.int64), np.empty(0, np.int32), weights, None, 0, 0)
        try:
            await self._attempts(self._message(empty), time.monotonic() + self._connection.timeout_s)
        except ModelNotFound as error:
            raise ModelNotFound(f"{self._where}: {error}") from None
        except (ServerUnavailable, DeadlineExceeded) as error:
            raise HostUnavailable(f"{self._where}: {error}") from None
        except ServingError as error:
            raise InternalError(f"{self._where}: {error.code}: {error}") from None

    def _message(self, request: PartialRequest) -> bytes:
        """A ModelInferRequest, encoded. Protocol buffers join messages by putting one behind the other."""
        content = pb.ModelInferRequest()
        rows = request.rows.astype(_ID_TYPES[self._id_dtype])
        for name, datatype, array in (
            ("values", self._id_dtype.value, rows),
            ("lengths", "INT32", request.lengths),
            ("weights", "FP32", request.weights),
        ):
            if array is not None:
                content.inputs.add(name=name, datatype=datatype, shape=[1, array.size])
                content.raw_input_contents.append(array.tobytes())
        if request.segments is not None:
            content.parameters["features"].string_param = request.segments
        encoded: bytes = content.SerializeToString()
        return self._prefix + encoded

    async def _attempts(self, message: bytes, deadline: float) -> Any:
        """The response, from whichever replica answers; the error of the last attempt, where none does."""
        attempt, pause_s = 1, _PAUSE_S
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            is_first = attempt == 1 and self._connection.elsewhere
            try:
                return await self._attempt(message, left_s * _FIRST_SHARE if is_first else left_s)
            except DeadlineExceeded as error:
                self.counts.timeouts += 1
                if not is_first:
                    raise DeadlineExceeded(f"no answer within {self._connection.timeout_s:g} s") from error
            except (ModelNotFound, ModelUnavailable):
                if attempt >= _MOST_REPLICAS or time.monotonic() + pause_s >= deadline:
                    raise
                await asyncio.sleep(_PAUSE_S)
            except ServerUnavailable:
                if attempt >= _MOST_ATTEMPTS or time.monotonic() + pause_s >= deadline:
                    raise
                await asyncio.sleep(pause_s)
                pause_s *= 2
            attempt += 1
            self.counts.retries += 1

    async def _attempt(self, message: bytes, timeout_s: float) -> Any:
        self.counts.bytes_out += len(message)
        try:
            return await self._call(message, timeout=timeout_s, metadata=self._connection.call_metadata(None))
        except grpc.aio.AioRpcError as error:
            raise error_of(error.code().name, error.details() or "") from None

    def _decoded(self, response: Any, request: PartialRequest) -> PartialSums:
        expected = [1, request.samples, request.columns]
        output = response.outputs[0] if len(response.outputs) == len(response.raw_output_contents) == 1 else None
        if output is None or list(output.shape) != expected or output.datatype not in _DTYPES:
            found = None if output is None else f"{output.datatype} {list(output.shape)}"
            raise InternalError(f"{self._where}: expected sums of shape {expected}, got {found}")
        content = response.raw_output_contents[0]
        self.counts.bytes_in += len(content)
        sums: PartialSums = np.frombuffer(content, _DTYPES[output.datatype]).reshape(expected[1:])
        return sums


def host_of(manifest: Manifest, bundle: HostBundle, connection: Connection) -> Host:
    """The channel to a host of a router's plan; arguments and errors as `Host`.

    Args:
        manifest: the router's.
        bundle: an entry of it.
        connection: how its replicas are reached.
    """
    segments = next(
        segments
        for rank, segments in zip(manifest.plan.ranks, segments_by_rank(manifest), strict=True)
        if rank.host == bundle.host
    )
    weighted = {table.name for table in manifest.tables if table.weighted}
    is_weighted = any(each.shard.table in weighted for each in segments)
    return Host(bundle, id_dtype_of(segments), is_weighted, connection)
