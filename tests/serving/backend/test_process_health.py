"""A model's process that stood still gives no answer, which tritonserver would give to another caller."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from export import export_model
from serving.backend.process_health import _LONGEST_S, Pauses, paused_s
from serving.client import LookupClient
from serving.engine import Engine
from serving.errors import ServingError
from serving.triton.stubs import living_stubs
from tests.faults.servers import by_a_debugger
from tests.faults.tools import PATIENCE_S
from tests.support.long_cases import one_in
from tests.support.models import SUM, collection, random_bags
from tests.support.servers import add_gate, entered, gate_closed, gate_of, running, stubs, wait_for_execution


@pytest.mark.promise("No caller receives another caller's answer after a process was paused or its clock set forward")
@pytest.mark.parametrize("answers", one_in(2, [True, False]), ids=["that_answers", "that_is_idle"])
def test_no_answer_reaches_another_request_after_a_pause(tmp_path: Path, answers: bool) -> None:
    """All are as large: the answer to another request would be taken for one's own."""
    bundle = export_model(collection(SUM), tmp_path / "r", "m")
    random = np.random.default_rng(0)
    requests = [dict(random_bags(random, SUM, 3)) for _ in range(6)]
    engine = Engine.open(bundle)
    expected = [engine.lookup(request) for request in requests]
    add_gate(bundle)

    def is_right(number: int) -> bool | None:
        with LookupClient(server.grpc, "m", timeout_s=20) as client:
            try:
                answer = client.lookup(requests[number])
            except ServingError:
                return None
        return all(np.array_equal(answer[name], rows) for name, rows in expected[number].items())

    with running(tmp_path / "r") as server, ThreadPoolExecutor(6) as pool:
        (process,) = stubs(server.triton, "m")
        with gate_closed(bundle):
            first = pool.submit(is_right, 0) if answers else None
            while answers and not entered(bundle).exists():
                time.sleep(0.01)
            with by_a_debugger(process):
                lookups = [first] if first else [pool.submit(is_right, 0)]
                for number in range(1, 6):  # Triton gives one up every second, and hands over the next
                    time.sleep(0.5)
                    lookups.append(pool.submit(is_right, number))
                gate_of(bundle).unlink()
            assert False not in [lookup.result() for lookup in lookups]
            gate_of(bundle).touch()
        process.wait(60)  # it ended itself, or its tritonserver did
        until = time.monotonic() + PATIENCE_S
        while not (right := is_right(0)) and time.monotonic() < until:
            assert right is not False
        assert right


def test_an_answering_process_is_busy_until_it_has_answered(tmp_path: Path) -> None:
    bundle = export_model(collection(SUM), tmp_path / "r", "m")
    request = dict(random_bags(np.random.default_rng(0), SUM, 3))
    add_gate(bundle)
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", PATIENCE_S) as client:
        (stub,) = living_stubs(server.triton.pid)
        client.lookup(request)
        busy = [stub.is_busy()]
        with gate_closed(bundle), ThreadPoolExecutor(1) as pool:
            pending = pool.submit(client.lookup, request)
            wait_for_execution(bundle)
            busy.append(stub.is_busy())
            gate_of(bundle).unlink()
            pending.result()
            busy.append(stub.is_busy())
            gate_of(bundle).touch()
    assert busy == [False, True, False]
    assert not stub.is_busy()


@pytest.mark.promise("No caller receives another caller's answer after a process was paused or its clock set forward")
def test_a_process_ends_after_a_clock_jump_forward_but_not_backward() -> None:
    """Triton measures its second by that clock. A clock of our own: no load makes it go on."""
    now, ended = [1000.0], threading.Event()
    pauses = Pauses(lambda: now[0], lambda _: ended.set())
    pauses.start()
    for now[0] in chain([1000.1] * 3, [500.0] * 3, [500.2] * 3):
        time.sleep(0.25)
        pauses.check()
    assert not ended.is_set()
    now[0] += 10.0
    assert ended.wait(60)
    pauses.check()
    pauses.stop()


def test_a_check_waits_until_a_pause_is_diagnosed() -> None:
    now, diagnosed = [0.0], threading.Event()

    def end(_: str) -> None:
        diagnosed.wait(60)

    pauses = Pauses(lambda: now[0], end)
    pauses.start()
    now[0] = 5.0
    checking = threading.Thread(target=pauses.check)
    checking.start()
    checking.join(1.0)
    assert checking.is_alive()
    diagnosed.set()
    checking.join(60)
    assert not checking.is_alive()
    pauses.stop()


@pytest.mark.parametrize(
    ("elapsed_s", "waits", "ends"),
    [(0.25, 1, False), (0.89, 1, True), (0.72, 0, True), (1.4, 1, True), (1.4, 200, False), (3.0, 200, False)],
)
def test_waiting_for_the_gil_does_not_count_as_a_pause(elapsed_s: float, waits: int, ends: bool) -> None:
    """A pause of 0.7 s is the shortest for which Triton gives up; 200 waits of 5 ms are one second."""
    assert (paused_s(elapsed_s, waits) > _LONGEST_S) is ends
