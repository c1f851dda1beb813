"""Reports as a table and a few sentences, for a terminal."""

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.table import Table

from serving.bench.report import PERCENTILES, Figure, Refusal, Report


def named(outcome: Report | Refusal) -> str:
    """Which traffic it was: "8", "2 × 8" with two samples a request, or "100/s"."""
    who = f"{outcome.clients}" if outcome.clients else f"{outcome.rate:g}/s"
    return who if outcome.samples is None else f"{outcome.samples} × {who}"


def table(reports: Sequence[Report]) -> Table:
    """A line for each report, and below it how far the repeats lie apart."""
    first = reports[0]
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    unit = "clients" if first.clients else "requests"
    shown.add_column(unit if first.samples is None else f"samples × {unit}", no_wrap=True)
    latencies = [f"p{percent:g}" for percent in PERCENTILES]
    for name in ("answers\n/s", "samples\n/s", "ids\n/s", *(f"{name}\nms" for name in latencies)):
        shown.add_column(name, justify="right", no_wrap=True)
    for report in reports:
        rates = (report.answers_per_s, report.samples_per_s, report.ids_per_s)
        times = [report.latency_s.get(name) for name in latencies]
        shown.add_row(
            named(report),
            *(_rate(each.median) for each in rates),
            *("–" if each is None else f"{1e3 * each.median:.2f}" for each in times),
        )
        shown.add_row("", *(_spread(each, report.repeats) for each in (*rates, *times)), style="dim")
    return shown


def _spread(figure: Figure | None, repeats: int) -> str:
    if figure is None or repeats == 1:
        return ""
    return "unclear" if figure.spread is None else f"± {figure.spread:.0%}"


def summary(reports: Sequence[Report]) -> str:
    """What the table does not show: how to read it, how many answers were checked, and the errors."""
    first = reports[0]
    lines = [f"One run of {first.seconds:g} s, which says nothing of how far others lie apart."]
    if first.repeats > 1:
        lines = [
            f"Medians of {first.repeats} runs of {first.seconds:g} s, and half the distance between the extremes,",
            f"which hold the median with {first.confidence:.0%} confidence; unclear if as much as the median.",
        ]
    if checked := sum(each.checked for each in reports):
        answers = sum(each.answers for each in reports)
        lines.append(f"{checked:,} of {answers:,} answers were compared with the bundle: all right.")
    errors = sum((Counter(each.errors) for each in reports), Counter[str]())
    lines.append(f"Errors: {', '.join(f'{count:,} {kind}' for kind, count in errors.items()) or 'none'}.")
    return "\n".join(lines)


def _rate(per_s: float) -> str:
    """A thousand as 1.00 k."""
    for size, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if per_s >= size:
            return f"{per_s / size:.3g}{prefix}"
    return f"{per_s:.3g}"
