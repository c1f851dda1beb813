"""What is tried again, and when, for both clients. gRPC does it by status; here is what a status does not tell."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from serving.client.exchange import Call, Steps
from serving.errors import DeadlineExceeded, InvalidRequest, ModelUnavailable, ServerFull, ServingError

T = TypeVar("T")
# gRPC counts in ms, and with 0 ms to wait it forgets the call until its deadline: seen with 1 ms less 20 %.
_LEAST_BACKOFF_S = 0.002
_MOST_BACKOFF_S = 1_000_000
# A first try that may go elsewhere has this share of the time, so that some is left,
_FIRST_SHARE = 2 / 3
# unless there is so much time that a lost connection is noticed within it: then long lookups have all of it.
_NOTICED_S = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How often a call is tried while its deadline lasts.

    A server that says UNAVAILABLE is asked `attempts` times. gRPC does it: it waits `backoff_s`, twice as long each
    time and at most `max_backoff_s`, all ± 20 %, and stops for a while when most calls fail
    (https://github.com/grpc/proposal/blob/master/A6-client-retries.md). So is one whose shared memory was full.

    A model that is being loaded anew is asked for until the deadline, with the same pauses.

    Where calls may go to several servers (several addresses, or a name), one that did not answer within two thirds of
    a deadline of less than 4 s is asked no more, and another has the rest. Choose a deadline of 1.5 times the slowest
    lookup or more.

    Attributes:
        attempts: 1 to 5; 1 never tries again, whatever the reason.
    """

    attempts: int = 3
    backoff_s: float = 0.02
    max_backoff_s: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= 5:
            raise InvalidRequest(f"attempts: expected 1 to 5, got {self.attempts}")
        for name in ("backoff_s", "max_backoff_s"):
            if not _LEAST_BACKOFF_S <= getattr(self, name) <= _MOST_BACKOFF_S:
                raise InvalidRequest(
                    f"{name}: expected {_LEAST_BACKOFF_S} to {_MOST_BACKOFF_S}, got {getattr(self, name)}"
                )


class Try(NamedTuple):
    """A call to make now, with this much time."""

    call: Call
    timeout_s: float


class Pause(NamedTuple):
    """Time to wait."""

    seconds: float


Tries = Generator[Try | Pause, Any, T]


def tried(steps: Steps[T], retries: Retries, deadline: float, elsewhere: bool) -> Tries[T]:
    """`steps`, whose calls are tried until one succeeds, is refused for good, or the time is up.

    Args:
        deadline: of all of it, by time.monotonic().
        elsewhere: whether another try may reach another server.
    """
    resume: Callable[[Any], Call] = steps.send
    result: Any = None
    while True:
        try:
            call = resume(result)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        try:
            resume, result = steps.send, (yield from _answered(call, retries, deadline, elsewhere))
        except ServingError as error:
            resume, result = steps.throw, error


def _answered(call: Call, retries: Retries, deadline: float, elsewhere: bool) -> Tries[Any]:
    elsewhere = elsewhere and retries.attempts > 1
    pause_s = retries.backoff_s
    attempt = 0
    while True:
        attempt += 1
        # A deadline that has passed is gRPC's to tell: DEADLINE_EXCEEDED.
        left_s = max(0.0, deadline - time.monotonic())
        in_part = elsewhere and left_s < _NOTICED_S
        try:
            return (yield Try(call, left_s * _FIRST_SHARE if in_part else left_s))
        except DeadlineExceeded:
            if not in_part:
                raise
            elsewhere = False
            continue
        except ModelUnavailable:
            if retries.attempts == 1 or time.monotonic() + pause_s >= deadline:
                raise
        except ServerFull:
            if attempt >= retries.attempts or time.monotonic() + pause_s >= deadline:
                raise
        yield Pause(pause_s)
        pause_s = min(2 * pause_s, retries.max_backoff_s)
