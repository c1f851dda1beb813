"""Calls to a host by the thread that waits for the answer: no other thread is woken for it.

That takes half the processor time of a call on an event loop. gRPC has it for calls whose answers are a stream, and a
call with one answer is the same on the wire: https://grpc.github.io/grpc/python/grpc.html, SingleThreadedUnaryStream.
An attempt is all that is made here. Others, after an error and when an answer is late, are the host's own.
gRPC drops an answer that is not read by its deadline: while the thread waits for a late host, others read the rest.
"""

import asyncio
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import grpc.experimental

from serving.errors import DeadlineExceeded, InternalError, ServingError
from serving.ranks.fan_out import LoopThread
from serving.ranks.host import Channels, Host, most_attempts
from serving.ranks.message import MORE_THAN_ONE, largest_answer
from serving.ranks.partial import PartialRequest, PartialSums
from serving.triton.sayings import error_of

_ON_ONE_THREAD = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
# After this share of the time an answer is late. That is looked for this often.
_LATE, _LOOKS = 0.5, 20
# A thread that was not on a processor for so long waited for the answer.
_WAITED_S = 20e-6
# How much a host's answer is expected earlier when it was there already.
_EARLIER = 0.9
# Most threads that read late answers: of all hosts, for each batch of a group of requests. They are made when needed.
_MOST_READERS = 1024


class DirectHosts:
    """The channels to all hosts. One thread at a time calls them.

    Args:
        hosts: they make the other attempts; by rank, with the same time for calls.
        loop: where the hosts were made.

    Attributes:
        by_rank: each channel.

    Raises:
        As `Host`.
    """

    def __init__(self, hosts: Mapping[int, Host], loop: LoopThread) -> None:
        self.by_rank = {rank: DirectHost(host, loop) for rank, host in hosts.items()}
        self._readers = ThreadPoolExecutor(_MOST_READERS, "late hosts")
        self._watch = loop.start(self._look())

    def close(self) -> None:
        """Close the channels."""
        self._watch.cancel()
        for host in self.by_rank.values():
            host.close()
        self._readers.shutdown()

    def ask(self, requests: Mapping[int, PartialRequest]) -> "dict[int, DirectCall]":
        """Send requests, by rank, and do not wait."""
        return {rank: self.by_rank[rank].ask(request) for rank, request in requests.items()}

    async def _look(self) -> None:
        """See to answers that are late."""
        timeout_s = min(host.timeout_s for host in self.by_rank.values())
        while True:
            await asyncio.sleep(timeout_s / _LOOKS)
            for host in self.by_rank.values():
                host.look(self._readers)


class DirectHost:
    """The channel to a host; as `DirectHosts`.

    Attributes:
        host: makes the other attempts.
        timeout_s: for a call.
        expected_s: when the next answer is expected, in seconds from the call.
        asked: the calls that are waited for.
    """

    def __init__(self, host: Host, loop: LoopThread) -> None:
        self.host = host
        self.timeout_s = host.connection.timeout_s
        self.expected_s = 0.0
        self._loop = loop
        self._known_s = float("inf")
        self._channels = Channels(host.connection, grpc, _ON_ONE_THREAD)
        self._channels.call(0)
        self.asked: set[DirectCall] = set()

    def close(self) -> None:
        """Close the channels."""
        self._channels.close()

    def ask(self, request: PartialRequest) -> "DirectCall":
        """Send a request, and do not wait."""
        asked = DirectCall(self, request)
        self.asked.add(asked)
        return asked

    def attempt(self, message: bytes, largest: int) -> Any:
        """Send a message, and do not wait; see `Host.attempts`."""
        metadata = self.host.connection.call_metadata(None)
        self.host.counts.add(bytes_out=len(message))
        return self._channels.call(largest)(message, timeout=self.timeout_s, metadata=metadata)

    def ask_elsewhere(
        self, message: bytes, largest: int, deadline: float, *before: ServingError
    ) -> "Future[bytes | None]":
        """Have the host make other attempts by `deadline`, in the time of `time.monotonic`; see `Host.attempts`."""
        self.host.counts.add(retries=1)
        return self._loop.start(self.host.attempts(message, largest, deadline, before))

    def took(self, seconds: float, waited: bool) -> None:
        """Count how long a call took.

        An answer that was there before it was waited for came at a time that nobody knows. It counts as the last one
        that was waited for, if that took less.

        Args:
            seconds: until the answer was looked at.
            waited: whether it was waited for.
        """
        if waited:
            self.expected_s = self._known_s = seconds
        else:
            self.expected_s = _EARLIER * min(self.expected_s, seconds)
        self.host.counts.took(min(self._known_s, seconds))

    def look(self, readers: ThreadPoolExecutor) -> None:
        """Have answers that are late read by other threads. If they have not come, ask another replica."""
        for asked in tuple(self.asked):
            if time.monotonic() - asked.started < _LATE * self.timeout_s:
                continue
            if not asked.is_read:
                asked.read_by(readers)
            elif self.host.connection.elsewhere:
                self.asked.discard(asked)
                asked.hurry()


class DirectCall:
    """A request to a host, on its way.

    Attributes:
        direct: the host.
        started: when it was sent, in the time of `time.monotonic`.
    """

    def __init__(self, direct: DirectHost, request: PartialRequest) -> None:
        self.direct = direct
        self.started = time.monotonic()
        self._request = request
        self._message = direct.host.messages.encode(request)
        # Where it cannot be sent, that is the host's loss, not that of who is asked beside it.
        self._attempt: Any = None
        self._not_sent: ServingError | None = None
        try:
            self._attempt = direct.attempt(self._message, largest_answer(request))
        except ServingError as error:
            self._not_sent = error
        self._elsewhere: Future[Any] | None = None
        # Who has it reads the response. Where that is another thread, the response will be in `_response`.
        self._reads = threading.Lock()
        self._response: Future[Any] | None = None

    def sums(self) -> PartialSums:
        """Wait for the host's partial sums: float32 or float16 [B, columns].

        Raises:
            HostUnavailable: no replica answered in time, none has the version, one refused the request, or what it
                sent does not answer it.
        """
        host = self.direct.host
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
        """Whether a thread reads the response, or has read it."""
        return self._reads.locked()

    def read_by(self, readers: ThreadPoolExecutor) -> None:
        """Have another thread read the response, if none does."""
        response = self._response = Future[Any]()
        if self._reads.acquire(blocking=False):
            readers.submit(self._read_into, response)

    def _read_into(self, response: "Future[Any]") -> None:
        try:
            response.set_result(self._read())
        except BaseException as error:
            response.set_exception(error)

    def hurry(self) -> None:
        """The answer is late: ask another replica. The first that answers wins. Called on the event loop."""
        self.direct.host.counts.add(timeouts=1)
        self._elsewhere = self._ask_elsewhere()
        self._elsewhere.add_done_callback(self._answered_elsewhere)

    def _ask_elsewhere(self, *before: ServingError) -> "Future[bytes | None]":
        deadline = self.started + self.direct.timeout_s
        return self.direct.ask_elsewhere(self._message, largest_answer(self._request), deadline, *before)

    def _answered_elsewhere(self, elsewhere: "Future[Any]") -> None:
        if self._attempt is not None and not elsewhere.cancelled() and elsewhere.exception() is None:
            self._attempt.cancel()  # wakes the thread that waits for it

    def _read(self) -> Any:
        begun_s, busy_s = time.perf_counter(), time.thread_time()
        try:
            return self._answer()
        finally:
            self.direct.asked.discard(self)
            waited_s = (time.perf_counter() - begun_s) - (time.thread_time() - busy_s)
            self.direct.took(time.monotonic() - self.started, waited_s > _WAITED_S)

    def _answer(self) -> bytes | None:
        if self._not_sent is not None:
            raise self.direct.host.failed([self._not_sent])
        try:
            message: bytes | None = next(self._attempt, None)
            # A message counts if the status behind it is OK, as for any call of gRPC.
            if message is not None and next(self._attempt, None) is not None:
                self._attempt.cancel()
                raise InternalError(MORE_THAN_ONE)
        except grpc.RpcError as error:
            failed = error_of(error.code().name, error.details() or "")
        else:
            return message
        host = self.direct.host
        if self._elsewhere is not None:
            try:
                found: bytes | None = self._elsewhere.result()
            except ServingError as error:
                raise host.failed([failed, error]) from None
            return found
        if most_attempts(failed) == 1:
            host.counts.add(timeouts=isinstance(failed, DeadlineExceeded))
            raise host.failed([failed])
        return self._ask_elsewhere(failed).result()


def wait_all(calls: Mapping[int, DirectCall]) -> dict[int, PartialSums | ServingError]:
    """Wait for the partial sums of several hosts, those first that are expected first.

    Args:
        calls: by rank.

    Returns:
        The partial sums of each rank, float32 or float16 [B, columns], or why there are none.
    """
    found: dict[int, PartialSums | ServingError] = {}
    for rank, call in sorted(calls.items(), key=lambda each: each[1].direct.expected_s):
        try:
            found[rank] = call.sums()
        except ServingError as error:
            found[rank] = error
    return found
