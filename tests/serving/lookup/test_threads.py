"""Threads that work beside their caller: all work is done once, errors come back, and none outlives its owner."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from serving.lookup.threads import Threads


def lookups() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lookup ")]


def _note(idents: list[int]) -> None:
    idents.append(threading.get_ident())


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("work", [1, 2, 4, 20])
def test_all_work_is_done_once_and_the_first_by_the_caller(count: int, work: int) -> None:
    threads = Threads(count)
    for _ in range(50):
        by_whom: dict[int, list[int]] = {number: [] for number in range(work)}
        threads.run([partial(_note, by_whom[number]) for number in range(work)])
        assert [len(calls) for calls in by_whom.values()] == [1] * work
        assert by_whom[0] == [threading.get_ident()]
    threads.close()


def test_threads_work_concurrently() -> None:
    threads, together = Threads(2), threading.Barrier(3, timeout=30)
    threads.run([together.wait] * 3)  # each waits for the two others
    threads.close()


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_an_error_comes_back_when_all_work_is_done(wrong: int) -> None:
    threads, done = Threads(2), list[int]()

    def do(number: int) -> Callable[[], None]:
        def work() -> None:
            if number == wrong:
                raise ZeroDivisionError(number)
            time.sleep(0.02)  # longer than the one that fails
            done.append(number)

        return work

    for _ in range(3):
        done.clear()
        with pytest.raises(ZeroDivisionError, match=str(wrong)):
            threads.run([do(number) for number in range(4)])
        assert sorted(done) == [number for number in range(4) if number != wrong]
    threads.close()


def test_the_caller_does_all_work_after_the_pool_is_closed() -> None:
    before = len(lookups())
    threads = Threads(3)
    assert len(lookups()) == before + 3
    threads.close()
    threads.close()
    assert len(lookups()) == before
    idents: set[int] = set()
    threads.run([lambda: idents.add(threading.get_ident())] * 3)
    assert idents == {threading.get_ident()}


def test_threads_end_with_their_owner() -> None:
    before = len(lookups())
    threads = Threads(2)
    threads.run([int] * 3)
    del threads
    gc.collect()
    assert len(lookups()) == before


def test_threads_can_be_closed_while_they_work() -> None:
    before = len(lookups())
    for _ in range(20):
        threads, stopped = Threads(2), threading.Event()

        def work(threads: Threads = threads, stopped: threading.Event = stopped) -> None:
            while not stopped.is_set():
                threads.run([int] * 4)

        callers = [threading.Thread(target=work, daemon=True) for _ in range(2)]
        for caller in callers:
            caller.start()
        closing = threading.Thread(target=threads.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive(), "close waits for ever"
        stopped.set()
        for caller in callers:
            caller.join(30)
            assert not caller.is_alive(), "the caller waits for ever"
    assert len(lookups()) == before


FOREVER = """
import threading, time
from functools import partial
from serving.lookup.threads import Threads

threads, working = Threads(2), threading.Event()

def work():
    while True:
        threads.run([partial(time.sleep, 0.0001)] * 4)
        working.set()

threading.Thread(target=work, daemon=True).start()
working.wait()
"""


def test_a_process_can_end_while_threads_work() -> None:
    for _ in range(3):
        subprocess.run([sys.executable, "-c", FOREVER], check=True, timeout=300)
