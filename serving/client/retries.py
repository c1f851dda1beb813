"""Which calls are tried again, and when, for both clients.

gRPC itself tries again by status. This file does it for errors that a status does not tell apart from others. It logs
that, at DEBUG.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from serving.arguments import check_arguments
from serving.errors import ConfigurationError, DeadlineExceeded, ModelUnavailable, SharedMemoryFull

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
# gRPC counts in ms. With 0 ms to wait, which 1 ms less 20 % is, it was seen to forget the call until its deadline.
_LEAST_BACKOFF_S = 0.002
_MOST_BACKOFF_S = 1_000_000
# Where another server may be reached, the first attempt has this share of the time. The rest is for the second.
_FIRST_SHARE = 2 / 3
# With at least this much time a lost connection is noticed before the deadline. Then the first attempt has all of it.
_NOTICED_S = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How often a call is tried within its deadline.

    * UNAVAILABLE: `attempts` times. gRPC does this. It pauses for `backoff_s` the first time and twice as long each
      time after that, up to `max_backoff_s`, all ± 20 %. When most calls fail it stops for a while
      (https://github.com/grpc/proposal/blob/master/A6-client-retries.md).
    * The server's shared memory is full: `attempts` times, with the same pauses.
    * The model is being loaded: until the deadline, with the same pauses.
    * No answer, and there may be several servers (several addresses, or a name), and the deadline is less than 4 s:
      the first attempt ends after two thirds of the deadline, and another server has the rest. Choose a deadline of
      1.5 times the slowest lookup or more.

    Attributes:
        attempts: 1 to 5; with 1 nothing is tried again, whatever the reason.
        backoff_s: the first pause, in seconds.
        max_backoff_s: the longest pause, in seconds.

    Raises:
        ConfigurationError: a value is of another type, or out of range.
    """

    attempts: int = 3
    backoff_s: float = 0.02
    max_backoff_s: float = 0.5

    def __post_init__(self) -> None:
        check_arguments(self)
        if not 1 <= self.attempts <= 5:
            raise ConfigurationError(f"attempts: expected 1 to 5, got {self.attempts}")
        for name in ("backoff_s", "max_backoff_s"):
            if not _LEAST_BACKOFF_S <= getattr(self, name) <= _MOST_BACKOFF_S:
                raise ConfigurationError(
                    f"{name}: expected {_LEAST_BACKOFF_S} to {_MOST_BACKOFF_S}, got {getattr(self, name)}"
                )


async def with_retries(
    attempt: Callable[[float], Awaitable[T]],
    pause: Callable[[float], Awaitable[None]],
    retries: Retries,
    deadline: float,
    elsewhere: bool,
) -> T:
    """Make a call again and again, until it succeeds, is refused for good, or the time is up.

    Args:
        attempt: makes the call once, within the seconds given.
        pause: waits for the seconds given.
        retries: what is tried again.
        deadline: when the time is up, by time.monotonic().
        elsewhere: whether another attempt may reach another server.

    Raises:
        ServingError: that of the last attempt.
    """
    elsewhere = elsewhere and retries.attempts > 1
    pause_s = retries.backoff_s
    number = 0
    while True:
        number += 1
        # A deadline that has passed is gRPC's to tell: DEADLINE_EXCEEDED.
        left_s = max(0.0, deadline - time.monotonic())
        in_part = elsewhere and left_s < _NOTICED_S
        try:
            return await attempt(left_s * _FIRST_SHARE if in_part else left_s)
        except DeadlineExceeded as error:
            if not in_part:
                raise
            elsewhere = False
            _LOG.debug("attempt %d: %s: another server has the rest of the time", number, error)
            continue
        except (ModelUnavailable, SharedMemoryFull) as error:
            is_last = retries.attempts == 1 if isinstance(error, ModelUnavailable) else number >= retries.attempts
            if is_last or time.monotonic() + pause_s >= deadline:
                raise
            _LOG.debug("attempt %d: %s: tried again in %g s", number, error, pause_s)
        await pause(pause_s)
        pause_s = min(2 * pause_s, retries.max_backoff_s)
