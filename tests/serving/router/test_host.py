"""The attempts of a call to a host, by a clock that tests turn; what travels is the business of the other files."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from serving.bundle.plan import HostBundle, IdDtype
from serving.bundle.segments import PlannedHost
from serving.client.connection import Connection
from serving.client.retries import Retries
from serving.errors import HostUnavailable, InternalError, ServingError
from serving.router.host import Host
from serving.router.messages import PartialRequest, largest_answer

TIMEOUT_S = 0.3
ONE, TWO = ["127.0.0.1:1"], ["127.0.0.1:1", "127.0.0.1:2"]
REQUEST = PartialRequest(np.array([1, 2]), np.array([2], np.int32), None, None, samples=1, columns=3)

PLANNED = PlannedHost(segments=("x", "y"), columns=3, id_dtype=IdDtype.INT32, is_weighted=False, part_of="p/0")


class Clock(selectors.DefaultSelector):
    """Time passes when the loop has nothing else to do, and then at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events and timeout:
            self.now += timeout
        return events


@dataclass(frozen=True)
class Says:
    """What a replica does with an attempt: after so many seconds it ends with a status."""

    code: grpc.StatusCode = grpc.StatusCode.OK
    after_s: float = 0.001
    details: str = ""
    shape: tuple[int, ...] = (1, 1, 3)
    content: bytes = np.ones(3, np.float32).tobytes()


SILENT = Says(after_s=1e9)
NOT_FOUND = Says(grpc.StatusCode.NOT_FOUND, details="Request for unknown model: 'm' version 1 is not found")
REFUSED = Says(grpc.StatusCode.UNAVAILABLE, details="Connection refused")
LOADING = Says(grpc.StatusCode.UNAVAILABLE, details="Request for unknown model: 'm' version 1 is not at ready state")


@dataclass
class Replicas:
    """Answers attempts, each as the next says; the last goes on.

    Attributes:
        began: when each attempt began, in seconds.
        timeouts: the deadline that each attempt was given, in seconds.
        requests: what each was asked.
    """

    says: list[Says]
    clock: Clock
    began: list[float] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)

    def called(self, largest: int, timeout_s: float) -> Any:
        """What `Channels.call` gives."""
        assert largest >= 12
        assert timeout_s <= TIMEOUT_S
        return self

    def __call__(self, message: bytes, timeout: float, metadata: Any) -> "Attempt":
        request = pb.ModelInferRequest.FromString(message)
        assert (request.model_name, request.model_version) == ("m", "1")
        assert request.parameters["bundle"].string_param == "f" * 64
        assert list(metadata) == []
        say = self.says[min(len(self.began), len(self.says) - 1)]
        self.began.append(self.clock.now)
        self.timeouts.append(timeout)
        self.requests.append(request)
        return Attempt(say, timeout)


@dataclass
class Attempt:
    """A call of `grpc.aio`."""

    say: Says
    timeout: float
    is_read: bool = False

    async def read(self) -> Any:
        if self.is_read:
            return grpc.aio.EOF
        self.is_read = True
        await asyncio.sleep(min(self.say.after_s, self.timeout))
        code = self.say.code if self.say.after_s <= self.timeout else grpc.StatusCode.DEADLINE_EXCEEDED
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), self.say.details)
        response = pb.ModelInferResponse(model_name="m", model_version="1", raw_output_contents=[self.say.content])
        response.outputs.add(name="embeddings", datatype="FP32", shape=self.say.shape)
        return response.SerializeToString()


@dataclass(frozen=True)
class Told:
    """What came of a call."""

    answer: Any
    took_s: float
    replicas: Replicas
    host: Host


async def sums(host: Host) -> Any:
    """What is made of an answer, and of its want."""
    message, deadline = host.messages.encode(REQUEST), asyncio.get_running_loop().time() + TIMEOUT_S
    try:
        return host.received(await host.attempts(message, largest_answer(REQUEST), deadline), REQUEST)
    except ServingError as error:
        raise host.lost(error) from None


def call(addresses: list[str], *says: Says, do: Callable[[Host], Coroutine[Any, Any, Any]] | None = None) -> Told:
    """Ask a host whose replicas do as told."""
    clock = Clock()
    replicas = Replicas(list(says), clock)

    async def run() -> Told:
        connection = Connection(addresses=addresses, timeout_s=TIMEOUT_S, retries=Retries(attempts=1))
        host = Host(HostBundle(0, "m", 1, "f" * 64), PLANNED, connection)
        host._channels.call = replicas.called  # type: ignore[method-assign]
        try:
            outcome: Any = await (sums(host) if do is None else do(host))
        except (HostUnavailable, InternalError) as error:
            outcome = error
        took_s = clock.now
        await host.close()
        return Told(outcome, took_s, replicas, host)

    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def test_an_answer_within_half_of_the_time_needs_one_attempt() -> None:
    outcome = call(TWO, Says(after_s=0.1))
    np.testing.assert_array_equal(outcome.answer, [[1, 1, 1]])
    assert outcome.took_s == pytest.approx(0.1)
    assert (outcome.host.counts.retries, outcome.host.counts.timeouts) == (0, 0)


@pytest.mark.parametrize("addresses", [ONE, TWO], ids=["one", "two"])
def test_a_silent_host_is_lost_when_the_time_is_over(addresses: list[str]) -> None:
    outcome = call(addresses, SILENT)
    assert isinstance(outcome.answer, HostUnavailable)
    assert str(outcome.answer) == f"host 0 (m version 1 at {', '.join(addresses)}): no answer within 0.3 s"
    assert outcome.took_s == pytest.approx(TIMEOUT_S)
    assert outcome.host.counts.lost == 1


def test_a_single_address_gets_one_attempt() -> None:
    assert call(ONE, SILENT).replicas.began == [0]


def test_attempts_start_at_half_of_the_time_left_and_end_with_the_call() -> None:
    outcome = call(TWO, SILENT)
    assert outcome.replicas.began == pytest.approx([0, 0.15, 0.225])
    assert outcome.replicas.timeouts == pytest.approx([0.3, 0.15, 0.075])
    assert outcome.host.counts.retries == 2


def test_another_replica_answers_for_a_silent_one() -> None:
    outcome = call(TWO, SILENT, Says(after_s=0.01))
    np.testing.assert_array_equal(outcome.answer, [[1, 1, 1]])
    assert outcome.took_s == pytest.approx(0.16)


def test_a_slow_replica_may_still_answer_first() -> None:
    outcome = call(TWO, Says(after_s=0.2), SILENT)
    np.testing.assert_array_equal(outcome.answer, [[1, 1, 1]])
    assert outcome.took_s == pytest.approx(0.2)


def test_a_refused_attempt_does_not_end_a_running_one() -> None:
    outcome = call(TWO, Says(after_s=0.28), REFUSED)
    np.testing.assert_array_equal(outcome.answer, [[1, 1, 1]])


@pytest.mark.parametrize("says", [NOT_FOUND, LOADING, REFUSED], ids=["not found", "loading", "refused"])
def test_a_replica_that_refuses_is_passed_over_at_once(says: Says) -> None:
    outcome = call(TWO, says, Says())
    np.testing.assert_array_equal(outcome.answer, [[1, 1, 1]])
    assert outcome.took_s < 0.01


@pytest.mark.parametrize("says", [NOT_FOUND, LOADING], ids=["not found", "loading"])
def test_a_replica_with_the_version_gets_time_to_connect(says: Says) -> None:
    """Until it is connected, all attempts go to the other."""
    outcome = call(TWO, *[says] * 5, Says())
    np.testing.assert_array_equal(outcome.answer, [[1, 1, 1]])
    assert 0.03 < outcome.took_s < TIMEOUT_S


@pytest.mark.parametrize(
    ("says", "most"), [(NOT_FOUND, 10), (LOADING, 10), (REFUSED, 3)], ids=["not found", "loading", "refused"]
)
def test_a_host_that_refuses_is_lost_with_its_reason(says: Says, most: int) -> None:
    outcome = call(TWO, says)
    assert isinstance(outcome.answer, HostUnavailable)
    assert str(outcome.answer).startswith(f"host 0 (m version 1 at {', '.join(TWO)}): {says.details}")
    assert len(outcome.replicas.began) <= most
    assert outcome.took_s < TIMEOUT_S
    assert outcome.host.counts.retries == len(outcome.replicas.began) - 1


def test_a_host_without_a_listener_is_lost_long_before_the_timeout() -> None:
    assert call(TWO, REFUSED).took_s < 0.02


def test_an_invalid_argument_is_not_retried() -> None:
    outcome = call(TWO, Says(grpc.StatusCode.INVALID_ARGUMENT, details="feature 'x': no"))
    assert isinstance(outcome.answer, HostUnavailable)
    assert str(outcome.answer).endswith(": INVALID_ARGUMENT: feature 'x': no")
    assert len(outcome.replicas.began) == 1


def test_each_reason_for_a_lost_host_is_named_once() -> None:
    """A wrong digest does not hide behind a replica where nobody listens, nor behind one that is silent."""
    digest = "expected the bundle with SHA-256 ffff of its manifest, this is eeee"
    wrong = Says(grpc.StatusCode.NOT_FOUND, details=digest)
    outcome = call(TWO, wrong, REFUSED, wrong, REFUSED)
    assert isinstance(outcome.answer, HostUnavailable)
    assert str(outcome.answer).endswith(f"): {digest}; Connection refused")
    assert len(outcome.replicas.began) > 2
    assert str(call(TWO, wrong, SILENT).answer).endswith(f"): {digest}; no answer within 0.3 s")


def test_messages_of_hosts_are_truncated_and_have_no_control_characters() -> None:
    outcome = call(TWO, Says(grpc.StatusCode.INTERNAL, details="\x1b[2J\n\u202e" + 10**5 * "x"))
    said = str(outcome.answer)
    assert said.isprintable()
    assert "INTERNAL: \\x1b[2J\\n\\u202exxx" in said
    assert len(said) < 500


EMPTY = Says(shape=(1, 0, 3), content=b"")


def test_a_check_needs_one_replica_and_requests_all_segments() -> None:
    outcome = call(TWO, NOT_FOUND, EMPTY, do=Host.check)
    assert outcome.answer is None
    _, *parameters = (
        {name: parameter.string_param for name, parameter in request.parameters.items()}
        for request in outcome.replicas.requests
    )
    common = {"bundle": "f" * 64, "part_of": "p/0"}
    assert parameters == [common, {**common, "features": "x,y"}]
    assert isinstance(call(TWO, SILENT, do=Host.check).answer, HostUnavailable)


WIDER = Says(shape=(1, 0, 4), content=b"")


@pytest.mark.parametrize("says", [[WIDER], [EMPTY, WIDER]], ids=["without names", "with names"])
def test_a_check_compares_the_width_with_and_without_names(says: list[Says]) -> None:
    error = call(TWO, *says, do=Host.check).answer
    assert isinstance(error, InternalError)
    assert "expected 'embeddings' of FP32" in str(error)
    assert str(error).endswith(" [1, 0, 3], got 'embeddings' of 'FP32' [1, 0, 4]")


def test_bytes_and_timeouts_are_counted() -> None:
    counts = call(TWO, SILENT, Says(after_s=0.01)).host.counts
    assert counts.bytes_in == 12
    assert counts.timeouts == 1
    assert call(ONE, SILENT).host.counts.timeouts == 1
