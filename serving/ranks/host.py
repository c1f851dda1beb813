"""One host: its replicas are asked for partial sums, over KServe gRPC.

A call names the version of the host's model and the digest of its bundle. A replica that lacks exactly that answers
NOT_FOUND, and another replica is tried, never another version.
"""

import asyncio
from typing import Any

import grpc
import grpc.aio
import numpy as np

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
from serving.ranks.message import METHOD, Messages, Response, decode
from serving.ranks.partial import PartialRequest, PartialSums
from serving.triton.sayings import error_of

# Where another replica may be reached, another attempt begins after each of these shares of the time.
_OTHERS_AT = (0.5, 0.75)
# How often a call is made: where nothing answers, and where replicas lack the version. That is told at once, by those
# that are connected: the others may need a moment.
_MOST_ATTEMPTS, _MOST_REPLICAS = 3, 10
# The pause after a first refusal, in seconds. It doubles, up to a share of the time for a call.
_PAUSE_S, _LONGEST_PAUSE_SHARE = 0.002, 1 / 6


class Host:
    """The channel to one host. Make it and use it in one event loop.

    Args:
        bundle: what has to answer.
        id_dtype: of rows, as they travel.
        is_weighted: whether the host takes a weight for each row.
        connection: how its replicas are reached.

    Attributes:
        connection: as given.
        messages: what travels.
        counts: what was counted of its calls.

    Raises:
        ConfigurationError: certificates cannot be used.
        ServerUnavailable: a name among several addresses cannot be resolved.
    """

    def __init__(self, bundle: HostBundle, id_dtype: IdDtype, is_weighted: bool, connection: Connection) -> None:
        self.connection = connection
        self.messages = Messages(bundle, id_dtype)
        self.counts = HostCounts()
        self._is_weighted = is_weighted
        self._where = (
            f"host {bundle.host} ({bundle.model} version {bundle.version} at {', '.join(connection.addresses)})"
        )
        # Attempts that have not ended. asyncio itself does not hold them.
        self._running: set[asyncio.Task[Any]] = set()
        self._channel = connection.channel(grpc.aio)
        self._call = self._channel.unary_unary(METHOD, response_deserializer=Response.FromString)

    async def close(self) -> None:
        """Close the channel. What is not answered yet is cancelled."""
        for attempt in self._running:
            attempt.cancel()
        await self._channel.close()

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
            deadline = asyncio.get_running_loop().time() + self.connection.timeout_s
            await self.attempts(self.messages.encode(empty), deadline)
        except ModelNotFound as error:
            raise ModelNotFound(f"{self._where}: {error}") from None
        except ServingError as error:
            raise self._named(error) from None

    def received(self, response: Any, request: PartialRequest) -> PartialSums:
        """The partial sums in a response, counted.

        Raises:
            InternalError: the response answers another request.
        """
        sums = decode(response, request)
        self.counts.add(bytes_in=sums.nbytes)
        return sums

    def lost(self, error: ServingError) -> ServingError:
        """The error of a call that got no sums, counted.

        Args:
            error: of its last attempt.
        """
        self.counts.add(lost=1)
        return self._named(error)

    def _named(self, error: ServingError) -> ServingError:
        """The error of a call, from that of its last attempt: it names the host."""
        if isinstance(error, DeadlineExceeded):
            return HostUnavailable(f"{self._where}: no answer within {self.connection.timeout_s:g} s")
        if isinstance(error, ServerUnavailable | ModelNotFound):
            return HostUnavailable(f"{self._where}: {error}")
        return InternalError(f"{self._where}: {error.code}: {error}")

    async def attempts(self, message: bytes, deadline: float) -> Any:
        """The first response, from whichever replica answers.

        An attempt is not given up when another begins: it may answer yet, and gRPC finds out that a connection is
        dead only while calls are on it.

        Args:
            message: a ModelInferRequest.
            deadline: in the time of the event loop.

        Raises:
            ServingError: the last attempt's, where none is answered.
        """
        loop = asyncio.get_running_loop()
        left_s = deadline - loop.time()
        others = [loop.time() + share * left_s for share in _OTHERS_AT] if self.connection.elsewhere else []
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
                if attempts >= most_attempts(error) or loop.time() + pause_s >= deadline:
                    if running:
                        continue
                    self.counts.add(timeouts=isinstance(error, DeadlineExceeded))
                    try:
                        raise error
                    finally:
                        del first, error  # they lead here again, and would keep the call and its channel for a while
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_SHARE * self.connection.timeout_s)
            else:
                others.pop(0)
                self.counts.add(timeouts=1)
            attempts += 1
            self.counts.add(retries=1)
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
        self.counts.add(bytes_out=len(message))
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            return await self._call(message, timeout=left_s, metadata=self.connection.call_metadata(None))
        except grpc.aio.AioRpcError as error:
            raise error_of(error.code().name, error.details() or "") from None


def host_of(manifest: Manifest, bundle: HostBundle, connection: Connection) -> Host:
    """The channel to a host of a router's plan; arguments and errors as `Host`.

    Args:
        manifest: the router's.
        bundle: an entry of it.
        connection: how its replicas are reached.
    """
    segments = segments_by_rank(manifest)[manifest.plan.rank_of_host[bundle.host]]
    return Host(bundle, id_dtype_of(segments), takes_weights(manifest, segments), connection)


def most_attempts(error: BaseException) -> int:
    """How often a call is made that ends with this error."""
    if isinstance(error, ModelNotFound | ModelUnavailable):
        return _MOST_REPLICAS
    return _MOST_ATTEMPTS if isinstance(error, ServerUnavailable) else 1
