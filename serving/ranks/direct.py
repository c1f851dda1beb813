"""Calls to a host by the thread that waits for the answer: no other thread is woken for it.

That takes half the processor time of a call on an event loop. gRPC has it for calls whose answers are a stream, and a
call with one answer is the same on the wire: https://grpc.github.io/grpc/python/grpc.html, SingleThreadedUnaryStream.
An attempt is all that is made here. Others, after an error and when an answer is late, are the host's own.
"""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import grpc
import grpc.experimental

from serving.errors import DeadlineExceeded, InternalError, ServingError
from serving.ranks.fan_out import LoopThread
from serving.ranks.host import Host, most_attempts
from serving.ranks.message import METHOD, Response
from serving.ranks.partial import PartialRequest, PartialSums
from serving.triton.sayings import error_of

_ON_ONE_THREAD = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
# Where another replica may be reached, it is asked after this share of the time. That is looked for this often.
_LATE, _LOOKS = 0.5, 20
# A thread that was not on a processor for so long waited for the answer.
_WAITED_S = 20e-6
# How much a host's answer is expected earlier when it was there already.
_EARLIER = 0.9


class DirectHost:
    """The channel to a host. One thread at a time calls it.

    Args:
        host: makes the other attempts.
        loop: where the host was made.

    Attributes:
        host: as given.
        expected_s: when the next answer is expected, in seconds from the call.
        asked: the call that is waited for, if any.

    Raises:
        As `Host`.
    """

    def __init__(self, host: Host, loop: LoopThread) -> None:
        self.host = host
        self.expected_s = 0.0
        self._loop = loop
        self._known_s = float("inf")
        self._channel = host.connection.channel(grpc, [_ON_ONE_THREAD])
        self._call = self._channel.unary_stream(METHOD, response_deserializer=Response.FromString)
        self.asked: DirectCall | None = None
        self._watch = loop.start(self._look_elsewhere()) if host.connection.elsewhere else None

    def close(self) -> None:
        """Close the channel."""
        if self._watch is not None:
            self._watch.cancel()
        self._channel.close()

    def ask(self, request: PartialRequest) -> "DirectCall":
        """Send a request, and do not wait."""
        message = self.host.messages.encode(request)
        metadata = self.host.connection.call_metadata(None)
        self.host.counts.add(bytes_out=len(message))
        attempt = self._call(message, timeout=self.host.connection.timeout_s, metadata=metadata)
        self.asked = DirectCall(self, request, message, attempt)
        return self.asked

    def ask_elsewhere(self, message: bytes, deadline: float) -> "Future[Any]":
        """Have the host make other attempts by `deadline`, in the time of `time.monotonic`."""
        self.host.counts.add(retries=1)
        return self._loop.start(self.host.attempts(message, deadline))

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

    async def _look_elsewhere(self) -> None:
        """Ask another replica when an answer is late. The first attempt goes on: it may be answered yet."""
        timeout_s = self.host.connection.timeout_s
        while True:
            await asyncio.sleep(timeout_s / _LOOKS)
            asked = self.asked
            if asked is not None and time.monotonic() - asked.started >= _LATE * timeout_s:
                self.asked = None
                asked.hurry()


class DirectCall:
    """A request to a host, on its way.

    Attributes:
        direct: the host.
        started: when it was sent, in the time of `time.monotonic`.
    """

    def __init__(self, direct: DirectHost, request: PartialRequest, message: bytes, attempt: Any) -> None:
        self.direct = direct
        self.started = time.monotonic()
        self._request = request
        self._message = message
        self._attempt = attempt
        self._elsewhere: Future[Any] | None = None

    def sums(self) -> PartialSums:
        """Wait for the host's partial sums; returns and raises as `Host.sums`."""
        host = self.direct.host
        begun_s, busy_s = time.perf_counter(), time.thread_time()
        try:
            return host.received(self._response(), self._request)
        except ServingError as error:
            raise host.lost(error) from None
        finally:
            self.direct.asked = None
            waited_s = (time.perf_counter() - begun_s) - (time.thread_time() - busy_s)
            self.direct.took(time.monotonic() - self.started, waited_s > _WAITED_S)

    def hurry(self) -> None:
        """The answer is late: ask another replica. The first that answers wins. Called on the event loop."""
        self.direct.host.counts.add(timeouts=1)
        self._elsewhere = self.direct.ask_elsewhere(self._message, self._deadline)
        self._elsewhere.add_done_callback(self._answered_elsewhere)

    def _answered_elsewhere(self, elsewhere: "Future[Any]") -> None:
        if not elsewhere.cancelled() and elsewhere.exception() is None:
            self._attempt.cancel()  # wakes the thread that waits for it

    @property
    def _deadline(self) -> float:
        return self.started + self.direct.host.connection.timeout_s

    def _response(self) -> Any:
        try:
            # The status behind the answer is not read: it came with it, and to get at it takes a third of a call.
            return next(self._attempt)
        except StopIteration:
            raise InternalError("expected a response, got none") from None
        except grpc.RpcError as error:
            if self._elsewhere is not None:
                return self._elsewhere.result()
            failed = error_of(error.code().name, error.details() or "")
        if most_attempts(failed) == 1:
            self.direct.host.counts.add(timeouts=isinstance(failed, DeadlineExceeded))
            raise failed
        return self.direct.ask_elsewhere(self._message, self._deadline).result()


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
