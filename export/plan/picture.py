"""A plan as a picture: the bytes of each rank by table, and the bytes that a request moves."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from export.plan.report import PlanReport

# The largest tables have colours, as many as one can tell apart. The others share a grey.
_COLOURED = 9
_COLOURS = mpl.color_sequences["tab10"]
_GREY = "#b0b0b0"


def draw_plan(report: PlanReport, path: Path) -> None:
    """Write a picture of `report` to `path`, in the format that its suffix names (.png, .svg, .pdf).

    Raises:
        OSError: the file cannot be written.
        ValueError: the suffix names no format.
    """
    figure = Figure(figsize=(max(9.0, 4.0 + 0.6 * len(report.ranks)), 4.5), layout="constrained")
    memory, traffic = figure.subplots(1, 2, width_ratios=[3, 2])
    _draw_memory(memory, report)
    _draw_traffic(traffic, report)
    for axes in (memory, traffic):
        axes.set_xlabel("rank")
        axes.set_xticks(range(len(report.ranks)))
        axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
        axes.spines[["top", "right"]].set_visible(False)
        for number in range(1, len(report.ranks)):
            if report.ranks[number].host != report.ranks[number - 1].host:
                axes.axvline(number - 0.5, color="black", linewidth=0.8, linestyle=":")
    figure.savefig(path, dpi=150)


def _draw_memory(axes: Axes, report: PlanReport) -> None:
    largest = sorted(report.tables, key=lambda name: report.tables[name].bytes, reverse=True)
    others = largest[_COLOURED:]
    bars = [(name, [name], _COLOURS[number]) for number, name in enumerate(largest[:_COLOURED])]
    if others:
        bars.append((f"{len(others)} others", others, _GREY))
    below = [0] * len(report.ranks)
    for label, names, colour in bars:
        heights = [sum(rank.tables.get(name, 0) for name in names) for rank in report.ranks]
        axes.bar(range(len(heights)), heights, bottom=below, label=label, color=colour)
        below = [each + height for each, height in zip(below, heights, strict=True)]
    if report.memory_bytes is not None and not report.memory_assumed:
        axes.axhline(report.memory_bytes, color="black", linewidth=1.2, linestyle="--", label="memory of a rank")
    axes.set_title("stored bytes by table (dotted: between hosts)", loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True, fontsize="small")


def _draw_traffic(axes: Axes, report: PlanReport) -> None:
    numbers = range(len(report.ranks))
    axes.bar(
        [n - 0.2 for n in numbers], [rank.bytes_in for rank in report.ranks], 0.4, label="in: ids", color="#4c72b0"
    )
    axes.bar(
        [n + 0.2 for n in numbers], [rank.bytes_out for rank in report.ranks], 0.4, label="out: sums", color="#dd8452"
    )
    axes.set_title(f"a request of {report.batch_size:,} samples", loc="left")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False, fontsize="small")
