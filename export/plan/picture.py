"""A plan as a picture: the bytes of each rank by table, and the bytes that a request moves."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from export.plan.report import PlanReport, Transfer
from export.plan.traffic import ALL_TO_ALL, REDUCE_SCATTER
from export.values import size_text

# Number of tables with a colour of their own, the largest ones: readers can tell so many apart. Others are grey.
_COLOURED = 9
_COLOURS = mpl.color_sequences["tab10"]
_GREY = "#b0b0b0"
# Most names of hosts that fit side by side.
_SIDE_BY_SIDE = 9
# Hatches of bars, by pattern: partial sums that the router adds, and those that it places side by side.
_HATCHES = {REDUCE_SCATTER: "////", ALL_TO_ALL: ""}
_MEANING = {REDUCE_SCATTER: "the router adds them", ALL_TO_ALL: "the router places them"}


def draw_plan(report: PlanReport, path: Path) -> None:
    """Write a picture of `report` to `path`, in the format that its suffix names (.png, .svg, .pdf).

    Raises:
        OSError: the file cannot be written.
        ValueError: the suffix names no format.
    """
    ranks = len(report.ranks)
    if report.transfers:
        figure = Figure(figsize=(max(13.0, 9.0 + 0.6 * ranks), _height_inches(report)), layout="constrained")
        memory, traffic = figure.subplots(1, 2, width_ratios=[1, 1])
        _draw_transfers(traffic, report)
    else:
        figure = Figure(figsize=(max(9.0, 4.0 + 0.6 * ranks), 4.5), layout="constrained")
        memory, traffic = figure.subplots(1, 2, width_ratios=[3, 2])
        _draw_traffic(traffic, report)
        _label_ranks(traffic, report)
    _draw_memory(memory, report)
    _label_ranks(memory, report)
    figure.savefig(path, dpi=150)


def _height_inches(report: PlanReport) -> float:
    """The height of a picture with a line for each host, in inches."""
    return max(4.5, 2.0 + 0.4 * len(report.ranks))


def _label_ranks(axes: Axes, report: PlanReport) -> None:
    """Name the ranks below their bars, with a line between hosts, and write bytes at the left."""
    axes.set_xticks(range(len(report.ranks)), report.names)
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.spines[["top", "right"]].set_visible(False)
    if report.transfers:
        axes.tick_params(axis="x", rotation=45 if len(report.ranks) > _SIDE_BY_SIDE else 0)
        return
    axes.set_xlabel("rank")
    for number in range(1, len(report.ranks)):
        if report.ranks[number].host != report.ranks[number - 1].host:
            axes.axvline(number - 0.5, color="black", linewidth=0.8, linestyle=":")


def _groups(report: PlanReport) -> list[tuple[str, list[str], object]]:
    """The label, tables and colour of each kind of bar: one for each large table, and one for all others together."""
    largest = sorted(report.tables, key=lambda name: report.tables[name].bytes, reverse=True)
    grey = largest[_COLOURED:]
    groups: list[tuple[str, list[str], object]] = [
        (name, [name], _COLOURS[number]) for number, name in enumerate(largest[:_COLOURED])
    ]
    return [*groups, (f"{len(grey)} others", grey, _GREY)] if grey else groups


def _draw_memory(axes: Axes, report: PlanReport) -> None:
    below = [0] * len(report.ranks)
    for label, names, colour in _groups(report):
        heights = [sum(rank.tables.get(name, 0) for name in names) for rank in report.ranks]
        axes.bar(range(len(heights)), heights, bottom=below, label=label, color=colour)
        below = [bottom + size for bottom, size in zip(below, heights, strict=True)]
    if report.transfers:
        _draw_limits(axes, report)
        for number, size in enumerate(below):
            axes.annotate(
                size_text(size), (number, size), (0, 4),
                textcoords="offset points", ha="center", va="bottom", fontsize="small",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
        axes.set_title("stored bytes by table", loc="left")
    else:
        if report.memory_bytes is not None and not report.memory_assumed:
            axes.axhline(report.memory_bytes, color="black", linewidth=1.2, linestyle="--", label="memory of a rank")
        axes.set_title("stored bytes by table (dotted: between hosts)", loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True, fontsize="small")


def _draw_limits(axes: Axes, report: PlanReport) -> None:
    """A dashed line over each bar, at the limit of its rank."""
    label = "memory"
    for number, rank in enumerate(report.ranks):
        if rank.memory_bytes is not None:
            ends = (number - 0.45, number + 0.45)
            axes.hlines(rank.memory_bytes, *ends, color="black", linewidth=1.2, linestyle="--", label=label)
            label = "_"  # one line in the legend


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


def _draw_transfers(axes: Axes, report: PlanReport) -> None:
    """A line for each host: bytes of ids that it gets to the left, bytes of sums that it sends to the right."""
    hosts = [rank.host for rank in report.ranks[1:]]
    _draw_direction(axes, report, hosts, lambda transfer: -transfer.to_host_bytes)
    _draw_direction(axes, report, hosts, lambda transfer: transfer.to_router_bytes)
    axes.axvline(0, color="black", linewidth=1.2)
    axes.set_yticks(range(len(hosts)), report.names[1:])
    axes.set_ylim(len(hosts) - 0.4, -0.6)  # host 0 is on top
    axes.xaxis.set_major_formatter(lambda size, _: EngFormatter(unit="B")(abs(size)))
    # Room for the bytes at the ends of bars.
    sent, answered = (max(sizes) for sizes in zip(*((r.bytes_in, r.bytes_out) for r in report.ranks), strict=True))
    axes.set_xlim(-sent - 0.14 * (sent + answered), answered + 0.14 * (sent + answered))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_title(f"a request of {report.batch_size:,} samples", loc="left")
    to_hosts, to_router = (
        sum(sizes) for sizes in zip(*((r.bytes_in, r.bytes_out) for r in report.ranks), strict=True)
    )
    axes.set_xlabel(
        f"← router to hosts: ids, {size_text(to_hosts)}   |   hosts to router: sums, {size_text(to_router)} →"
    )
    patterns = sorted({transfer.pattern for transfer in report.transfers})
    axes.legend(
        [Patch(facecolor="white", edgecolor="black", hatch=_HATCHES[pattern]) for pattern in patterns],
        [f"{pattern}: {_MEANING[pattern]}" for pattern in patterns],
        loc="upper center", bbox_to_anchor=(0.5, -0.8 / _height_inches(report)), ncols=2, frameon=False,
        fontsize="small",
    )  # fmt: skip


def _draw_direction(
    axes: Axes, report: PlanReport, hosts: Sequence[int], bytes_of: Callable[[Transfer], int]
) -> None:
    """Bars from 0 to one side, by table and pattern, with the bytes of each host at their ends."""
    moved: Mapping[tuple[int, str], Transfer] = {
        (transfer.host, transfer.table): transfer for transfer in report.transfers
    }
    ends = [0] * len(hosts)
    for _, names, colour in _groups(report):
        for name in names:
            transfers = [moved.get((host, name)) for host in hosts]
            pattern = next((transfer.pattern for transfer in transfers if transfer is not None), ALL_TO_ALL)
            widths = [0 if transfer is None else bytes_of(transfer) for transfer in transfers]
            axes.barh(
                range(len(hosts)), widths, 0.6, left=ends, color=colour, hatch=_HATCHES[pattern],
                edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for number, end in enumerate(ends):
        side = "right" if end < 0 else "left"
        axes.annotate(
            size_text(abs(end)), (end, number), (-4 if end < 0 else 4, 0),
            textcoords="offset points", ha=side, va="center", fontsize="small",
        )  # fmt: skip
