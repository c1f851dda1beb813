"""Hosts that are lost, and replicas that answer for them: what a router and an engine make of it, of one version alone.

Real servers, and relays that fail as told. They start once for all of it.
"""

import asyncio
import gc
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as triton

from serving.bundle.load import open_bundle
from serving.client import LookupClient
from serving.engine import Engine
from serving.errors import HostUnavailable, ServerUnavailable, ServingError
from serving.router.replicas import LoopThread
from serving.server import Control
from serving.server.run_file import find_run_file
from tests.support.deadlines import PATIENT_S
from tests.support.host_faults import (
    EVERY,
    PAIRS,
    ZEROED,
    Ask,
    Faulty,
    bags,
    by_engine,
    by_router,
    faulty,
    hosts,
    load,
    outcome,
    refusal,
    refused,
    same,
    silent,
    stopped,
    until,
    until_right_in_a_row,
)
from tests.support.hosts import MODEL
from tests.support.long_cases import BREATH_S, one_in
from tests.support.relay import Relay
from tests.support.servers import Running, at_once, metric, stubs, tbe_serve, until_answered


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    with faulty(tmp_path_factory.mktemp("faulty")) as started:
        yield started


def assert_lost(served: Faulty, ask: Ask, seed: int) -> None:
    """What needs the lost host is refused by name, or has zeros; all else is answered."""
    one = served.versions[1].one
    unaffected = bags(served.unaffected, seed)
    assert same(ask(unaffected), one.lookup(unaffected))
    error = refusal(ask, bags(served.refused, seed))
    assert isinstance(error, ServerUnavailable)
    assert error.retryable
    names = sorted(served.tables_of(served.lost) - {*ZEROED})
    assert f"tables {', '.join(map(repr, names))}: host {served.lost} ({MODEL}-host-{served.lost} version 1" in str(
        error
    )
    assert served.relays["b"].address in str(error)
    mixed = bags(["b", "s", *served.unaffected], seed)
    answer, expected = ask(mixed), one.lookup(mixed)
    assert not answer["b"].any()
    assert expected["b"].any()
    assert same(
        *({name: rows for name, rows in outputs.items() if name not in "bs"} for outputs in (answer, expected))
    )


@pytest.mark.promise(
    "Requests that need a lost host are refused with its name and its tables, and all others are answered"
)
@pytest.mark.parametrize("lose", one_in(3, [refused, silent, stopped]), ids=lambda lose: lose.__name__)
def test_a_lost_host_is_named_and_other_requests_are_answered(
    served: Faulty, lose: Callable[[Faulty], AbstractContextManager[None]]
) -> None:
    version = served.versions[1]
    with ExitStack() as stack:
        asks = [
            stack.enter_context(by_router(served.router.grpc)),
            stack.enter_context(by_engine(version.bundle, served.addresses)),
        ]
        with lose(served):
            done = at_once([partial(assert_lost, served, ask, seed) for seed, ask in enumerate(asks)])
            assert done == [None] * len(asks), done
        every = bags(EVERY, 9)
        for ask in asks:  # answered again, without a restart of the router
            assert same(until_answered(ask, every), version.one.lookup(every))


@pytest.mark.promise(
    "Requests that need a lost host are refused with its name and its tables, and all others are answered"
)
def test_requests_of_one_handover_fail_separately(served: Faulty) -> None:
    unaffected = [bags(served.unaffected, seed) for seed in range(12)]
    lost = [bags(served.refused, seed) for seed in range(12)]
    before = metric(served.router, "tbe_calls_total", model=MODEL)
    with ExitStack() as stack, silent(served):
        asks = [stack.enter_context(by_router(served.router.grpc)) for _ in range(24)]
        calls: list[Callable[[], Any]] = [
            partial(ask, request) for ask, request in zip(asks, [*unaffected, *lost], strict=True)
        ]
        answers = at_once(calls)
        assert metric(served.router, "tbe_calls_total", model=MODEL) - before < 24
    for request, answer in zip(unaffected, answers, strict=False):
        assert same(answer, served.versions[1].one.lookup(request))
    assert [type(answer) for answer in answers[12:]] == [ServerUnavailable] * 12
    with by_router(served.router.grpc) as ask:
        until_answered(ask, lost[0])


@pytest.mark.promise(
    "With `--on-shard-failure TABLE=zero`, a lost host's rows of that table are zeros and are counted"
)
def test_zeros_are_counted_by_table_and_means_count_missing_ids(served: Faulty) -> None:
    """A mean is what is left of the sum, over all ids of the bag."""
    one = served.versions[1].one
    (shard,) = (shard for shard in one.bundle.manifest.plan.shards_by_table["shade"] if shard.rank != rank_of(served))
    local_rows = list(range(shard.rows[0], shard.rows[0] + 3))
    there = [row for row in range(95) if not shard.rows[0] <= row < shard.rows[1]][:2]
    expected = one.lookup({"s": [local_rows]})["s"] * np.float32(3) / np.float32(5)
    before = [metric(served.router, "tbe_zeroed_total", model=MODEL, table=table) for table in ZEROED]
    with by_router(served.router.grpc) as ask:
        with refused(served):
            answer = ask({"s": [local_rows + there, local_rows], "b": [[], []]})
            found_too = ask({"s": [local_rows], "b": [[1]]})
        np.testing.assert_allclose(answer["s"][0], expected[0], rtol=1e-6)
        assert same({"s": answer["s"][1:]}, one.lookup({"s": [local_rows]}))  # needs nothing that is lost
        assert same({"s": found_too["s"]}, one.lookup({"s": [local_rows]}))
        assert not found_too["b"].any()
        after = [metric(served.router, "tbe_zeroed_total", model=MODEL, table=table) for table in ZEROED]
        assert [now - was for now, was in zip(after, before, strict=True)] == [1, 1]
        until_answered(ask, bags(served.refused, 0))


def rank_of(served: Faulty) -> int:
    ranks = served.versions[1].one.bundle.manifest.plan.ranks
    (rank,) = (number for number, rank in enumerate(ranks) if rank.host == served.lost)
    return rank


def control_of(address: str) -> Control:
    run = find_run_file(address)
    assert run is not None
    return Control(address=run.control, key=run.key, timeout_s=30)


def ready(server: Running, query: str = "") -> str:
    with urlopen(f"{server.operations}/readyz{query}", timeout=30) as response:
        said: str = response.read().decode()
        return said


@pytest.mark.promise("A router with a lost host is unhealthy but live, and is not restarted as hung")
def test_a_router_with_a_lost_host_is_alive_but_degraded(served: Faulty) -> None:
    """What tells `tbe-serve run` that a model hangs is answered, whoever else is lost."""
    nothing = {
        "inputs": [
            {"name": name, "datatype": dtype, "shape": [1, 0], "data": []}
            for name, dtype in (("values", "INT64"), ("lengths", "INT32"))
        ]
    }
    control, processes = control_of(served.router.grpc), stubs(served.router.triton, MODEL)
    with silent(served), triton.InferenceServerClient(served.router.grpc) as triton_client:
        before = control.answered()[(MODEL, 1)]
        control.infer(MODEL, 1, nothing)
        until(lambda: control.answered()[(MODEL, 1)] == before + 1, "it is counted")
        assert triton_client.is_server_live()
        assert triton_client.is_model_ready(MODEL)
        with LookupClient(served.router.grpc, MODEL, 20) as client:
            unaffected = bags(served.unaffected, 3)
            client.lookup(unaffected)  # asks hosts that answer
            with pytest.raises(ServerUnavailable, match=f"host {served.lost} "):
                client.lookup(unaffected, every_host=True)
        done = tbe_serve("health", MODEL, "--url", served.router.grpc, "--timeout-s", "20")
        assert done.returncode == 1
        assert f"host {served.lost} ({MODEL}-host-{served.lost}" in re.sub(r"\s+", " ", done.stderr)
        assert ready(served.router) == "ready\n"  # for what needs no lost host
        lost = f'lost: host="{served.lost}",model="{MODEL}",version="1"\n'
        until(lambda: ready(served.router, "?verbose") == f"ready\n{lost}", "the host is named")
    with by_router(served.router.grpc) as ask:
        until_answered(ask, bags(served.refused, 0))
    done = tbe_serve("health", MODEL, "--url", served.router.grpc, "--timeout-s", "20")
    assert done.returncode == 0, done.stderr
    assert stubs(served.router.triton, MODEL) == processes
    assert metric(served.router, "tbe_recoveries_total", model=MODEL) == 0


@pytest.mark.promise("A host that returns is used again without a restart of the router")
def test_a_restarted_host_answers_without_a_restart_of_the_router(served: Faulty) -> None:
    request = bags(EVERY, 1)
    expected = served.versions[1].one.lookup(request)
    router = served.router.triton
    with by_router(served.router.grpc) as ask:
        assert same(ask(request), expected)
        served.servers["b"].triton.kill()
        until(lambda: not isinstance(outcome(ask, request), ServingError), "answers")
        assert same(ask(request), expected)
    assert served.router.triton == router


@pytest.mark.promise("A router that died is restarted although a host is lost")
@pytest.mark.parametrize("kill", one_in(2, ["tritonserver", "model"]))
def test_a_killed_router_restarts_while_a_host_is_lost(served: Faulty, kill: str) -> None:
    one = served.versions[1].one
    unaffected, every = bags(served.unaffected, 8), bags(EVERY, 8)
    triton_ = served.router.triton
    with by_router(served.router.grpc) as ask:
        with refused(served):
            for process in stubs(triton_, MODEL) if kill == "model" else [triton_]:
                process.kill()
            assert same(until_answered(ask, unaffected), one.lookup(unaffected))
            assert f"host {served.lost} (" in str(refusal(ask, every))
        assert same(until_answered(ask, every), one.lookup(every))
    with by_router(served.router.grpc, PAIRS) as ask:  # the tests below use it, and it is loaded last
        assert same(until_answered(ask, every), one.lookup(every))


# --- two replicas of each host: what one lacks the other answers


def test_calls_still_running_when_a_loop_closes_are_cancelled(caplog: pytest.LogCaptureFixture) -> None:
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


def test_an_engine_that_watches_replicas_closes_silently(served: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine.open(served.versions[1].bundle, hosts(served.addresses))
    ranks = engine.ranks
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
    answers = [[engine.lookup(request) for engine in either] for request in requests]

    def run(ask: Ask) -> None:
        while not ended.wait(BREATH_S):
            for request, expected in zip(requests, answers, strict=True):
                answer = outcome(ask, request)
                if isinstance(answer, ServingError) or not any(same(answer, right) for right in expected):
                    wrong.append(answer)

    threads = [threading.Thread(target=run, args=(ask,)) for ask in asks]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def request_count(server: Running) -> float:
    """How many requests a server has answered since it started."""
    return metric(server, "nv_inference_request_success")


def until_asked(server: Running) -> None:
    """Until a server answers requests again."""

    def is_asked() -> bool:
        try:
            before = request_count(server)
            return request_count(server) > before
        except OSError:  # it is starting
            return False

    until(is_asked, f"{server.grpc} is asked")


@contextmanager
def every_way(served: Faulty, *relays: str, version: int = 1) -> Iterator[list[Ask]]:
    """A router and an engine that reach both hosts at the same servers."""
    bundle, addresses = served.versions[version].bundle, served.addresses_of(*relays)
    with by_engine(bundle, addresses) as engine:
        if relays != ("a", "b"):
            yield [engine]
            return
        with by_router(served.router.grpc, PAIRS) as router:
            yield [router, engine]


@pytest.mark.promise("No request fails when one of two replicas is killed and restarted")
def test_no_request_fails_when_one_of_two_replicas_restarts(served: Faulty) -> None:
    with every_way(served, "a", "b") as asks, load_of(asks, served.versions[1].one) as wrong:
        until_asked(served.servers["b"])
        served.servers["b"].triton.kill()
        until_asked(served.servers["b"])
    assert wrong == []


@pytest.mark.promise("No request fails once a silent replica has been noticed")
@pytest.mark.parametrize("lose", one_in(2, [silent, stopped]), ids=lambda lose: lose.__name__)
def test_no_request_fails_after_a_replica_is_known_to_be_silent(
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


@pytest.mark.promise("A replica without the version, or with another bundle of it, is skipped")
def test_a_replica_without_the_version_or_bundle_is_skipped(served: Faulty) -> None:
    """`c` has neither host: one bundle is of another export, with the same version, the other version 2 alone."""
    one, request = served.versions[1].one, bags(EVERY, 4)
    with every_way(served, "c", "a") as asks:
        for ask in asks:
            for _ in range(100):
                assert same(ask(request), one.lookup(request))
    with pytest.raises(HostUnavailable) as refused_:
        Engine.open(served.versions[1].bundle, hosts(served.addresses_of("c")))
    parts = open_bundle(served.versions[1].bundle).manifest.hosts
    said = str(refused_.value).split("; ")
    assert len(said) == 2
    for host, text in zip(parts, said, strict=True):
        assert text.startswith(f"host {host.host} ({host.model} version 1 at {served.relays['c'].address}): ")
    assert f"expected the bundle with SHA-256 {parts[0].manifest} of its manifest" in said[0]
    assert "has no available versions" not in said[1]


@pytest.mark.promise("A replica without the version, or with another bundle of it, is skipped")
def test_a_host_is_lost_while_all_its_replicas_have_another_bundle(served: Faulty) -> None:
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


@pytest.mark.promise("A version that a host lacks is refused with the host's name, and the serving version continues")
def test_a_version_that_a_host_lacks_is_not_loaded(served: Faulty) -> None:
    one = served.versions[1].one
    lost = f"host {served.lost} ({MODEL}-host-{served.lost} version 2 at {served.relays['b'].address}): "
    with by_router(served.router.grpc) as ask, load_of([ask], one) as wrong:
        done = load(served.router, MODEL, 2)
    assert wrong == []
    assert (done.returncode, done.stdout) == (1, f"{MODEL}: still serves version 1\n")
    assert lost in re.sub(r"\s+", " ", done.stderr)
    assert f"host {1 - served.lost} (" not in done.stderr  # `a` has it


@pytest.mark.promise("During a roll-out each answer is computed by the one version that it names")
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


@pytest.mark.promise("A router switches no version while a host is lost")
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
