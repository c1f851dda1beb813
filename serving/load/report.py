"""What repeated runs say: the median of each number, and how far the repeats lie apart."""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
import numpy as np

from serving.load.generator import Load, Run

PERCENTILES = (50, 90, 99, 99.9)
# So many answers have to lie beyond a percentile, of all repeats, for it to be told.
_BEYOND = 10
# A generator that works this much of the time measures itself,
_BUSY = 0.9
# and so does one that sends later than asked by this share of the latency it reports.
_LATE = 0.25


class Figure(msgspec.Struct, frozen=True):
    """The median of the repeats, the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        """Of one value from each repeat."""
        return cls(median(values), min(values), max(values))

    @property
    def spread(self) -> float | None:
        """Half the distance between the largest and the smallest, as a share of the median; None for all or more."""
        half = (self.high - self.low) / 2
        return half / self.median if half < self.median else None


class Report(msgspec.Struct, frozen=True):
    """What some repeats of one load came to.

    Attributes:
        clients, rate: the load; one of them is 0.
        samples: of a request; None where they differ.
        answers_per_s, samples_per_s, ids_per_s: throughput.
        latency_s: by percentile; one that less than ten answers lie beyond is left out.
        errors: by class name, of all repeats.
        answers, checked: of all repeats.
        confidence: how likely it is that a figure's low and high hold the median of all runs one could make.
        busy: the share of the time that the generator itself was at work.
    """

    clients: int
    rate: float
    samples: int | None
    seconds: float
    repeats: int
    confidence: float
    answers_per_s: Figure
    samples_per_s: Figure
    ids_per_s: Figure
    latency_s: dict[str, Figure]
    errors: dict[str, int]
    answers: int
    checked: int
    busy: float

    @property
    def failed(self) -> float:
        """The share of requests that got an error."""
        errors = sum(self.errors.values())
        return errors / (errors + self.answers) if errors else 0.0


def summarize(load: Load, samples: int | None, runs: Sequence[Run]) -> Report:
    """Put the repeats of `load` together."""

    def rate(count: Callable[[Run], int]) -> Figure:
        return Figure.of([count(run) / run.seconds for run in runs])

    answers = sum(len(run.latencies_s) for run in runs)
    told = [percent for percent in PERCENTILES if answers * (1 - percent / 100) >= _BEYOND]
    if not all(run.latencies_s for run in runs):
        told = []
    return Report(
        clients=load.clients,
        rate=load.rate,
        samples=samples,
        seconds=load.seconds,
        repeats=len(runs),
        # All repeats lie on one side of the median as rarely as so many coins on one side.
        confidence=1 - 2.0 ** (1 - len(runs)),
        answers_per_s=rate(lambda run: len(run.latencies_s)),
        samples_per_s=rate(lambda run: run.samples),
        ids_per_s=rate(lambda run: run.ids),
        latency_s={
            f"p{percent:g}": Figure.of([float(np.percentile(run.latencies_s, percent)) for run in runs])
            for percent in told
        },
        errors=dict(sum((run.errors for run in runs), Counter[str]())),
        answers=answers,
        checked=sum(run.checked for run in runs),
        busy=max(run.busy for run in runs),
    )


def refusal(load: Load, runs: Sequence[Run]) -> str | None:
    """Why the numbers of `runs` must not be believed; None where they may be."""
    if wrong := [line for run in runs for line in run.wrong]:
        return f"wrong answers ({len(wrong)} of {sum(run.checked for run in runs)} checked): {wrong[0]}"
    if (busy := max(run.busy for run in runs)) > _BUSY:
        return f"the generator was the bottleneck: it was at work {busy:.0%} of the time: share it with --processes"
    late = [each for run in runs for each in run.late_s]
    latencies = [each for run in runs for each in run.latencies_s]
    if load.rate and latencies and np.median(late) > _LATE * np.median(latencies):
        return (
            f"the generator was the bottleneck: half of the requests went out {1e3 * np.median(late):.1f} ms late or "
            "later: share it with --processes, or ask for a lower --rate"
        )
    return None
