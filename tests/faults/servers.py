"""Servers that die."""

import ctypes
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import psutil

from tests.faults.ptrace import DETACH, INTERRUPT, SEIZE, WALL, ptrace
from tests.faults.tools import Asked, Seen, asking, published, wait_until_all_are_answered
from tests.support.servers import lives, running, shared_regions, stubs

PAUSE_S = 5.0


@dataclass
class Restarted:
    """Figures of `restarted`.

    Attributes:
        recovered_s: the worst of all clients and times.
        left: how many processes and files in /dev/shm those that were killed left behind.
    """

    times: int
    answers: int
    wrong: int
    errors: set[str]
    recovered_s: float
    left_over: int

    def line(self) -> str:
        return (
            f"server killed and started again under load {self.times} times: {self.answers:,} answers, {self.wrong} "
            f"wrong, all clients answered {self.recovered_s:.1f} s after it was ready, {self.left_over} processes and "
            "regions left behind"
        )


def restarted(folder: Path, times: int, make_oracle: Callable[[Path], Asked] = published) -> Restarted:
    """Kill a server under load and start another on its ports: clients find it by themselves."""
    oracle = make_oracle(folder)
    worst, left_over = 0.0, 0
    # An address of its own, so that nobody else takes the port meanwhile.
    host = str(ip_address("127.1.0.0") + os.getpid())
    with running(folder / "r", "--host", host) as first:
        url = first.grpc
    options = ("--host", host, "--grpc-port", url.rpartition(":")[2], "--no-recover")
    with asking(url, oracle) as clients:
        for _ in range(times):
            with running(folder / "r", *options) as server:
                worst = max(worst, wait_until_all_are_answered(clients))
                time.sleep(0.5)
                stubs, regions = server.triton.children(), shared_regions(server.triton)
                server.triton.kill()
                server.process.wait()
                _, alive = psutil.wait_procs(stubs, timeout=120)
                left_over += sum(map(lives, alive)) + sum(region.exists() for region in regions)
    return Restarted(
        times,
        sum(client.right for client in clients),
        sum(client.wrong for client in clients),
        set().union(*(client.errors for client in clients)),
        worst,
        left_over,
    )


@dataclass
class Mended:
    """Figures of `stub_killed`. `recovered_s`: the longest from the kill until all clients were answered."""

    times: int
    answers: int
    wrong: int
    recovered_s: float

    def line(self) -> str:
        return (
            f"a model's process killed under load {self.times} times: {self.answers:,} answers, {self.wrong} wrong, all "
            f"clients answered again after {self.recovered_s:.1f} s"
        )


def stub_killed(folder: Path, times: int, make_oracle: Callable[[Path], Asked] = published) -> Mended:
    """Kill the process of a model under load: `tbe-serve run` loads it anew."""
    oracle = make_oracle(folder)
    worst = 0.0
    with running(folder / "r") as server, asking(server.grpc, oracle) as clients:
        for _ in range(times):
            wait_until_all_are_answered(clients)
            for child in server.triton.children():
                if child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
            worst = max(worst, wait_until_all_are_answered(clients))
    return Mended(times, sum(client.right for client in clients), sum(client.wrong for client in clients), worst)


@dataclass
class Paused:
    """Figures of `paused`.

    Attributes:
        died: how often tritonserver died of it.
        recovered_s: the longest from the pause until all clients were answered.
        after_s: the same from its end.
    """

    how: str
    times: int
    died: int
    answers: int
    wrong: int
    recovered_s: float
    after_s: float

    def line(self) -> str:
        return (
            f"a model's process paused for {PAUSE_S:g} s under load by {self.how} {self.times} times: tritonserver died "
            f"{self.died} times, {self.answers:,} answers, {self.wrong} wrong, all clients answered again "
            f"{self.recovered_s:.1f} s after it was paused and {self.after_s:.1f} s after the pause"
        )


@contextmanager
def by_sigstop(process: psutil.Process) -> Iterator[None]:
    """A process that is stopped by a signal: `tbe-serve run` sees that."""
    process.suspend()
    yield
    with suppress(psutil.NoSuchProcess):  # it was replaced
        process.resume()


@contextmanager
def by_a_debugger(process: psutil.Process) -> Iterator[None]:
    """A process that does not go on, as where its machine or control group is: nobody can tell from outside."""
    seized = []
    for traced in process.threads():
        if ptrace(SEIZE, traced.id, None, None):
            assert ctypes.get_errno() == errno.ESRCH, os.strerror(ctypes.get_errno())
            continue  # it has ended since they were listed
        assert not ptrace(INTERRUPT, traced.id, None, None)
        os.waitpid(traced.id, WALL)
        seized.append(traced.id)
    assert seized
    yield
    # The main thread is seen to end as the last, and is listed anywhere: psutil sorts by text, "10001" before "9968".
    for thread in sorted(seized, key=lambda thread_id: thread_id == process.pid):
        if ptrace(DETACH, thread, None, None):  # it was killed meanwhile, and stays until its debugger has seen it
            with suppress(ChildProcessError):
                os.waitpid(thread, WALL)


def paused(folder: Path, times: int, by: Callable[[psutil.Process], AbstractContextManager[None]]) -> Paused:
    """Pause the process of a model under load, for longer than tritonserver 2.51 stands."""
    oracle = published(folder)
    worst = worst_after = 0.0
    died = 0
    with running(folder / "r") as server, asking(server.grpc, oracle) as clients:
        for _ in range(times):
            wait_until_all_are_answered(clients)
            triton = server.triton
            (process,) = stubs(triton, "m")
            started = time.monotonic()
            with by(process):
                answered_s = _answered_within(clients, PAUSE_S)
                time.sleep(max(0.0, started + PAUSE_S - time.monotonic()))
            ended = time.monotonic()
            wait_until_all_are_answered(clients)
            worst_after = max(worst_after, time.monotonic() - ended)
            worst = max(worst, time.monotonic() - started if answered_s is None else answered_s)
            died += not triton.is_running()
    return Paused(
        by.__name__.replace("_", " ").removeprefix("by "),
        times,
        died,
        sum(client.right for client in clients),
        sum(client.wrong for client in clients),
        worst,
        worst_after,
    )


def _answered_within(clients: Sequence[Seen], seconds: float) -> float | None:
    """When all clients had another answer to requests that came after a moment, in seconds; None: not within that."""
    started = time.monotonic()
    time.sleep(0.2)  # what was answered before may just come
    before = [client.right for client in clients]
    while any(client.right <= was for client, was in zip(clients, before, strict=True)):
        if time.monotonic() > started + seconds:
            return None
        time.sleep(0.01)
    return time.monotonic() - started
