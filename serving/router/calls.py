"""Calls to hosts, made by the thread that waits for the answers. An answer in time wakes no other thread.

This takes half the processor time of a call on an event loop. gRPC supports it only for calls that return a stream,
which on the wire are the same as calls with one response. Source:
https://grpc.github.io/grpc/python/grpc.html, SingleThreadedUnaryStream.

Only the first attempt is made here. `Host.attempts` makes further attempts, after an error or when an answer is late.

gRPC drops a response that is not read before the deadline of its call. So while the calling thread waits for a late
host, threads of a pool read the responses that arrive from other hosts.
"""

import asyncio
import contextvars
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
import grpc.experimental

from serving.errors import DeadlineExceeded, InternalError, ServingError
from serving.router.host import TRACE, Channels, Host, most_attempts
from serving.router.messages import MORE_THAN_ONE, PartialRequest, PartialSums, largest_answer
from serving.router.replicas import LoopThread

_ON_ONE_THREAD = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
# The share of the timeout after which an answer is late, and the number of checks for late answers in one timeout.
_LATE, _LOOKS = 0.5, 20
# A thread that was off the processor for longer than this, in seconds, waited for the answer.
_WAITED_S = 20e-6
# If an answer arrived before anything waited for it, the next one is expected after this share of the time.
_EARLIER = 0.9
# Maximum number of threads that read late answers, for all hosts together. They are started when needed.
_MOST_READERS = 1024


class HostTime(NamedTuple):
    """The number of a host, and when a call to it began and ended, by `time.monotonic`."""

    host: int
    started: float
    ended: float


class HostCallers:
    """The callers of all hosts. Only one thread at a time may use them.

    Args:
        hosts: the hosts by rank, which make the attempts after the first one. All have the same timeout.
        loop: the event loop that the hosts were made in.

    Attributes:
        by_rank: the caller of each host.

    Raises:
        ConfigurationError, ServerUnavailable: as for `Host`.
    """

    def __init__(self, hosts: Mapping[int, Host], loop: LoopThread) -> None:
        self.by_rank = {rank: HostCaller(host, loop) for rank, host in hosts.items()}
        self._loop = loop
        self._readers = ThreadPoolExecutor(_MOST_READERS, "late hosts")
        self._watch = loop.start(self._look())

    def close(self) -> None:
        """Close the channels."""
        self._watch.cancel()
        for host in self.by_rank.values():
            host.close()
        self._readers.shutdown()

    def ask(self, requests: Mapping[int, PartialRequest]) -> "dict[int, HostCall]":
        """Send requests, by rank. This returns before they are answered.

        Raises:
            ConfigurationError: this process was forked from the one that the callers were made in.
        """
        self._loop.check()
        return {rank: self.by_rank[rank].ask(request) for rank, request in requests.items()}

    async def _look(self) -> None:
        """Check for late answers, `_LOOKS` times in a timeout."""
        timeout_s = min(host.timeout_s for host in self.by_rank.values())
        while True:
            await asyncio.sleep(timeout_s / _LOOKS)
            for host in self.by_rank.values():
                host.look(self._readers)


class HostCaller:
    """The channels to one host. Arguments and errors as for `HostCallers`.

    Attributes:
        host: makes the attempts after the first one.
        timeout_s: the timeout of a call with all its attempts, in seconds.
        expected_s: how long the next call is expected to take, in seconds.
        pending: the calls without an answer.
    """

    def __init__(self, host: Host, loop: LoopThread) -> None:
        self.host = host
        self.timeout_s = host.connection.timeout_s
        self.expected_s = 0.0
        self._loop = loop
        self._known_s = float("inf")
        self._channels = Channels(host.connection, grpc, _ON_ONE_THREAD)
        self.pending: set[HostCall] = set()

    def close(self) -> None:
        """Close the channels."""
        self._channels.close()

    def ask(self, request: PartialRequest) -> "HostCall":
        """Send a request. This returns before it is answered."""
        call = HostCall(self, request)
        self.pending.add(call)
        return call

    def attempt(self, message: bytes, largest: int) -> Any:
        """Make the first attempt of a call, without waiting for the answer. Arguments as for `Host.attempts`."""
        metadata = self.host.connection.call_metadata(TRACE.get())
        self.host.counts.add(bytes_out=len(message))
        return self._channels.call(largest, self.timeout_s)(message, timeout=self.timeout_s, metadata=metadata)

    def ask_elsewhere(
        self, message: bytes, largest: int, deadline: float, *before: ServingError
    ) -> "Future[bytes | None]":
        """Have the host make more attempts on its event loop; see `Host.attempts`.

        Args:
            message, largest, before: as for `Host.attempts`.
            deadline: by `time.monotonic`.
        """
        self.host.counts.add(retries=1)
        return self._loop.start(self.host.attempts(message, largest, deadline, before))

    def took(self, seconds: float, waited: bool) -> None:
        """Count how long a call took.

        If the answer arrived before a thread waited for it, its time is unknown. The time of the last call whose
        answer was waited for counts instead, if that is less than `seconds`.

        Args:
            seconds: the time until the answer was read.
            waited: whether a thread waited for the answer.
        """
        if waited:
            self.expected_s = self._known_s = seconds
        else:
            self.expected_s = _EARLIER * min(self.expected_s, seconds)
        self.host.counts.took(min(self._known_s, seconds))

    def look(self, readers: ThreadPoolExecutor) -> None:
        """Have another thread read each late answer. If it is still late at the next check, ask another replica."""
        for call in tuple(self.pending):
            if time.monotonic() - call.started < _LATE * self.timeout_s:
                continue
            if not call.is_read:
                call.read_by(readers)
            elif self.host.connection.has_other_servers:
                self.pending.discard(call)
                call.ask_other_replica()


class HostCall:
    """A request to a host that was sent.

    Attributes:
        caller: the caller of the host.
        started: when the request was sent, by `time.monotonic`.
        ended: when its answer was read, or the call failed.
    """

    def __init__(self, caller: HostCaller, request: PartialRequest) -> None:
        self.caller = caller
        self.started = self.ended = time.monotonic()
        self._context = contextvars.copy_context()  # other threads continue with the call
        self._request = request
        self._message = caller.host.messages.encode(request)
        # If the request cannot be sent, only this host is lost. The calls to other hosts continue.
        self._attempt: Any = None
        self._not_sent: ServingError | None = None
        try:
            self._attempt = caller.attempt(self._message, largest_answer(request))
        except ServingError as error:
            self._not_sent = error
        self._elsewhere: Future[Any] | None = None
        # The thread that holds this lock reads the response. If it is one of `readers`, it sets `_response`.
        self._reads = threading.Lock()
        self._response: Future[Any] | None = None

    def sums(self) -> PartialSums:
        """Wait for the host's partial sums: float32 or float16 [B, columns].

        Raises:
            HostUnavailable: no replica answered in time, no replica has the version, a replica refused the request,
                or a response does not fit the request.
        """
        host = self.caller.host
        try:
            if self._reads.acquire(blocking=False):
                response = self._read()
            else:
                assert self._response is not None  # noqa: S101  made before the other thread had it
                response = self._response.result()
            return host.received(response, self._request)
        except ServingError as error:
            raise host.lost(error) from None

    @property
    def is_read(self) -> bool:
        """Whether a thread is reading the response, or has read it."""
        return self._reads.locked()

    def read_by(self, readers: ThreadPoolExecutor) -> None:
        """Have another thread read the response, unless one already does."""
        response = self._response = Future[Any]()
        if self._reads.acquire(blocking=False):
            readers.submit(self._read_into, response)

    def _read_into(self, response: "Future[Any]") -> None:
        try:
            response.set_result(self._read())
        except BaseException as error:
            response.set_exception(error)

    def ask_other_replica(self) -> None:
        """Ask another replica, because the answer is late. The first answer counts. Called on the event loop."""
        self.caller.host.counts.add(timeouts=1)
        self._elsewhere = self._ask_elsewhere()
        self._elsewhere.add_done_callback(self._answered_elsewhere)

    def _ask_elsewhere(self, *before: ServingError) -> "Future[bytes | None]":
        deadline = self.started + self.caller.timeout_s
        ask = self.caller.ask_elsewhere
        return self._context.run(ask, self._message, largest_answer(self._request), deadline, *before)

    def _answered_elsewhere(self, elsewhere: "Future[Any]") -> None:
        if self._attempt is not None and not elsewhere.cancelled() and elsewhere.exception() is None:
            self._attempt.cancel()  # wakes the thread that waits for it

    def _read(self) -> Any:
        begun_s, busy_s = time.perf_counter(), time.thread_time()
        try:
            return self._answer()
        finally:
            self.caller.pending.discard(self)
            self.ended = time.monotonic()
            waited_s = (time.perf_counter() - begun_s) - (time.thread_time() - busy_s)
            self.caller.took(self.ended - self.started, waited_s > _WAITED_S)

    def _answer(self) -> bytes | None:
        host = self.caller.host
        if self._not_sent is not None:
            raise host.failed([self._not_sent])
        try:
            message: bytes | None = next(self._attempt, None)
            # As in all calls of gRPC, a message is valid only if the status after it is OK.
            if message is not None and next(self._attempt, None) is not None:
                self._attempt.cancel()
                raise InternalError(MORE_THAN_ONE)
        except grpc.RpcError as error:
            failed = host.connection.error_of(error)
        else:
            return message
        if self._elsewhere is not None:
            try:
                response: bytes | None = self._elsewhere.result()
            except ServingError as error:
                raise host.failed([failed, error]) from None
            return response
        if most_attempts(failed) == 1:
            host.counts.add(timeouts=isinstance(failed, DeadlineExceeded))
            raise host.failed([failed])
        return self._ask_elsewhere(failed).result()


def wait_all(calls: Mapping[int, HostCall]) -> dict[int, PartialSums | ServingError]:
    """Wait for the partial sums of several hosts, in the order in which they are expected.

    Args:
        calls: the calls by rank.

    Returns:
        By rank: the partial sums, float32 or float16 [B, columns], or the error of the call.
    """
    sums_by_rank: dict[int, PartialSums | ServingError] = {}
    for rank, call in sorted(calls.items(), key=lambda entry: entry[1].caller.expected_s):
        try:
            sums_by_rank[rank] = call.sums()
        except ServingError as error:
            sums_by_rank[rank] = error
    return sums_by_rank
