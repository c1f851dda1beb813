"""Two replicas of each host: what one lacks the other answers, and no answer is of two versions."""

import asyncio
import gc
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager

import pytest

from serving.bundle.opening import open_bundle
from serving.engine import Engine
from serving.errors import HostUnavailable, ServingError
from serving.router.replicas import LoopThread
from serving.router.router_ranks import RouterRanks
from tests.support.deadlines import PATIENT_S
from tests.support.host_faults import (
    EVERY,
    PAIRS,
    Ask,
    Faulty,
    bags,
    by_engine,
    by_router,
    hosts,
    load,
    outcome,
    refusal,
    same,
    silent,
    stopped,
    until,
    until_right_in_a_row,
)
from tests.support.hosts import MODEL
from tests.support.often import BREATH_S
from tests.support.relay import Relay
from tests.support.servers import Running, metric, until_answered


def test_what_still_runs_when_a_loop_closes_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio would say `Task was destroyed but it is pending`, and who waits for it would wait for ever."""
    loop, begun = LoopThread(), threading.Event()

    async def watch() -> None:
        while True:
            begun.set()
            await asyncio.sleep(PATIENT_S)

    watching = loop.start(watch())
    assert begun.wait(PATIENT_S)
    loop.close()
    with pytest.raises(CancelledError):
        watching.result(PATIENT_S)
    gc.collect()
    assert caplog.text == ""


def test_an_engine_that_watches_its_replicas_closes_in_silence(
    served: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine.open(served.versions[1].bundle, hosts(served.addresses))
    ranks = engine.ranks
    assert isinstance(ranks, RouterRanks)
    ranks.watch_replicas(PATIENT_S)
    until(lambda: bool(ranks.replicas), "replicas")
    engine.close()
    gc.collect()
    assert caplog.text == ""


@contextmanager
def load_of(asks: list[Ask], *either: Engine) -> Iterator[list[object]]:
    """Ask all the time, one caller for each. Gets a list of what was refused, or is the answer of no engine."""
    ended, wrong = threading.Event(), list[object]()
    requests = [bags(EVERY, seed) for seed in range(8)]
    answers = [[engine.lookup(each) for engine in either] for each in requests]

    def run(ask: Ask) -> None:
        while not ended.wait(BREATH_S):
            for request, expected in zip(requests, answers, strict=True):
                found = outcome(ask, request)
                if isinstance(found, ServingError) or not any(same(found, each) for each in expected):
                    wrong.append(found)

    threads = [threading.Thread(target=run, args=(ask,)) for ask in asks]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def asked(server: Running) -> float:
    """How many requests a server has answered since it started."""
    return metric(server, "nv_inference_request_success")


def until_asked(server: Running) -> None:
    """Until a server answers requests again."""

    def is_asked() -> bool:
        try:
            before = asked(server)
            return asked(server) > before
        except OSError:  # it is starting
            return False

    until(is_asked, f"{server.grpc} is asked")


@contextmanager
def every_way(served: Faulty, *relays: str, version: int = 1) -> Iterator[list[Ask]]:
    """A router and an engine that reach both hosts at the same servers."""
    bundle, addresses = served.versions[version].bundle, served.at(*relays)
    with by_engine(bundle, addresses) as engine:
        if relays != ("a", "b"):
            yield [engine]
            return
        with by_router(served.router.grpc, PAIRS) as router:
            yield [router, engine]


def test_no_request_fails_when_one_of_two_replicas_is_killed_and_returns(served: Faulty) -> None:
    with every_way(served, "a", "b") as asks, load_of(asks, served.versions[1].one) as wrong:
        until_asked(served.servers["b"])
        served.servers["b"].triton.kill()
        until_asked(served.servers["b"])
    assert wrong == []


@pytest.mark.parametrize("lose", [silent, stopped], ids=lambda lose: lose.__name__)
def test_no_request_fails_once_it_was_noticed_that_a_replica_is_silent(
    served: Faulty, lose: Callable[[Faulty], AbstractContextManager[None]]
) -> None:
    request, one = bags(EVERY, 3), served.versions[1].one
    before = metric(served.router, "tbe_host_timeouts_total", model=PAIRS)
    with every_way(served, "a", "b") as asks, lose(served):
        for ask in asks:
            until_right_in_a_row(ask, request, one.lookup(request), 20)
        with load_of(asks, one) as wrong:
            until_asked(served.servers["a"])
    assert wrong == []
    # Where it is not noticed, every call to it waits in vain: 20 and more.
    assert metric(served.router, "tbe_host_timeouts_total", model=PAIRS) - before <= 12


def test_a_replica_without_the_version_or_with_another_bundle_is_passed_over(served: Faulty) -> None:
    """`c` has neither host: one bundle is of another export, with the same version, the other version 2 alone."""
    one, request = served.versions[1].one, bags(EVERY, 4)
    with every_way(served, "c", "a") as asks:
        for ask in asks:
            for _ in range(100):
                assert same(ask(request), one.lookup(request))
    with pytest.raises(HostUnavailable) as refused_:
        Engine.open(served.versions[1].bundle, hosts(served.at("c")))
    parts = open_bundle(served.versions[1].bundle).manifest.hosts
    said = str(refused_.value).split("; ")
    assert len(said) == 2
    for host, text in zip(parts, said, strict=True):
        assert text.startswith(f"host {host.host} ({host.model} version 1 at {served.relays['c'].address}): ")
    assert f"expected the bundle with SHA-256 {parts[0].manifest} of its manifest" in said[0]
    assert "has no available versions" not in said[1]


def test_a_host_whose_replicas_all_have_another_bundle_is_lost_until_one_has_it_again(served: Faulty) -> None:
    one, request = served.versions[1].one, bags(EVERY, 5)
    with Relay(served.servers["a"].grpc) as relay:
        addresses = {host: [relay.address] for host in (0, 1)}
        bundle = served.versions[1].bundle
        with by_engine(bundle, addresses) as ask:
            assert same(ask(request), one.lookup(request))
            relay.turn(served.servers["c"].grpc)
            said = str(refusal(ask, request))
            for host in open_bundle(bundle).manifest.hosts:
                assert f"host {host.host} ({host.model} version 1 at {relay.address}): " in said
            relay.turn(served.servers["a"].grpc)
            assert same(until_answered(ask, request), one.lookup(request))


def test_a_version_that_a_host_lacks_is_not_loaded_and_the_present_one_goes_on(served: Faulty) -> None:
    one = served.versions[1].one
    lost = f"host {served.lost} ({MODEL}-host-{served.lost} version 2 at {served.relays['b'].address}): "
    with by_router(served.router.grpc) as ask, load_of([ask], one) as wrong:
        done = load(served.router, MODEL, 2)
    assert wrong == []
    assert (done.returncode, done.stdout) == (1, f"{MODEL}: still serves version 1\n")
    assert lost in re.sub(r"\s+", " ", done.stderr)
    assert f"host {1 - served.lost} (" not in done.stderr  # `a` has it


def test_half_a_roll_out_serves_one_version_and_never_a_mix(served: Faulty) -> None:
    """`b` refuses the new version, whose files are damaged there, and is passed over; then back."""
    repository = served.repositories["b"]
    for model in repository.iterdir():
        broken = shutil.copytree(served.repositories["a"] / model.name / "2", model / "2")
        weights = broken / "weights.0.bin"
        weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
        done = load(served.servers["b"], model.name, 2)
        assert (done.returncode, done.stdout) == (1, f"{model.name}: still serves version 1\n")
        assert "weights.0.bin: expected SHA-256" in done.stderr
    request = bags(EVERY, 7)
    engines = [version.one for version in served.versions.values()]
    both = [engine.lookup(request) for engine in engines]
    assert not same(*both)
    with by_router(served.router.grpc, PAIRS) as ask:
        for version in (2, 1):
            with by_router(served.router.grpc, PAIRS) as other, load_of([other], *engines) as wrong:
                assert load(served.router, PAIRS, version).returncode == 0
            assert wrong == []
            for _ in range(10):
                assert same(ask(request), both[version - 1])


def test_no_version_is_switched_while_a_host_is_lost(served: Faulty) -> None:
    """Back neither: hosts are asked first, and waited for. The version that serves goes on."""
    request = bags(EVERY, 8)
    with by_router(served.router.grpc, PAIRS) as ask:
        assert load(served.router, PAIRS, 2).returncode == 0
        with served.relays["a"].refused(), served.relays["b"].refused():
            done = load(served.router, PAIRS, 1)
        assert (done.returncode, done.stdout) == (1, f"{PAIRS}: still serves version 2\n")
        for number in (0, 1):
            assert f"host {number} ({MODEL}-host-{number} version 1 at " in re.sub(r"\s+", " ", done.stderr)
        assert same(until_answered(ask, request), served.versions[2].one.lookup(request))
        assert load(served.router, PAIRS, 1).returncode == 0
        assert same(until_answered(ask, request), served.versions[1].one.lookup(request))
