"""What each failure is to a caller, and what is tried again."""

import asyncio
import logging
import time
from typing import Any

import grpc
import numpy as np
import pytest

from serving.client import Retries
from serving.client.retries import with_retries
from serving.errors import (
    AccessDenied,
    ConfigurationError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    ModelNotFound,
    ModelUnavailable,
    NotAuthenticated,
    RequestCancelled,
    ServerUnavailable,
    ServingError,
    SharedMemoryFull,
)
from tests.support.fake_server import FakeServer
from tests.support.lookups import Lookup, lookup_sync

# What each status of gRPC is to a caller, and whether the client tries again.
STATUSES: dict[grpc.StatusCode, tuple[type[ServingError], bool]] = {
    grpc.StatusCode.CANCELLED: (RequestCancelled, False),
    grpc.StatusCode.UNKNOWN: (InternalError, False),
    grpc.StatusCode.INVALID_ARGUMENT: (InvalidRequest, False),
    grpc.StatusCode.DEADLINE_EXCEEDED: (DeadlineExceeded, False),
    grpc.StatusCode.NOT_FOUND: (ModelNotFound, False),
    grpc.StatusCode.ALREADY_EXISTS: (InternalError, False),
    grpc.StatusCode.PERMISSION_DENIED: (AccessDenied, False),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (LimitExceeded, False),
    grpc.StatusCode.FAILED_PRECONDITION: (InternalError, False),
    grpc.StatusCode.ABORTED: (ServerUnavailable, True),
    grpc.StatusCode.OUT_OF_RANGE: (InvalidRequest, False),
    grpc.StatusCode.UNIMPLEMENTED: (InternalError, False),
    grpc.StatusCode.INTERNAL: (InternalError, False),
    grpc.StatusCode.UNAVAILABLE: (ServerUnavailable, True),
    grpc.StatusCode.DATA_LOSS: (InternalError, False),
    grpc.StatusCode.UNAUTHENTICATED: (NotAuthenticated, False),
}


def test_every_grpc_status_has_an_error() -> None:
    assert set(STATUSES) == set(grpc.StatusCode) - {grpc.StatusCode.OK}


@pytest.mark.parametrize("status", STATUSES, ids=lambda status: status.name)
def test_every_status_is_a_typed_error(
    lookup: Lookup, fake: FakeServer, address: str, status: grpc.StatusCode
) -> None:
    kind, retried = STATUSES[status]
    fake.fail = lambda context: context.abort(status, "because")
    with pytest.raises(ServingError, match=rf"^{address}: model 'm': because$") as caught:
        lookup(address, retries=Retries(attempts=3, backoff_s=0.005))
    assert type(caught.value) is kind
    assert len(fake.calls) == (3 if retried else 1)
    assert caught.value.retryable or not retried


def test_a_call_succeeds_after_two_failures(lookup: Lookup, fake: FakeServer, address: str) -> None:
    def fail(context: Any) -> None:
        if len(fake.calls) < 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")

    fake.fail = fail
    answer = lookup(address, retries=Retries(backoff_s=0.005))
    assert answer.version == 7
    assert len(fake.calls) == 3


RELOADED = (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'm' has no available versions")

DEAD = (grpc.StatusCode.INTERNAL, "Failed to process: Stub process 'm_0_0' is not healthy.")

FULL = (grpc.StatusCode.INTERNAL, "Failed to increase the shared memory pool size for key 'k' to 9 bytes")


@pytest.mark.parametrize("said", [RELOADED, DEAD], ids=["reloaded", "dead"])
def test_a_model_that_is_about_to_serve_again_is_waited_for(
    lookup: Lookup, fake: FakeServer, address: str, said: tuple[grpc.StatusCode, str]
) -> None:
    def fail(context: Any) -> None:
        if len(fake.calls) < 8:  # more often than `attempts`
            context.abort(*said)

    fake.fail = fail
    assert lookup(address, retries=Retries(backoff_s=0.005)).version == 7
    assert len(fake.calls) == 8


@pytest.mark.parametrize("said", [RELOADED, DEAD, FULL], ids=["reloaded", "dead", "full"])
def test_a_call_that_times_out_is_retryable(
    lookup: Lookup, fake: FakeServer, address: str, said: tuple[grpc.StatusCode, str]
) -> None:
    fake.fail = lambda context: context.abort(*said)
    with pytest.raises(ServerUnavailable, match=r"try again(, unless it was unloaded)?$") as caught:
        lookup(address, timeout_s=2)
    assert caught.value.retryable
    tries = len(fake.calls)
    assert tries > 3 or (said is FULL and tries == 3)  # what does not fit is not sent for ever
    with pytest.raises(ServerUnavailable):
        lookup(address, retries=Retries(attempts=1))
    assert len(fake.calls) == tries + 1


def test_a_missing_model_is_not_retried(lookup: Lookup, fake: FakeServer, address: str) -> None:
    for said in ("'m' version 7 is not found", "'has no available versions' version 7 is not found"):
        fake.calls.clear()
        fake.fail = lambda context, said=said: context.abort(  # type: ignore[misc]
            grpc.StatusCode.NOT_FOUND, f"Request for unknown model: {said}"
        )
        with pytest.raises(
            ModelNotFound, match=r"is not found: check the name and the version: `tbe-serve status` shows"
        ):
            lookup(address)
        assert len(fake.calls) == 1


def test_a_model_seen_before_is_waited_for(lookup: Lookup, fake: FakeServer, address: str) -> None:
    """A tritonserver that was started anew listens before it knows its models."""

    def fail(context: Any) -> None:
        if len(fake.calls) < 8:
            context.abort(grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'm' is not found")

    fake.fail = fail
    assert lookup(address, retries=Retries(backoff_s=0.005)).version == 7
    fake.calls.clear()
    with pytest.raises(ModelUnavailable, match=r"try again, unless it was unloaded$"):
        lookup(address, retries=Retries(attempts=1))


def test_a_single_attempt_is_not_retried(lookup: Lookup, fake: FakeServer, address: str) -> None:
    fake.fail = lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "no")
    with pytest.raises(ServerUnavailable):
        lookup(address, retries=Retries(attempts=1))
    assert len(fake.calls) == 1


def test_a_large_message_is_retried(lookup: Lookup, fake: FakeServer, address: str) -> None:
    """gRPC forgets messages over 256 KiB unless it is told to keep them."""

    def fail(context: Any) -> None:
        if len(fake.calls) < 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")

    fake.fail = fail
    ids = np.arange(1_000_000)
    answer = lookup(address, {"x": (ids, np.array([ids.size]))}, retries=Retries(backoff_s=0.005))
    assert answer["x"].shape == (1, 2)
    assert len(fake.calls) == 2


@pytest.mark.parametrize("attempts", [0, 6])
def test_retries_are_bounded(attempts: int) -> None:
    with pytest.raises(ConfigurationError, match=f"attempts: expected 1 to 5, got {attempts}"):
        Retries(attempts=attempts)


def test_a_backoff_below_the_precision_of_grpc_is_refused(fake: FakeServer, address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"backoff_s: expected 0\.002 to 1000000, got 0\.001"):
        Retries(backoff_s=0.001)
    fake.fail = lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "no")
    for _ in range(20):
        with pytest.raises(ServerUnavailable):
            lookup_sync(address, retries=Retries(attempts=2, backoff_s=0.002))


def test_retries_are_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[ServingError] = [SharedMemoryFull("full"), ModelUnavailable("loading"), DeadlineExceeded("late")]

    async def attempt(_: float) -> str:
        if errors:
            raise errors.pop(0)
        return "answer"

    async def pause(_: float) -> None:
        pass

    with caplog.at_level(logging.DEBUG, "serving.client.retries"):
        call = with_retries(attempt, pause, Retries(attempts=3), time.monotonic() + 2, has_other_servers=True)
        assert asyncio.run(call) == "answer"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", "attempt 1: full: tried again in 0.02 s"),
        ("DEBUG", "attempt 2: loading: tried again in 0.04 s"),
        ("DEBUG", "attempt 3: late: another server has the rest of the time"),
    ]
