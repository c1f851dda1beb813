"""Hosts that are lost, and what a router and an engine make of it. Real servers, and a relay that fails as told."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as triton

from serving.client import LookupClient
from serving.errors import ServerUnavailable, ServingError
from serving.server import Control
from serving.server.launch.run_file import find_run_file
from tests.support.host_faults import (
    EVERY,
    ZEROED,
    Ask,
    Faulty,
    bags,
    by_engine,
    by_router,
    outcome,
    refusal,
    refused,
    same,
    silent,
    stopped,
    until,
)
from tests.support.hosts import MODEL
from tests.support.often import one_in
from tests.support.servers import Running, at_once, metric, stubs, tbe_serve, until_answered


def assert_lost(served: Faulty, ask: Ask, seed: int) -> None:
    """What needs the lost host is refused by name, or has zeros; all else is answered."""
    one = served.versions[1].one
    kept = bags(served.kept, seed)
    assert same(ask(kept), one.lookup(kept))
    error = refusal(ask, bags(served.refused, seed))
    assert isinstance(error, ServerUnavailable)
    assert error.retryable
    names = sorted(served.tables_of(served.lost) - {*ZEROED})
    assert f"tables {', '.join(map(repr, names))}: host {served.lost} ({MODEL}-host-{served.lost} version 1" in str(
        error
    )
    assert served.relays["b"].address in str(error)
    mixed = bags(["b", "s", *served.kept], seed)
    found, expected = ask(mixed), one.lookup(mixed)
    assert not found["b"].any()
    assert expected["b"].any()
    assert same(*({name: rows for name, rows in each.items() if name not in "bs"} for each in (found, expected)))


@pytest.mark.parametrize("lose", one_in(3, [refused, silent, stopped]), ids=lambda lose: lose.__name__)
def test_a_lost_host_is_named_and_what_does_not_need_it_is_answered(
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


def test_requests_of_one_handover_fail_alone(served: Faulty) -> None:
    kept = [bags(served.kept, seed) for seed in range(12)]
    lost = [bags(served.refused, seed) for seed in range(12)]
    before = metric(served.router, "tbe_calls_total", model=MODEL)
    with ExitStack() as stack, silent(served):
        asks = [stack.enter_context(by_router(served.router.grpc)) for _ in range(24)]
        calls: list[Callable[[], Any]] = [partial(ask, each) for ask, each in zip(asks, [*kept, *lost], strict=True)]
        found = at_once(calls)
        assert metric(served.router, "tbe_calls_total", model=MODEL) - before < 24
    for request, answer in zip(kept, found, strict=False):
        assert same(answer, served.versions[1].one.lookup(request))
    assert [type(each) for each in found[12:]] == [ServerUnavailable] * 12
    with by_router(served.router.grpc) as ask:
        until_answered(ask, lost[0])


def test_zeros_are_counted_by_table_and_a_mean_counts_the_ids_that_are_missing(served: Faulty) -> None:
    """A mean is what is left of the sum, over all ids of the bag."""
    one = served.versions[1].one
    (kept,) = (each for each in one.bundle.manifest.plan.shards_by_table["shade"] if each.rank != rank_of(served))
    here = list(range(kept.rows[0], kept.rows[0] + 3))
    there = [row for row in range(95) if not kept.rows[0] <= row < kept.rows[1]][:2]
    expected = one.lookup({"s": [here]})["s"] * np.float32(3) / np.float32(5)
    before = [metric(served.router, "tbe_zeroed_total", model=MODEL, table=table) for table in ZEROED]
    with by_router(served.router.grpc) as ask:
        with refused(served):
            found = ask({"s": [here + there, here], "b": [[], []]})
            found_too = ask({"s": [here], "b": [[1]]})
        np.testing.assert_allclose(found["s"][0], expected[0], rtol=1e-6)
        assert same({"s": found["s"][1:]}, one.lookup({"s": [here]}))  # needs nothing that is lost
        assert same({"s": found_too["s"]}, one.lookup({"s": [here]}))
        assert not found_too["b"].any()
        after = [metric(served.router, "tbe_zeroed_total", model=MODEL, table=table) for table in ZEROED]
        assert [now - was for now, was in zip(after, before, strict=True)] == [1, 1]
        until_answered(ask, bags(served.refused, 0))


def rank_of(served: Faulty) -> int:
    ranks = served.versions[1].one.bundle.manifest.plan.ranks
    (rank,) = (number for number, each in enumerate(ranks) if each.host == served.lost)
    return rank


def control_of(address: str) -> Control:
    run = find_run_file(address)
    assert run is not None
    return Control(address=run.control, key=run.key, timeout_s=30)


def ready(server: Running, query: str = "") -> str:
    with urlopen(f"{server.operations}/readyz{query}", timeout=30) as response:
        said: str = response.read().decode()
        return said


def test_a_router_is_alive_but_not_well_while_a_host_is_lost(served: Faulty) -> None:
    """What tells `tbe-serve run` that a model hangs is answered, whoever else is lost."""
    nothing = {
        "inputs": [
            {"name": name, "datatype": dtype, "shape": [1, 0], "data": []}
            for name, dtype in (("values", "INT64"), ("lengths", "INT32"))
        ]
    }
    control, processes = control_of(served.router.grpc), stubs(served.router.triton, MODEL)
    with silent(served), triton.InferenceServerClient(served.router.grpc) as theirs:
        before = control.answered()[(MODEL, 1)]
        control.infer(MODEL, 1, nothing)
        until(lambda: control.answered()[(MODEL, 1)] == before + 1, "it is counted")
        assert theirs.is_server_live()
        assert theirs.is_model_ready(MODEL)
        with LookupClient(served.router.grpc, MODEL, 20) as client:
            kept = bags(served.kept, 3)
            client.lookup(kept)  # asks hosts that answer
            with pytest.raises(ServerUnavailable, match=f"host {served.lost} "):
                client.lookup(kept, every_host=True)
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


def test_a_host_that_was_killed_answers_again_without_a_restart_of_the_router(served: Faulty) -> None:
    request = bags(EVERY, 1)
    expected = served.versions[1].one.lookup(request)
    router = served.router.triton
    with by_router(served.router.grpc) as ask:
        assert same(ask(request), expected)
        served.servers["b"].triton.kill()
        until(lambda: not isinstance(outcome(ask, request), ServingError), "answers")
        assert same(ask(request), expected)
    assert served.router.triton == router


@pytest.mark.parametrize("kill", one_in(2, ["tritonserver", "model"]))
def test_a_router_that_was_killed_is_started_again_even_while_a_host_is_lost(served: Faulty, kill: str) -> None:
    one = served.versions[1].one
    kept, every = bags(served.kept, 8), bags(EVERY, 8)
    triton_ = served.router.triton
    with by_router(served.router.grpc) as ask:
        with refused(served):
            for process in stubs(triton_, MODEL) if kill == "model" else [triton_]:
                process.kill()
            assert same(until_answered(ask, kept), one.lookup(kept))
            assert f"host {served.lost} (" in str(refusal(ask, every))
        assert same(until_answered(ask, every), one.lookup(every))
