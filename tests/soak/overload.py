"""More load than there is capacity: some are refused soon, the others are answered soon, and then all is as before."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serving.bench.generator import Repeat
from serving.model.settings import ServingSettings
from tests.soak.served import serving

TIMES = 3
BUSY_MS = 40
# A request of 160 ids takes 4 ms, and three are answered together.
SAMPLES, POOLING_FACTOR, S_PER_ID, CALL_IDS = 2, 10, 25e-6, 480
_WINDOW_S, _WINDOWS = 0.5, 8


@dataclass
class Overloaded:
    """What was seen.

    Attributes:
        usual_p99_s: of answers at 80 % of capacity.
        answers_per_s, p99_s: of answers under too much load.
        refused: how many of them were refused, and `refused_p99_s`, after how long.
        unexpected: what else failed, by kind.
        recovered_s: from the end of that load until a window of half a second is as usual; None if none was.
    """

    capacity_per_s: float
    usual_p99_s: float
    answers_per_s: float
    p99_s: float
    refused: int
    refused_p99_s: float
    unexpected: dict[str, int]
    recovered_s: float | None
    checked: int
    wrong: list[str]

    def line(self) -> str:
        """All in one."""
        recovered = "not again" if self.recovered_s is None else f"within {self.recovered_s:g} s"
        return (
            f"{TIMES} × a capacity of {self.capacity_per_s:.0f}/s: {self.answers_per_s:.0f} answers/s, {self.checked:,} "
            f"checked, {len(self.wrong)} wrong, p99 {1e3 * self.p99_s:.0f} ms where it was {1e3 * self.usual_p99_s:.0f} "
            f"({self.p99_s / self.usual_p99_s:.1f}×); {self.refused:,} refused, p99 {1e3 * self.refused_p99_s:.0f} ms; "
            f"{sum(self.unexpected.values())} failed otherwise; as before {recovered}"
        )


def overload(folder: Path, seconds: float) -> Overloaded:
    """Ask for 80 % of what the server can, then for three times of it, then for 80 % again."""
    settings = ServingSettings(max_busy_ms=BUSY_MS, max_call_ids=CALL_IDS)
    with serving(folder, settings, SAMPLES, POOLING_FACTOR, S_PER_ID) as served:
        capacity = served.capacity_per_s(3.0)
        (usual,) = served.load(rate=0.8 * capacity, seconds=seconds)
        (much,) = served.load(rate=TIMES * capacity, seconds=seconds)
        after = served.load(rate=0.8 * capacity, seconds=_WINDOW_S, repeats=_WINDOWS)
    usual_p99_s = _p99_s(usual.latencies_s)
    as_usual = [not run.errors and _p99_s(run.latencies_s) <= 2 * usual_p99_s for run in after]
    errors = dict(much.errors)
    return Overloaded(
        capacity_per_s=capacity,
        usual_p99_s=usual_p99_s,
        answers_per_s=len(much.latencies_s) / much.seconds,
        p99_s=_p99_s(much.latencies_s),
        refused=errors.pop("ServerUnavailable", 0),
        refused_p99_s=_p99_s(much.errors_s),
        unexpected=errors,
        recovered_s=_WINDOW_S * (as_usual.index(True) + 1) if True in as_usual else None,
        checked=sum(run.checked for run in (usual, much, *after)),
        wrong=_wrong(usual, much, *after),
    )


def _p99_s(latencies_s: list[float]) -> float:
    return float(np.percentile(latencies_s, 99)) if latencies_s else float("nan")


def _wrong(*runs: Repeat) -> list[str]:
    return [line for run in runs for line in run.wrong]
