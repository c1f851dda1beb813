"""When both clients retry a call.

gRPC itself retries by status. This module retries errors that the status alone does not identify, and logs each retry
at DEBUG.
"""

import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from serving.arguments import check_arguments
from serving.errors import (
    ConfigurationError,
    DeadlineExceeded,
    ModelUnavailable,
    ServerUnavailable,
    SharedMemoryFull,
)

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
# gRPC counts in ms. 1 ms less 20 % is 0 ms, and with that gRPC left a call unattended until its deadline.
_LEAST_BACKOFF_S = 0.002
_MOST_BACKOFF_S = 1_000_000
# If there may be another server, the first attempt gets this share of the time and the second gets the rest.
_FIRST_SHARE = 2 / 3
# With at least this much time a lost connection is detected before the deadline, so the first attempt gets all of it.
_NOTICED_S = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How failed calls are retried within their deadline.

    * UNAVAILABLE: up to `attempts` attempts, made by gRPC. The first pause is `backoff_s`; each further pause is
      twice as long, up to `max_backoff_s`, all ± 20 %. When most calls fail, gRPC stops retrying for a while
      (https://github.com/grpc/proposal/blob/master/A6-client-retries.md).
    * The server's shared memory is full: up to `attempts` attempts, with the same pauses.
    * The model is being loaded: until the deadline, with the same pauses. So are all requests of a stream whose
      server is UNAVAILABLE.
    * No answer, from one of several servers (several addresses, or a name), with a deadline under 4 s: the first
      attempt ends after two thirds of the deadline, and another server gets the rest. Choose a deadline of at least
      1.5 times the slowest lookup.

    Attributes:
        attempts: 1 to 5. 1 disables all retries.
        backoff_s: the first pause, in seconds.
        max_backoff_s: the longest pause, in seconds.

    Raises:
        ConfigurationError: a value has the wrong type, or is out of range.
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
    has_other_servers: bool,
    *,
    is_patient: bool = False,
) -> T:
    """Attempt a call until it succeeds, fails for good, or the deadline passes.

    Args:
        attempt: makes one attempt, with its timeout in seconds.
        pause: waits for a number of seconds.
        retries: how failed calls are retried.
        deadline: by time.monotonic().
        has_other_servers: whether another attempt may reach another server.
        is_patient: whether a server that cannot be reached, or sheds load, is waited for until the deadline.

    Raises:
        ServingError: the error of the last attempt.
    """
    may_switch = has_other_servers and retries.attempts > 1
    pause_s = retries.backoff_s
    number = 0
    while True:
        number += 1
        # gRPC answers DEADLINE_EXCEEDED to a deadline in the past.
        left_s = max(0.0, deadline - time.monotonic())
        in_part = may_switch and left_s < _NOTICED_S
        try:
            return await attempt(left_s * _FIRST_SHARE if in_part else left_s)
        except DeadlineExceeded as error:
            if not in_part:
                raise
            may_switch = False
            _LOG.debug("attempt %d: %s: another server has the rest of the time", number, error)
            continue
        except ServerUnavailable as error:
            is_waited_for = isinstance(error, ModelUnavailable) or (
                is_patient and not isinstance(error, SharedMemoryFull)
            )
            most = math.inf if is_waited_for else retries.attempts if isinstance(error, SharedMemoryFull) else 1
            if retries.attempts == 1 or number >= most or time.monotonic() + pause_s >= deadline:
                raise
            _LOG.debug("attempt %d: %s: tried again in %g s", number, error, pause_s)
        await pause(pause_s)
        pause_s = min(2 * pause_s, retries.max_backoff_s)
