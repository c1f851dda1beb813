"""Servers that die."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import psutil

from tests.faults.tools import Asked, asking, published, wait_until_all_are_answered
from tests.support.servers import lives, running, shared_regions


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
    left: int

    def line(self) -> str:
        return (
            f"server killed and started again under load {self.times} times: {self.answers:,} answers, {self.wrong} "
            f"wrong, all clients answered {self.recovered_s:.1f} s after it was ready, {self.left} processes and "
            "regions left behind"
        )


def restarted(folder: Path, times: int, asked: Callable[[Path], Asked] = published) -> Restarted:
    """Kill a server under load and start another on its ports: clients find it by themselves."""
    oracle = asked(folder)
    worst, left = 0.0, 0
    # An address of its own, so that nobody else takes the port meanwhile.
    host = str(ip_address("127.1.0.0") + os.getpid())
    with running(folder / "r", "--host", host) as first:
        url = first.grpc
    options = ("--host", host, "--grpc-port", url.rpartition(":")[2], "--no-recover")
    with asking(url, oracle) as seen:
        for _ in range(times):
            with running(folder / "r", *options) as server:
                worst = max(worst, wait_until_all_are_answered(seen))
                time.sleep(0.5)
                stubs, regions = server.triton.children(), shared_regions(server.triton)
                server.triton.kill()
                server.process.wait()
                _, alive = psutil.wait_procs(stubs, timeout=120)
                left += sum(map(lives, alive)) + sum(region.exists() for region in regions)
    return Restarted(
        times,
        sum(each.right for each in seen),
        sum(each.wrong for each in seen),
        set().union(*(each.errors for each in seen)),
        worst,
        left,
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


def stub_killed(folder: Path, times: int, asked: Callable[[Path], Asked] = published) -> Mended:
    """Kill the process of a model under load: `tbe-serve run` loads it anew."""
    oracle = asked(folder)
    worst = 0.0
    with running(folder / "r") as server, asking(server.grpc, oracle) as seen:
        for _ in range(times):
            wait_until_all_are_answered(seen)
            for child in server.triton.children():
                if child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
            worst = max(worst, wait_until_all_are_answered(seen))
    return Mended(times, sum(each.right for each in seen), sum(each.wrong for each in seen), worst)
