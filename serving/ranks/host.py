"""One host: its replicas are asked for partial sums, over KServe gRPC.

A call names the version of the host's model and the digest of its bundle. A replica that lacks exactly that answers
NOT_FOUND, and another replica is tried, never another version.
"""

import asyncio
from typing import Any

import grpc
import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from serving.bundle.hosts import HostBundle, IdDtype
from serving.bundle.manifest import Manifest
from serving.bundle.segments import id_dtype_of, segments_by_rank, takes_weights
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
# Where another replica may be reached, another attempt begins after each of these shares of the time.
_OTHERS_AT = (0.5, 0.75)
# How often a call is made: where nothing answers, and where replicas lack the version. That is told at once, by those
# that are connected: the others may need a moment.
_MOST_ATTEMPTS, _MOST_REPLICAS = 3, 10
# The pause after a first refusal, in seconds. It doubles, up to a share of the time for a call.
_PAUSE_S, _LONGEST_PAUSE_SHARE = 0.002, 1 / 6
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
        self._too_late = f"no answer within {connection.timeout_s:g} s"
        # Attempts that have not ended. asyncio itself does not hold them.
        self._running: set[asyncio.Task[Any]] = set()
        self._channel = connection.channel(grpc.aio)
        # Requests are bytes: what all have in common is encoded once.
        self._call = self._channel.unary_unary(METHOD, response_deserializer=pb.ModelInferResponse.FromString)
        prefix = pb.ModelInferRequest(model_name=bundle.model, model_version=str(bundle.version))
        prefix.parameters[BUNDLE].string_param = bundle.manifest
        self._prefix: bytes = prefix.SerializeToString()

    async def close(self) -> None:
        """Close the channel. What is not answered yet is cancelled."""
        for attempt in self._running:
            attempt.cancel()
        await self._channel.close()

    async def sums(self, request: PartialRequest) -> PartialSums:
        """The host's partial sums: float32 or float16 [B, columns].

        Raises:
            HostUnavailable: no replica answered in time, or none has the version.
            InternalError: a replica refused the request, or answered otherwise than its bundle says.
        """
        message = self._message(request)
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            response = await self._attempts(message, started + self._connection.timeout_s)
        except DeadlineExceeded:
            self.counts.lost += 1
            raise HostUnavailable(f"{self._where}: {self._too_late}") from None
        except (ServerUnavailable, ModelNotFound) as error:
            self.counts.lost += 1
            raise HostUnavailable(f"{self._where}: {error}") from None
        except ServingError as error:
            self.counts.lost += 1
            raise InternalError(f"{self._where}: {error.code}: {error}") from None
        finally:
            self.counts.took(loop.time() - started)
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
            deadline = asyncio.get_running_loop().time() + self._connection.timeout_s
            await self._attempts(self._message(empty), deadline)
        except ModelNotFound as error:
            raise ModelNotFound(f"{self._where}: {error}") from None
        except DeadlineExceeded:
            raise HostUnavailable(f"{self._where}: {self._too_late}") from None
        except ServerUnavailable as error:
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
        """The first response, from whichever replica answers; the last error, where none does.

        An attempt is not given up when another begins: it may answer yet, and gRPC finds out that a connection is
        dead only while calls are on it.

        Args:
            message: a ModelInferRequest.
            deadline: in the time of the event loop.
        """
        loop = asyncio.get_running_loop()
        left_s = deadline - loop.time()
        others = [loop.time() + share * left_s for share in _OTHERS_AT] if self._connection.elsewhere else []
        running = {self._begin(message, deadline)}
        attempts, pause_s = 1, _PAUSE_S
        while True:
            wait_s = max(0.0, others[0] - loop.time()) if others else None
            done, running = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                first = done.pop()
                running |= done
                error = first.exception()
                if error is None:
                    return first.result()
                if attempts >= _most_attempts(error) or loop.time() + pause_s >= deadline:
                    if running:
                        continue
                    self.counts.timeouts += isinstance(error, DeadlineExceeded)
                    raise error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_SHARE * self._connection.timeout_s)
            else:
                others.pop(0)
                self.counts.timeouts += 1
            attempts += 1
            self.counts.retries += 1
            running.add(self._begin(message, deadline))

    def _begin(self, message: bytes, deadline: float) -> "asyncio.Task[Any]":
        """Begin an attempt. It ends by the deadline, whether its answer is waited for or not."""
        attempt = asyncio.ensure_future(self._attempt(message, deadline))
        self._running.add(attempt)
        attempt.add_done_callback(self._ended)
        return attempt

    def _ended(self, attempt: "asyncio.Task[Any]") -> None:
        self._running.discard(attempt)
        if not attempt.cancelled():
            attempt.exception()  # asyncio reports errors that nobody looks at

    async def _attempt(self, message: bytes, deadline: float) -> Any:
        self.counts.bytes_out += len(message)
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            return await self._call(message, timeout=left_s, metadata=self._connection.call_metadata(None))
        except grpc.aio.AioRpcError as error:
            raise error_of(error.code().name, error.details() or "") from None

    def _decoded(self, response: Any, request: PartialRequest) -> PartialSums:
        expected = [1, request.samples, request.columns]
        output = response.outputs[0] if len(response.outputs) == len(response.raw_output_contents) == 1 else None
        if output is None or list(output.shape) != expected or output.datatype not in _DTYPES:
            found = None if output is None else f"{output.datatype} {list(output.shape)}"
            raise InternalError(f"{self._where}: expected sums of shape {expected}, got {found}")
        content = response.raw_output_contents[0]
        dtype = np.dtype(_DTYPES[output.datatype])
        if len(content) != request.samples * request.columns * dtype.itemsize:
            raise InternalError(f"{self._where}: expected sums of shape {expected}, got {len(content)} bytes")
        self.counts.bytes_in += len(content)
        sums: PartialSums = np.frombuffer(content, dtype).reshape(expected[1:])
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
    return Host(bundle, id_dtype_of(segments), takes_weights(manifest, segments), connection)


def _most_attempts(error: BaseException) -> int:
    """How often a call is made that ends with this error."""
    if isinstance(error, ModelNotFound | ModelUnavailable):
        return _MOST_REPLICAS
    return _MOST_ATTEMPTS if isinstance(error, ServerUnavailable) else 1
