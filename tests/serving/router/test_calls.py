"""Calls by the thread that waits, to two real gRPC servers that do as told. Attempts after the first: test_host.py."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from serving.bundle.plan import HostBundle, IdDtype
from serving.bundle.segments import PlannedHost
from serving.client.connection import Connection
from serving.client.retries import Retries
from serving.errors import HostUnavailable
from serving.router.calls import HostCaller, HostCallers, wait_all
from serving.router.host import Host
from serving.router.messages import PartialRequest
from serving.router.replicas import LoopThread
from tests.support.fake_server import FakeServer, serving

REQUEST = PartialRequest(np.array([1, 2]), np.array([2], np.int32), None, None, samples=1, columns=2)
PLANNED = PlannedHost(segments=("x",), columns=2, id_dtype=IdDtype.INT32, is_weighted=False, part_of="p/0")
Does = Callable[[Any], None]


def answers(_: Any) -> None:
    """At once."""


def fails(code: grpc.StatusCode, details: str = "told so") -> Does:
    return lambda context: context.abort(code, details)


def waits_for(event: threading.Event) -> Does:
    def wait(context: Any) -> None:
        event.wait(10)
        if not context.is_active():
            raise RuntimeError("nobody waits any more")

    return wait


@contextmanager
def hosts(
    *behaviours: Sequence[Does], timeout_s: float = 5.0, replicas: int = 2
) -> Iterator[tuple[HostCallers, list[list[FakeServer]]]]:
    """Hosts of the ranks 1, 2, …, whose replicas do as told, each call as the next says; the last goes on."""
    with ExitStack() as stack:
        loop = stack.enter_context(closing(LoopThread()))
        fakes = [replicas_that(does, replicas) for does in behaviours]
        hosts_by_rank = {}
        for rank, some in enumerate(fakes, start=1):
            addresses = [stack.enter_context(serving(fake)) for fake in some]
            connection = Connection(addresses=addresses, timeout_s=timeout_s, retries=Retries(attempts=1))

            async def open_host(connection: Connection = connection) -> Host:
                return Host(HostBundle(0, "m", 1, "f" * 64), PLANNED, connection)

            hosts_by_rank[rank] = loop.start(open_host()).result()
        caller = HostCallers(hosts_by_rank, loop)
        try:
            yield caller, fakes
        finally:
            caller.close()
            for host in hosts_by_rank.values():
                loop.start(host.close()).result()


def replicas_that(does: Sequence[Does], replicas: int) -> list[FakeServer]:
    calls = itertools.count()
    fakes = [FakeServer() for _ in range(replicas)]
    for fake in fakes:
        fake.fail = lambda context: does[min(next(calls), len(does) - 1)](context)
    return fakes


@contextmanager
def host(*does: Does, timeout_s: float = 5.0, replicas: int = 2) -> Iterator[tuple[HostCaller, list[FakeServer]]]:
    """As `hosts`, one."""
    with hosts(does, timeout_s=timeout_s, replicas=replicas) as (caller, (fakes,)):
        yield caller.by_rank[1], fakes


def calls_of(fakes: list[FakeServer]) -> int:
    return sum(len(fake.calls) for fake in fakes)


def test_an_answer_comes_from_the_first_attempt() -> None:
    with host(answers) as (caller, fakes):
        np.testing.assert_array_equal(caller.ask(REQUEST).sums(), [[1, 1]])
        assert calls_of(fakes) == 1
        counts = caller.host.counts
        assert (counts.calls, counts.retries, counts.timeouts, counts.lost, counts.bytes_in) == (1, 0, 0, 0, 8)
        request, _, left_s = next(fake.calls[0] for fake in fakes if fake.calls)
        assert (request.model_name, request.model_version) == ("m", "1")
        assert request.parameters["bundle"].string_param == "f" * 64
        # The wire's form of a deadline rounds it up, by no more than a hundredth.
        assert left_s <= 5.1


def test_another_replica_answers_for_one_that_is_late() -> None:
    late = threading.Event()
    with host(waits_for(late), answers, timeout_s=6.0) as (caller, fakes):
        np.testing.assert_array_equal(caller.ask(REQUEST).sums(), [[1, 1]])
        assert not late.is_set()
        assert calls_of(fakes) == 2
        assert (caller.host.counts.retries, caller.host.counts.timeouts, caller.host.counts.lost) == (1, 1, 0)
        late.set()


def test_a_late_replica_may_still_answer_first() -> None:
    """The other attempt begins, and does not answer; the first does."""
    late, never = threading.Event(), threading.Event()

    def other(context: Any) -> None:
        late.set()
        waits_for(never)(context)

    with host(waits_for(late), other, timeout_s=2.0) as (caller, fakes):
        np.testing.assert_array_equal(caller.ask(REQUEST).sums(), [[1, 1]])
        assert calls_of(fakes) >= 2
        never.set()


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND])
def test_a_replica_that_refuses_is_passed_over(code: grpc.StatusCode) -> None:
    with host(fails(code), answers) as (caller, fakes):
        np.testing.assert_array_equal(caller.ask(REQUEST).sums(), [[1, 1]])
        assert calls_of(fakes) == 2
        assert caller.host.counts.retries == 1


def test_an_invalid_argument_is_not_retried() -> None:
    with host(fails(grpc.StatusCode.INVALID_ARGUMENT)) as (caller, fakes):
        with pytest.raises(HostUnavailable, match=r"^host 0 \(m version 1 at .*\): INVALID_ARGUMENT: told so$"):
            caller.ask(REQUEST).sums()
        assert calls_of(fakes) == 1
        assert (caller.host.counts.lost, caller.host.counts.calls) == (1, 1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_silent_host_is_lost_when_the_time_is_over(replicas: int) -> None:
    never = threading.Event()
    with host(waits_for(never), timeout_s=2.0, replicas=replicas) as (caller, fakes):
        with pytest.raises(HostUnavailable, match=r"no answer within 2 s$"):
            caller.ask(REQUEST).sums()
        assert (calls_of(fakes) > 1) == (replicas > 1)
        assert caller.host.counts.timeouts >= 1
        never.set()


def test_hosts_are_called_again_after_one_was_lost() -> None:
    with host(fails(grpc.StatusCode.INTERNAL), answers) as (caller, _):
        with pytest.raises(HostUnavailable):
            caller.ask(REQUEST).sums()
        np.testing.assert_array_equal(caller.ask(REQUEST).sums(), [[1, 1]])


def test_a_lost_host_does_not_affect_the_answers_of_others() -> None:
    with hosts([answers], [fails(grpc.StatusCode.INTERNAL)]) as (caller, _):
        by_rank = wait_all(caller.ask({2: REQUEST, 1: REQUEST}))
    assert isinstance(by_rank[1], np.ndarray)
    assert by_rank[1].tolist() == [[1, 1]]
    assert isinstance(by_rank[2], HostUnavailable)


def test_hosts_are_waited_for_in_the_order_of_their_last_answers() -> None:
    """Else each would seem as slow as the slowest before it."""
    order = []

    class Call:
        def __init__(self, name: str, expected_s: float) -> None:
            self.name, self.caller, self.expected_s = name, self, expected_s

        def sums(self) -> None:
            order.append(self.name)

    wait_all({0: Call("slow", 0.5), 1: Call("fast", 0.001), 2: Call("middle", 0.01)})  # type: ignore[dict-item]
    assert order == ["fast", "middle", "slow"]


def test_an_answer_already_there_counts_with_the_last_waited_time() -> None:
    with host(answers) as (caller, _):
        caller.took(0.004, waited=True)
        caller.took(0.09, waited=False)
        caller.took(0.001, waited=False)
        assert caller.host.counts.seconds == pytest.approx(0.004 + 0.004 + 0.001)
        assert caller.expected_s < 0.001
        assert [*filter(None, caller.host.counts.by_seconds)] == [1, 2]
        caller.took(0.2, waited=True)
        assert (caller.expected_s, caller.host.counts.seconds) == pytest.approx((0.2, 0.209))


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_answer_counts_while_hosts_waited_for_earlier_are_silent(replicas: int) -> None:
    """Else one host that falls silent would take all others along that were expected later."""
    never = threading.Event()
    silent = [waits_for(never)]
    with hosts(silent, silent, [answers], timeout_s=3.0, replicas=replicas) as (caller, fakes):
        by_rank = wait_all(caller.ask(dict.fromkeys((1, 2, 3), REQUEST)))
        never.set()
    assert [type(by_rank[rank]) for rank in (1, 2)] == [HostUnavailable] * 2
    assert isinstance(by_rank[3], np.ndarray)
    assert by_rank[3].tolist() == [[1, 1]]
    assert calls_of(fakes[2]) == 1
    assert caller.by_rank[3].host.counts.timeouts == 0


def test_several_requests_to_a_host_are_in_flight_at_once() -> None:
    """The host answers none before it has all of them."""
    together = threading.Barrier(3)

    def waits(_: Any) -> None:
        together.wait(10)

    with host(waits) as (caller, fakes):
        calls = [caller.ask(REQUEST) for _ in range(3)]
        answers = [wait_all({1: call}) for call in calls]
    assert [answer[1].tolist() for answer in answers if isinstance(answer[1], np.ndarray)] == [[[1, 1]]] * 3
    assert (calls_of(fakes), caller.host.counts.calls) == (3, 3)
    assert not caller.pending


@pytest.mark.parametrize("replicas", [1, 2])
def test_no_answer_is_lost_after_several_requests_to_a_silent_host(replicas: int) -> None:
    """Each of them takes a thread that reads late answers."""
    never = threading.Event()
    with hosts([waits_for(never)], [answers], timeout_s=3.0, replicas=replicas) as (caller, fakes):
        calls = [caller.ask({1: REQUEST, 2: REQUEST}) for _ in range(4)]
        results = [wait_all(call) for call in calls]
        never.set()
    assert [type(answer[1]) for answer in results] == [HostUnavailable] * 4
    assert all(isinstance(answer[2], np.ndarray) for answer in results)
    assert calls_of(fakes[1]) == 4
