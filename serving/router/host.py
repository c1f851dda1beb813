"""One host, reached at its replicas: it is asked for partial sums over KServe gRPC.

A call names the version of the host's model and the digest of its bundle. A replica that does not serve exactly this
bundle answers NOT_FOUND. Another replica is tried then, but never another version.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import grpc
import grpc.aio
import numpy as np

from serving.bundle.manifest import Manifest
from serving.bundle.plan import HostBundle
from serving.bundle.segments import PlannedHost, planned_host
from serving.client.channels import LiveChannel
from serving.client.connection import Connection
from serving.client.forks import calling
from serving.errors import (
    DeadlineExceeded,
    HostUnavailable,
    InternalError,
    ModelNotFound,
    ModelUnavailable,
    ServerUnavailable,
    ServingError,
    listed,
    shown,
)
from serving.router.messages import METHOD, MORE_THAN_ONE, Messages, PartialRequest, PartialSums, largest_answer

# If a host has several replicas, another attempt begins after each of these shares of the timeout without an answer.
_OTHERS_AT = (0.5, 0.75)
# Maximum attempts of a call: if replicas do not answer, and if they lack the version. The second number is larger:
# connected replicas report at once that they lack it, while a connection to one that has it may take a moment.
_MOST_ATTEMPTS, _MOST_REPLICAS = 3, 10
# The pause after the first failed attempt, in seconds. It doubles each time, up to this share of the timeout.
_PAUSE_S, _LONGEST_PAUSE_SHARE = 0.002, 1 / 6
# Limits of a response, in bytes. Each has its own channel, which is opened when it is needed. A call uses the
# smallest sufficient limit. gRPC refuses a larger response after its first bytes, and allocates no memory for it.
_LARGEST = (4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30, 2**31 - 1)
# The W3C traceparent that goes with calls to hosts.
TRACE: ContextVar[str | None] = ContextVar("traceparent", default=None)
# Maximum characters of the reason for a failed attempt in an error.
_MOST_SHOWN = 300
# Upper bounds of the buckets of calls by their time, in seconds.
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(slots=True)
class HostCounts:
    """Counts of the calls to a host, since the start. Several threads may add to them.

    Attributes:
        seconds: the sum of the times of all calls.
        by_seconds: the calls in each bucket of time [len(SECONDS) + 1]. The last bucket has no upper bound.
        bytes_out: the bytes of all sent messages, with all attempts.
        bytes_in: the bytes of all received partial sums.
        retries: attempts after the first one of a call.
        timeouts: attempts without an answer when the next began, or at the end of the timeout.
        lost: calls without an answer.
    """

    seconds: float = 0.0
    by_seconds: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    bytes_out: int = 0
    bytes_in: int = 0
    retries: int = 0
    timeouts: int = 0
    lost: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def calls(self) -> int:
        """All calls, answered or not."""
        return sum(self.by_seconds)

    def add(
        self, *, bytes_out: int = 0, bytes_in: int = 0, retries: int = 0, timeouts: int = 0, lost: int = 0
    ) -> None:
        """Add to these counts."""
        with self._lock:
            self.bytes_out += bytes_out
            self.bytes_in += bytes_in
            self.retries += retries
            self.timeouts += timeouts
            self.lost += lost

    def took(self, seconds: float) -> None:
        """Count a call and its time."""
        with self._lock:
            self.seconds += seconds
            self.by_seconds[bisect_left(SECONDS, seconds)] += 1


class Channels:
    """The channels to a host, one for each limit of a response.

    Args:
        connection: how its replicas are reached.
        library: the module grpc or grpc.aio.
        options: the options of each channel.
    """

    def __init__(self, connection: Connection, library: Any, *options: tuple[str, Any]) -> None:
        self._connection = connection
        self._library = library
        self._options = options
        self._channels: dict[int, LiveChannel[Any]] = {}
        self._channel(0)

    def call(self, largest: int, timeout_s: float) -> Any:
        """The gRPC callable for a call: bytes to a stream of bytes.

        Args:
            largest: the maximum bytes of the response.
            timeout_s: the maximum time of the call, in seconds.

        Raises:
            ConfigurationError: as for `LiveChannel.methods`.
        """
        return self._channel(largest).methods(timeout_s)

    def _channel(self, largest: int) -> LiveChannel[Any]:
        limit = next((limit for limit in _LARGEST if largest <= limit), _LARGEST[-1])
        if limit not in self._channels:
            options = (*self._options, ("grpc.max_receive_message_length", limit))
            self._channels[limit] = LiveChannel(self._connection, self._library, _unary_stream, *options)
        return self._channels[limit]

    def close(self) -> list[Any]:
        """Close all channels. Returns the result of each `close`, which grpc.aio requires to be awaited."""
        return [closed for channel in self._channels.values() for closed in channel.close()]


def _unary_stream(channel: Any) -> Any:
    return channel.unary_stream(METHOD)


class Host:
    """The channels to one host. Make it and use it in one event loop.

    Args:
        bundle: the bundle that has to answer.
        planned: the segments that the router's plan has on the host.
        connection: how its replicas are reached.

    Attributes:
        connection: as the argument.
        messages: encodes requests to the host, and decodes its responses.
        counts: the counts of its calls.

    Raises:
        ConfigurationError: certificates cannot be used.
        ServerUnavailable: one of several addresses has a name that cannot be resolved.
    """

    def __init__(self, bundle: HostBundle, planned: PlannedHost, connection: Connection) -> None:
        self.connection = connection
        self.messages = Messages(bundle, planned.id_dtype)
        self.counts = HostCounts()
        self._planned = planned
        self._where = (
            f"host {bundle.host} ({bundle.model} version {bundle.version} at {listed(connection.addresses)})"
        )
        # Attempts that have not ended. asyncio has only weak references to them.
        self._running: set[asyncio.Task[Any]] = set()
        self._channels = Channels(connection, grpc.aio)

    async def close(self) -> None:
        """Close the channels. Attempts without an answer are cancelled."""
        for attempt in self._running:
            attempt.cancel()
        await asyncio.gather(*self._channels.close())

    async def check(self) -> None:
        """Check that a replica has the bundle by two lookups of no samples: of all segments, with and without names.

        The responses must have the widths of the plan.

        Raises:
            ModelNotFound: no reached replica has the version and digest as this part of the plan.
            HostUnavailable: no replica answered in time.
            InternalError: a replica's response does not fit.
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
        """Decode the partial sums in a response, float32 or float16 [B, columns], and count its bytes.

        Raises:
            InternalError: the response does not fit the request.
        """
        sums = self.messages.decode(message, request)
        self.counts.add(bytes_in=sums.nbytes)
        return sums

    def lost(self, error: ServingError) -> HostUnavailable:
        """Count a call without an answer. Returns its error, which names the host.

        Args:
            error: the error of its attempts.
        """
        self.counts.add(lost=1)
        return HostUnavailable(f"{self._where}: {error}")

    def failed(self, errors: Sequence[ServingError]) -> ServingError:
        """One error for several attempts, without repeated reasons. It is retryable if one of theirs is.

        Args:
            errors: the errors of the attempts, at least one.
        """
        reasons = dict.fromkeys(map(self._reason, errors))
        again = next((error for error in errors if error.retryable), errors[-1])
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
        """Ask replicas, and return the first response.

        An attempt continues when another begins, because it may still be answered. Also, gRPC notices that a
        connection is dead only while calls are on it.

        Args:
            message: a ModelInferRequest.
            largest: the maximum bytes of a response.
            deadline: by the clock of the event loop.
            before: the errors of attempts that `HostCaller` made.

        Raises:
            ServingError: no attempt was answered. The message has the reasons of all attempts.
        """
        loop = asyncio.get_running_loop()
        left_s = deadline - loop.time()
        hedge_times = (
            [loop.time() + share * left_s for share in _OTHERS_AT] if self.connection.has_other_servers else []
        )
        running = {self._begin(message, largest, deadline)}
        errors = [*before]
        attempts, pause_s = 1, _PAUSE_S
        while True:
            wait_s = max(0.0, hedge_times[0] - loop.time()) if hedge_times else None
            done, running = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                first = done.pop()
                running |= done
                outcome: bytes | ServingError | None = first.result()
                if not isinstance(outcome, ServingError):
                    return outcome
                errors.append(outcome)
                if attempts >= most_attempts(outcome) or loop.time() + pause_s >= deadline:
                    if running:
                        continue
                    self.counts.add(timeouts=isinstance(outcome, DeadlineExceeded))
                    raise self.failed(errors)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_SHARE * self.connection.timeout_s)
            else:
                hedge_times.pop(0)
                self.counts.add(timeouts=1)
            attempts += 1
            self.counts.add(retries=1)
            running.add(self._begin(message, largest, deadline))

    def _begin(self, message: bytes, largest: int, deadline: float) -> "asyncio.Task[Any]":
        """Begin an attempt, which ends by the deadline even if nothing waits for its answer."""
        attempt = asyncio.ensure_future(self._attempt(message, largest, deadline))
        self._running.add(attempt)
        attempt.add_done_callback(self._running.discard)
        return attempt

    async def _attempt(self, message: bytes, largest: int, deadline: float) -> bytes | ServingError | None:
        """Make one attempt. An error is returned: if it were raised, it would keep the call and its channel alive."""
        self.counts.add(bytes_out=len(message))
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            metadata = self.connection.call_metadata(TRACE.get())
            method = self._channels.call(largest, left_s)
            with calling():
                call = method(message, timeout=left_s, metadata=metadata)
                response = await call.read()
                if response is not grpc.aio.EOF and await call.read() is not grpc.aio.EOF:
                    call.cancel()
                    return InternalError(MORE_THAN_ONE)
        except ServingError as error:
            return error
        except grpc.aio.AioRpcError as error:
            return self.connection.error_of(error)
        return None if response is grpc.aio.EOF else response


def host_of(manifest: Manifest, bundle: HostBundle, connection: Connection) -> Host:
    """The channels to a host of a router's plan. Errors as for `Host`.

    Args:
        manifest: the router's manifest.
        bundle: the host's entry in it.
        connection: how its replicas are reached.
    """
    return Host(bundle, planned_host(manifest, bundle.host), connection)


def most_attempts(error: BaseException) -> int:
    """The maximum number of attempts of a call whose last attempt ended with this error."""
    if isinstance(error, ModelNotFound | ModelUnavailable):
        return _MOST_REPLICAS
    return _MOST_ATTEMPTS if isinstance(error, ServerUnavailable) else 1
