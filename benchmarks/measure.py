"""How we measure: candidates interleaved, call by call, so that noise meets all of them alike."""

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from serving.pins import installed


@dataclass(frozen=True, slots=True)
class Result:
    """One number of a run, in seconds unless `unit` says otherwise, or the ratio of two; `note` says more of it."""

    name: str
    value: float
    is_ratio: bool = False
    unit: str = "s"
    note: str = ""

    @property
    def shown(self) -> str:
        """The number as people read it."""
        if self.is_ratio:
            return f"{self.value:.3f}"
        if self.unit != "s":
            return f"{self.value:,.0f} {self.unit}" if self.unit == "/s" else f"{self.value / 1e6:,.0f} M{self.unit}"
        return f"{1e3 * self.value:.3f} ms" if self.value < 1 else f"{self.value:.2f} s"


def ratio(name: str, value: float) -> Result:
    """A ratio of two results."""
    return Result(name, value, is_ratio=True)


def interleave(
    candidates: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 20
) -> dict[str, np.ndarray[Any, Any]]:
    """Call all candidates in each of `rounds` rounds, in an order that changes; seconds of each call by name."""
    random = np.random.default_rng(0)
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(-warm_up, rounds):
        for name in random.permutation(names).tolist():
            start = time.perf_counter()
            candidates[name]()
            elapsed = time.perf_counter() - start
            if round_ >= 0:
                times[name].append(elapsed)
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
