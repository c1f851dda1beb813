"""Reloads of a model with several processes, under load, while its metrics are read."""

import ctypes
import errno
import json
import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from export import ExportConfig
from serving.client import Retries
from serving.model.settings import ServingSettings
from tests.faults.ptrace import CONT, SEIZE, WALL, ptrace
from tests.faults.tools import PATIENCE_S, Oracle, asking, publish, wait_until_all_are_answered
from tests.support.servers import Running, metric, page, running, stubs, tbe_serve

INSTANCES = 4
_PERIOD_S = 0.05


def changes(instances: int) -> tuple[tuple[str, int, int] | None, ...]:
    """What is changed before each reload, in turn: a setting, its value, and what is added to it for each reload.

    None: nothing, but version 1 is loaded. With the first change version 2 is loaded, as config.pbtxt says.
    """
    return (
        None,
        ("--max-busy-ms", 60_000, 1),
        ("--max-busy-ms", 60_000, 1),
        ("--instances", instances - 1, 0),
        ("--instances", instances, 0),
    )


@dataclass
class Reloaded:
    """Figures of `reloaded`.

    Attributes:
        scrapes, bad_scrapes: reads of /metrics, and those without an answer or without the model's counters.
        answers, wrong, lost: requests that were answered, those whose answer was wrong, and requests that failed.
        counted: requests by the metric of them all, tbe_requests_total.
        crashes: tritonservers and processes of a serving model that died.
        errors: names of the errors that the clients of lost requests saw.
        pauses: processes of the model that ended themselves, because the machine gave them no time or set its clock
            (`serving.backend.process_health.Pauses`). Their requests are refused, as they are by any other end.
        ended, crashed_at_end: processes of the model that ended, and those that a signal ended other than SIGKILL, which
            Triton sends to a process that takes long to end.
        grown_bytes: memory of tritonserver, from after the first tenth of the reloads to the end.
    """

    reloads: int
    instances: int
    scrapes: int
    bad_scrapes: int
    answers: int
    wrong: int
    lost: int
    counted: int
    crashes: int
    ended: int
    crashed_at_end: int
    grown_bytes: int
    errors: set[str]
    pauses: int

    def line(self) -> str:
        return (
            f"{self.reloads} reloads of {self.instances} instances under load: {self.answers:,} answers, {self.wrong} wrong, "
            f"{self.lost} lost {sorted(self.errors)}, {self.counted:,} counted; "
            f"{self.scrapes:,} scrapes, {self.bad_scrapes} bad; "
            f"{self.crashes} crashes; {self.ended:,} processes ended, {self.crashed_at_end} of them by a crash, "
            f"{self.pauses} because they were paused; "
            f"tritonserver's memory {self.grown_bytes / 1e6:+.1f} MB"
        )


@dataclass
class _Scraper:
    """Reads the metrics of a server all the time."""

    server: Running
    scrapes: int = 0
    bad: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.stopped.wait(_PERIOD_S):
            self.scrapes += 1
            try:
                self.bad += "tbe_requests_total{" not in page(self.server, "/metrics")
            except OSError:
                self.bad += 1


class _Endings:
    """How processes end: a debugger is told, whoever their parent is.

    Attributes:
        ended: the status of each, as of `os.waitpid`.
    """

    def __init__(self) -> None:
        self.ended: list[int] = []
        self._threads: dict[int, threading.Thread] = {}

    def watch(self, processes: list[psutil.Process]) -> None:
        """Watch these until they end, each once."""
        for process in processes:
            if process.pid not in self._threads:
                thread = threading.Thread(target=self._watch, args=(process.pid,), daemon=True)
                self._threads[process.pid] = thread
                thread.start()

    def wait(self) -> None:
        """Wait until all have ended."""
        for thread in self._threads.values():
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _watch(self, pid: int) -> None:
        """From one thread, as ptrace asks."""
        if ptrace(SEIZE, pid, None, None):
            assert ctypes.get_errno() == errno.ESRCH, os.strerror(ctypes.get_errno())
            return  # it has just ended
        while os.WIFSTOPPED(status := os.waitpid(pid, WALL)[1]):
            is_signal = status >> 16 == 0  # else it only stops where a stopped process would
            ptrace(CONT, pid, None, os.WSTOPSIG(status) if is_signal else None)
        self.ended.append(status)


def reloaded(folder: Path, reloads: int, instances: int = INSTANCES) -> Reloaded:
    """Reload a model again and again: another version, the same with another setting, fewer and more instances.

    The clients do not retry, so that a request that the server loses counts.
    """
    config = ExportConfig(serving=ServingSettings(instances=instances))
    oracle = Oracle(*(publish(folder, seed, config) for seed in (0, 1)))
    model, endings, in_turn = folder / "r" / "m", _Endings(), changes(instances)
    with running(folder / "r") as server:
        assert server.process.stderr is not None
        printed: list[str] = []
        reading = threading.Thread(target=lambda: printed.extend(server.process.stderr or ()), daemon=True)
        reading.start()  # or a full pipe would stop it
        scraper = _Scraper(server)
        scraping = threading.Thread(target=scraper.run)
        scraping.start()
        try:
            with asking(server.grpc, oracle, timeout_s=PATIENCE_S, retries=Retries(attempts=1)) as clients:
                for number in range(reloads):
                    endings.watch(stubs(server.triton, "m"))
                    change = in_turn[number % len(in_turn)]
                    if change is None:
                        _serve("load", "m", "--version", "1", "--url", server.grpc)
                    else:
                        _serve("configure", str(model), change[0], str(change[1] + number * change[2]))
                        _serve("load", "m", "--url", server.grpc)
                    wait_until_all_are_answered(clients)
                    if number == reloads // 10:
                        before = server.triton.memory_info().rss
        finally:
            scraper.stopped.set()
            scraping.join()
        counted = metric(server, "tbe_requests_total", model="m")
        recoveries = json.loads(_serve("status", server.grpc, "--json"))["recoveries"]
        grown = server.triton.memory_info().rss - before
        endings.watch(stubs(server.triton, "m"))
    endings.wait()
    reading.join(PATIENCE_S)
    return Reloaded(
        reloads,
        instances,
        scraper.scrapes,
        scraper.bad,
        sum(client.right + client.wrong for client in clients),
        sum(client.wrong for client in clients),
        sum(client.failed for client in clients),
        round(counted),
        recoveries,
        len(endings.ended),
        sum(os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL for status in endings.ended),
        grown,
        set().union(*(client.errors for client in clients)),
        sum("this process was paused for" in line for line in printed),
    )


def _serve(*arguments: str) -> str:
    done = tbe_serve(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout
