"""How we measure: candidates interleaved, call by call, so that noise meets all of them alike."""

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from serving.pins import installed

# How many requests candidates are apart that go through the same ones.
_APART = 3


@dataclass(frozen=True, slots=True)
class Result:
    """One number of a run, in seconds unless `unit` says otherwise, or the ratio of two; `note` says more of it.

    `spread` are the least and the largest of several repeats, of which `value` is the median.
    """

    name: str
    value: float
    is_ratio: bool = False
    unit: str = "s"
    note: str = ""
    spread: tuple[float, float] | None = None

    @property
    def shown(self) -> str:
        """The number as people read it."""
        if self.is_ratio:
            return f"{self.value:.3f}" + ("" if self.spread is None else " ({:.3f} to {:.3f})".format(*self.spread))
        if self.unit != "s":
            return f"{self.value:,.0f} {self.unit}" if self.unit == "/s" else f"{self.value / 1e6:,.0f} M{self.unit}"
        return f"{1e3 * self.value:.3f} ms" if self.value < 1 else f"{self.value:.2f} s"


def ratio(name: str, value: float, spread: tuple[float, float] | None = None) -> Result:
    """A ratio of two results."""
    return Result(name, value, is_ratio=True, spread=spread)


def ratio_of(name: str, repeats: Iterable[float]) -> Result:
    """The median of a ratio that was measured several times, with its spread."""
    ordered = sorted(repeats)
    return ratio(name, ordered[len(ordered) // 2], (ordered[0], ordered[-1]))


def interleave(
    candidates: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 20, pause_s: float = 0.0
) -> dict[str, np.ndarray[Any, Any]]:
    """Call all candidates in each of `rounds` rounds; seconds of each call by name.

    Candidates that go through the same requests have different ones in a round, and each comes first as often as any
    other. Who asks for what another one has just asked for finds the ids in the processor's cache: of two equal
    engines, the same one took 0.8 of the time of the other.

    Nobody is asked for `pause_s` before each call: after a few milliseconds code and data are no longer near.
    """
    random = np.random.default_rng(0)
    names = list(candidates)
    for position, name in enumerate(names):
        for _ in range(warm_up + _APART * position):
            candidates[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    orders: list[list[str]] = []
    for _ in range(rounds):
        if not orders:
            order = random.permutation(names).tolist()
            orders = [order[first:] + order[:first] for first in range(len(order))]
        for name in orders.pop():
            if pause_s:
                time.sleep(pause_s)
            start = time.perf_counter()
            candidates[name]()
            times[name].append(time.perf_counter() - start)
    return {name: np.array(seconds) for name, seconds in times.items()}


def p50(seconds: np.ndarray[Any, Any]) -> float:
    """The median."""
    return float(np.percentile(seconds, 50))


def machine() -> dict[str, Any]:
    """Where and with what a run was made."""
    cpu = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu[0] if cpu else platform.processor(), "cores": os.cpu_count(), "memory_bytes": memory},
        "versions": {"python": platform.python_version(), **installed()},
    }
