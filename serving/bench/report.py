"""What repeats come to: the median of each number, and how far the repeats lie apart."""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
import numpy as np

from serving.bench.generator import Repeat, Traffic

PERCENTILES = (50, 90, 99, 99.9)
# A percentile is reported only if at least this many answers, of all repeats together, lie beyond it.
_BEYOND = 10
# A generator that is at work for more than this share of the time measures itself.
_BUSY = 0.9
# So does one that sends late: in the median by more than this share of the median latency.
_LATE = 0.25


class Figure(msgspec.Struct, frozen=True):
    """One number over the repeats: its median, its smallest and its largest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        """The figure of `values`, one from each repeat."""
        return cls(median(values), min(values), max(values))

    @property
    def spread(self) -> float | None:
        """Half the distance from the smallest to the largest, as a share of the median; None if it is 1 or more."""
        half = (self.high - self.low) / 2
        return half / self.median if half < self.median else None


class Report(msgspec.Struct, frozen=True):
    """What the repeats of some traffic came to.

    Attributes:
        clients, rate: the traffic; one of them is 0.
        samples: samples of a request; None where requests differ.
        seconds: how long each repeat was to take.
        repeats: how many there were.
        confidence: how likely it is that the true median lies between a figure's low and high.
        answers_per_s, samples_per_s, ids_per_s: throughput.
        latency_s: latency in seconds, by percentile ("p50"). A percentile that less than ten answers lie beyond is
            left out.
        errors: errors by class name, all repeats together.
        answers: answers, all repeats together.
        checked: answers that were compared with what the bundle says.
        busy: share of the time that the generator itself was at work, in the busiest repeat.
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


class Refusal(msgspec.Struct, frozen=True):
    """Traffic that was measured, and why its numbers are not reported."""

    clients: int
    rate: float
    samples: int | None
    refused: str


def summarize(traffic: Traffic, samples: int | None, repeats: Sequence[Repeat]) -> Report:
    """Put the repeats of `traffic` together; `samples` is of each request, None where they differ."""

    def rate(count: Callable[[Repeat], int]) -> Figure:
        return Figure.of([count(each) / each.seconds for each in repeats])

    answers = sum(len(each.latencies_s) for each in repeats)
    told = [percent for percent in PERCENTILES if answers * (1 - percent / 100) >= _BEYOND]
    if not all(each.latencies_s for each in repeats):
        told = []
    return Report(
        clients=traffic.clients,
        rate=traffic.rate,
        samples=samples,
        seconds=traffic.seconds,
        repeats=len(repeats),
        # All repeats lie on one side of the median as rarely as so many coins on one side.
        confidence=1 - 2.0 ** (1 - len(repeats)),
        answers_per_s=rate(lambda each: len(each.latencies_s)),
        samples_per_s=rate(lambda each: each.samples),
        ids_per_s=rate(lambda each: each.ids),
        latency_s={
            f"p{percent:g}": Figure.of([float(np.percentile(each.latencies_s, percent)) for each in repeats])
            for percent in told
        },
        errors=dict(sum((each.errors for each in repeats), Counter[str]())),
        answers=answers,
        checked=sum(each.checked for each in repeats),
        busy=max(each.busy for each in repeats),
    )


def refusal(traffic: Traffic, repeats: Sequence[Repeat]) -> str | None:
    """Why the numbers of `repeats` must not be believed; None where they may be."""
    if wrong := [line for repeat in repeats for line in repeat.wrong]:
        return f"wrong answers ({len(wrong)} of {sum(each.checked for each in repeats)} checked): {wrong[0]}"
    if (busy := max(each.busy for each in repeats)) > _BUSY:
        return f"the generator was the bottleneck: it was at work {busy:.0%} of the time: share it with --processes"
    late = [each for repeat in repeats for each in repeat.late_s]
    latencies = [each for repeat in repeats for each in repeat.latencies_s]
    # Where most requests failed, that is the news, and the latency of the few others is nothing to compare with.
    if traffic.rate and 2 * len(latencies) > len(late) and np.median(late) > _LATE * np.median(latencies):
        return (
            f"the generator was the bottleneck: half of the requests went out {1e3 * np.median(late):.1f} ms late or "
            "later: share it with --processes, or ask for a lower --rate"
        )
    return None
