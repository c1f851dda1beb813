"""One host: its replicas are asked for partial sums, over KServe gRPC.

A call names the version of the host's model and the digest of its bundle. A replica that lacks exactly that answers
NOT_FOUND, and another replica is tried, never another version.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import numpy as np

from serving.bundle.hosts import HostBundle
from serving.bundle.manifest import Manifest
from serving.bundle.segments import PlannedHost, planned_host
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
from serving.ranks.message import METHOD, MORE_THAN_ONE, Messages, largest_answer
from serving.ranks.partial import PartialRequest, PartialSums
from serving.said import listed, shown
from serving.triton.sayings import error_of

# Where another replica may be reached, another attempt begins after each of these shares of the time.
_OTHERS_AT = (0.5, 0.75)
# How often a call is made: where nothing answers, and where replicas lack the version. That is told at once, by those
# that are connected: the others may need a moment.
_MOST_ATTEMPTS, _MOST_REPLICAS = 3, 10
# The pause after a first refusal, in seconds. It doubles, up to a share of the time for a call.
_PAUSE_S, _LONGEST_PAUSE_SHARE = 0.002, 1 / 6


# An answer may be as large as the next of these, in bytes: each has a channel, made when it is needed. gRPC refuses a
# larger one by its first bytes, and takes no memory for it.
_LARGEST = (4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30, 2**31 - 1)
# The most characters that are shown of what went wrong with an attempt.
_MOST_SHOWN = 300


class Channels:
    """The channels to a host, by how large an answer may be.

    Args:
        connection: how its replicas are reached.
        library: grpc or grpc.aio.
        options: of each channel.
    """

    def __init__(self, connection: Connection, library: Any, *options: tuple[str, Any]) -> None:
        self._connection = connection
        self._library = library
        self._options = options
        self._channels: dict[int, tuple[Any, Any]] = {}

    def call(self, largest: int) -> Any:
        """What calls the host, for answers of `largest` bytes at most: bytes, and a host may send several."""
        limit = next((each for each in _LARGEST if largest <= each), _LARGEST[-1])
        found = self._channels.get(limit)
        if found is None:
            options = [*self._options, ("grpc.max_receive_message_length", limit)]
            channel = self._connection.channel(self._library, options)
            found = self._channels[limit] = (channel, channel.unary_stream(METHOD))
        return found[1]

    def close(self) -> list[Any]:
        """Close them; what `close` of each channel returns."""
        return [channel.close() for channel, _ in self._channels.values()]


class Host:
    """The channels to one host. Make it and use it in one event loop.

    Args:
        bundle: what has to answer.
        planned: what it is asked for.
        connection: how its replicas are reached.

    Attributes:
        connection: as given.
        messages: what travels.
        counts: what was counted of its calls.

    Raises:
        ConfigurationError: certificates cannot be used.
        ServerUnavailable: a name among several addresses cannot be resolved.
    """

    def __init__(self, bundle: HostBundle, planned: PlannedHost, connection: Connection) -> None:
        self.connection = connection
        self.messages = Messages(bundle, planned.id_dtype)
        self.counts = HostCounts()
        self._planned = planned
        self._where = (
            f"host {bundle.host} ({bundle.model} version {bundle.version} at {listed(connection.addresses)})"
        )
        # Attempts that have not ended. asyncio itself does not hold them.
        self._running: set[asyncio.Task[Any]] = set()
        self._channels = Channels(connection, grpc.aio)
        self._channels.call(0)

    async def close(self) -> None:
        """Close the channels. What is not answered yet is cancelled."""
        for attempt in self._running:
            attempt.cancel()
        await asyncio.gather(*self._channels.close())

    async def check(self) -> None:
        """Ask for all segments, by name and without, and look nothing up. The answers have the widths of the plan.

        Raises:
            ModelNotFound: no replica that was reached has the version and digest, as this part of the plan.
            HostUnavailable: no replica answered in time.
            InternalError: a replica answered otherwise.
        """
        planned = self._planned
        weights = np.empty(0, np.float32) if planned.is_weighted else None
        for segments in (None, planned.segments):
            lengths = np.empty(0, np.int32)
            names = None if segments is None else ",".join(segments)
            empty = PartialRequest(
                np.empty(0, np.int64), lengths, weights, names, 0, planned.columns, planned.part_of
            )
            deadline = asyncio.get_running_loop().time() + self.connection.timeout_s
            try:
                answer = await self.attempts(self.messages.encode(empty), largest_answer(empty), deadline)
                self.messages.decode(answer, empty)
            except ServerUnavailable as error:
                raise HostUnavailable(f"{self._where}: {error}") from None
            except ModelNotFound as error:
                raise ModelNotFound(f"{self._where}: {error}") from None
            except ServingError as error:
                raise InternalError(f"{self._where}: {error}") from None

    def received(self, message: bytes | None, request: PartialRequest) -> PartialSums:
        """The partial sums in a response, counted.

        Raises:
            InternalError: it does not answer the request.
        """
        sums = self.messages.decode(message, request)
        self.counts.add(bytes_in=sums.nbytes)
        return sums

    def lost(self, error: ServingError) -> HostUnavailable:
        """The error of a call that got no sums, counted. It names the host.

        Args:
            error: of its attempts.
        """
        self.counts.add(lost=1)
        return HostUnavailable(f"{self._where}: {error}")

    def failed(self, errors: Sequence[ServingError]) -> ServingError:
        """The error of several attempts, with each of their reasons once. May it be tried again? If one may.

        Args:
            errors: of the attempts, at least one.
        """
        reasons = dict.fromkeys(map(self._reason, errors))
        again = next((each for each in errors if each.retryable), errors[-1])
        kind = ServerUnavailable if again.retryable else type(again)
        return kind("; ".join(reasons))

    def _reason(self, error: ServingError) -> str:
        if isinstance(error, DeadlineExceeded):
            return f"no answer within {self.connection.timeout_s:g} s"
        is_told = isinstance(error, ServerUnavailable | ModelNotFound)
        return shown(str(error) if is_told else f"{error.code}: {error}", _MOST_SHOWN)

    async def attempts(
        self, message: bytes, largest: int, deadline: float, before: Sequence[ServingError] = ()
    ) -> bytes | None:
        """The first response, from whichever replica answers.

        An attempt is not given up when another begins: it may answer yet, and gRPC finds out that a connection is
        dead only while calls are on it.

        Args:
            message: a ModelInferRequest.
            largest: the most bytes of a response.
            deadline: in the time of the event loop.
            before: errors of attempts that were made elsewhere.

        Raises:
            ServingError: of all attempts, where none is answered.
        """
        loop = asyncio.get_running_loop()
        left_s = deadline - loop.time()
        others = [loop.time() + share * left_s for share in _OTHERS_AT] if self.connection.elsewhere else []
        running = {self._begin(message, largest, deadline)}
        errors = [*before]
        attempts, pause_s = 1, _PAUSE_S
        while True:
            wait_s = max(0.0, others[0] - loop.time()) if others else None
            done, running = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                first = done.pop()
                running |= done
                found: bytes | ServingError | None = first.result()
                if not isinstance(found, ServingError):
                    return found
                errors.append(found)
                if attempts >= most_attempts(found) or loop.time() + pause_s >= deadline:
                    if running:
                        continue
                    self.counts.add(timeouts=isinstance(found, DeadlineExceeded))
                    raise self.failed(errors)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_SHARE * self.connection.timeout_s)
            else:
                others.pop(0)
                self.counts.add(timeouts=1)
            attempts += 1
            self.counts.add(retries=1)
            running.add(self._begin(message, largest, deadline))

    def _begin(self, message: bytes, largest: int, deadline: float) -> "asyncio.Task[Any]":
        """Begin an attempt. It ends by the deadline, whether its answer is waited for or not."""
        attempt = asyncio.ensure_future(self._attempt(message, largest, deadline))
        self._running.add(attempt)
        attempt.add_done_callback(self._running.discard)
        return attempt

    async def _attempt(self, message: bytes, largest: int, deadline: float) -> bytes | ServingError | None:
        """A response, or why there is none. Errors that are raised hold the call and its channel for a while."""
        self.counts.add(bytes_out=len(message))
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            metadata = self.connection.call_metadata(None)
            call = self._channels.call(largest)(message, timeout=left_s, metadata=metadata)
            found = await call.read()
            if found is not grpc.aio.EOF and await call.read() is not grpc.aio.EOF:
                call.cancel()
                return InternalError(MORE_THAN_ONE)
        except ServingError as error:
            return error
        except grpc.aio.AioRpcError as error:
            return error_of(error.code().name, error.details() or "")
        return None if found is grpc.aio.EOF else found


def host_of(manifest: Manifest, bundle: HostBundle, connection: Connection) -> Host:
    """The channels to a host of a router's plan; arguments and errors as `Host`.

    Args:
        manifest: the router's.
        bundle: an entry of it.
        connection: how its replicas are reached.
    """
    return Host(bundle, planned_host(manifest, bundle.host), connection)


def most_attempts(error: BaseException) -> int:
    """How often a call is made that ends with this error."""
    if isinstance(error, ModelNotFound | ModelUnavailable):
        return _MOST_REPLICAS
    return _MOST_ATTEMPTS if isinstance(error, ServerUnavailable) else 1
