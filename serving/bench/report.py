"""Summarize repeats: the median of each number, and its spread."""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
import numpy as np
from rich import box
from rich.table import Table

from serving.bench.generator import Repeat, Traffic

PERCENTILES = (50, 90, 99, 99.9)
# A percentile is reported only if at least this many answers, of all repeats together, lie beyond it.
_BEYOND = 10
# A generator that uses the processor for more than this share of the time measures itself.
_BUSY = 0.9
# A generator measures itself, too, if its median delay is more than this share of the median latency.
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
        """Half the distance from the smallest to the largest value, as a share of the median. None if 1 or more."""
        half = (self.high - self.low) / 2
        return half / self.median if half < self.median else None


class Report(msgspec.Struct, frozen=True):
    """The figures of some traffic, over its repeats.

    Attributes:
        clients, rate: of the traffic. One of them is 0.
        samples: samples of a request. None if requests differ.
        seconds: planned time of each repeat.
        repeats: number of repeats.
        confidence: how likely it is that the true median lies between a figure's low and high, in [0, 1].
        answers_per_s, samples_per_s, ids_per_s: throughput.
        latency_s: latency in seconds, by percentile ("p50"). A percentile with fewer than ten answers beyond it is
            left out.
        errors: errors by class name, of all repeats.
        answers: answers, of all repeats.
        checked: answers that were compared with the bundle, of all repeats.
        busy: share of the time that the generator itself used the processor, in the busiest repeat.
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
    """Traffic that was measured, and the reason why its numbers are not reported."""

    clients: int
    rate: float
    samples: int | None
    refused: str


def summarize(traffic: Traffic, samples: int | None, repeats: Sequence[Repeat]) -> Report:
    """The report of `traffic`. `samples` is the samples of each request, or None if they differ."""

    def rate(count: Callable[[Repeat], int]) -> Figure:
        return Figure.of([count(repeat) / repeat.seconds for repeat in repeats])

    answers = sum(len(repeat.latencies_s) for repeat in repeats)
    percents = [percent for percent in PERCENTILES if answers * (1 - percent / 100) >= _BEYOND]
    if not all(repeat.latencies_s for repeat in repeats):
        percents = []
    return Report(
        clients=traffic.clients,
        rate=traffic.rate,
        samples=samples,
        seconds=traffic.seconds,
        repeats=len(repeats),
        # All repeats lie on one side of the true median as rarely as so many coins fall on the same side.
        confidence=1 - 2.0 ** (1 - len(repeats)),
        answers_per_s=rate(lambda repeat: len(repeat.latencies_s)),
        samples_per_s=rate(lambda repeat: repeat.samples),
        ids_per_s=rate(lambda repeat: repeat.ids),
        latency_s={
            f"p{percent:g}": Figure.of([float(np.percentile(repeat.latencies_s, percent)) for repeat in repeats])
            for percent in percents
        },
        errors=dict(sum((repeat.errors for repeat in repeats), Counter[str]())),
        answers=answers,
        checked=sum(repeat.checked for repeat in repeats),
        busy=max(repeat.busy for repeat in repeats),
    )


def refusal(traffic: Traffic, repeats: Sequence[Repeat]) -> str | None:
    """Why the numbers of `repeats` cannot be trusted. None if they can."""
    if wrong := [line for repeat in repeats for line in repeat.wrong]:
        return f"wrong answers ({len(wrong)} of {sum(repeat.checked for repeat in repeats)} checked): {wrong[0]}"
    if (busy := max(repeat.busy for repeat in repeats)) > _BUSY:
        return f"the generator was the bottleneck: it was at work {busy:.0%} of the time: share it with --processes"
    late = [late_s for repeat in repeats for late_s in repeat.late_s]
    latencies = [latency_s for repeat in repeats for latency_s in repeat.latencies_s]
    # If most requests failed, the report says so, and the latency of the few others is no measure for lateness.
    if traffic.rate and 2 * len(latencies) > len(late) and np.median(late) > _LATE * np.median(latencies):
        return (
            f"the generator was the bottleneck: half of the requests went out {1e3 * np.median(late):.1f} ms late or "
            "later: share it with --processes, or ask for a lower --rate"
        )
    return None


def named(outcome: Report | Refusal) -> str:
    """The name of the traffic: "8" clients, "2 × 8" with two samples a request, or "100/s"."""
    load = f"{outcome.clients}" if outcome.clients else f"{outcome.rate:g}/s"
    return load if outcome.samples is None else f"{outcome.samples} × {load}"


def table(reports: Sequence[Report]) -> Table:
    """A table with two lines for each report: its medians, and below them the spread of the repeats."""
    first = reports[0]
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    unit = "clients" if first.clients else "requests"
    shown.add_column(unit if first.samples is None else f"samples × {unit}", no_wrap=True)
    latencies = [f"p{percent:g}" for percent in PERCENTILES]
    for name in ("answers\n/s", "samples\n/s", "ids\n/s", *(f"{name}\nms" for name in latencies)):
        shown.add_column(name, justify="right", no_wrap=True)
    for report in reports:
        rates, times = _rates(report), _times(report)
        shown.add_row(
            named(report),
            *(_rate(figure.median) for figure in rates),
            *("–" if figure is None else f"{1e3 * figure.median:.2f}" for figure in times),
        )
        shown.add_row("", *(_spread(figure, report.repeats) for figure in (*rates, *times)), style="dim")
    return shown


def _rates(report: Report) -> list[Figure]:
    return [report.answers_per_s, report.samples_per_s, report.ids_per_s]


def _times(report: Report) -> list[Figure | None]:
    return [report.latency_s.get(f"p{percent:g}") for percent in PERCENTILES]


def _spread(figure: Figure | None, repeats: int) -> str:
    if figure is None or repeats == 1:
        return ""
    return "unclear" if figure.spread is None else f"± {figure.spread:.0%}"


def summary(reports: Sequence[Report]) -> str:
    """The text below the table: how to read it, how many answers were checked, and the errors."""
    first = reports[0]
    lines = [f"One run of {first.seconds:g} s. It does not show how much runs differ."]
    if first.repeats > 1:
        lines = [
            f"Medians of {first.repeats} runs of {first.seconds:g} s. ± is half the distance between the extremes.",
            f"The true median lies between the extremes with {first.confidence:.0%} confidence.",
        ]
        shown = [figure for report in reports for figure in (*_rates(report), *_times(report)) if figure is not None]
        if any(figure.spread is None for figure in shown):
            lines.append("unclear: the distance is as much as the median.")
    if checked := sum(report.checked for report in reports):
        answers = sum(report.answers for report in reports)
        lines.append(f"{checked:,} of {answers:,} answers were compared with the bundle: all right.")
    errors = sum((Counter(report.errors) for report in reports), Counter[str]())
    lines.append(f"Errors: {', '.join(f'{count:,} {kind}' for kind, count in errors.items()) or 'none'}.")
    return "\n".join(lines)


def costs(reports: Sequence[Report], price_per_hour: float) -> str:
    """A line for each report: what a million samples cost if the server costs so much an hour, beside its p99."""
    lines = []
    for report in reports:
        p99 = report.latency_s.get("p99")
        latency = "unknown p99" if p99 is None else f"p99 {1e3 * p99.median:.2f} ms"
        per_s = report.samples_per_s.median
        cost = f"{price_per_hour * 1e6 / per_s / 3600:.4f}" if per_s else "unknown"
        lines.append(f"{named(report)}, {latency}: a million samples cost {cost}")
    return "\n".join(lines)


def _rate(per_s: float) -> str:
    """A rate with three digits and a unit, such as "1.23 k"."""
    for size, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if per_s >= size:
            return f"{per_s / size:.3g}{prefix}"
    return f"{per_s:.3g}"
