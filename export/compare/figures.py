"""The figures of a study. The colours are safe for the colour-blind; hatches tell bars apart without colours."""

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import matplotlib as mpl
import msgspec
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, PercentFormatter

from export.compare.auc_figures import draw_bundles, draw_tables
from export.compare.study import Placement, Study
from export.values import size_text

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color/) without black, which lines and text have.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++")
_GREY = "#BBBBBB"
_INCH = 0.36
_LATENCY_TITLE = "Latency of a lookup in {} tables,\nby how they are sharded over ranks.\nShorter is better"


@dataclass(frozen=True, slots=True)
class Layout:
    """The size of figures: their width in inches, and how many panels and keys of a legend fit side by side."""

    width: float
    panels: int
    keys: int


WIDE = Layout(width=8, panels=3, keys=4)
# For phones, which enlarge it: text of 7 points stays readable.
NARROW = Layout(width=3.2, panels=1, keys=2)


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure.

    Attributes:
        name: its file's name without the suffix.
        alt: a description for blind readers.
        figure: the drawing.
    """

    name: str
    alt: str
    figure: Figure

    def encoded(self, format_: str) -> bytes:
        """The content of the figure's file in the format `svg` or `png`."""
        buffer = io.BytesIO()
        with mpl.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": self.name}):
            self.figure.savefig(buffer, format=format_, dpi=160)
        return buffer.getvalue()


def draw(study: Study, layout: Layout) -> Iterator[Picture]:
    """Draw all figures of `study`: latency, memory and traffic by strategy; AUC and error by dtype.

    The first three show the first dtype. Latency is for all numbers of ranks, memory and traffic for the largest.
    """
    placed = [
        placement
        for placement in study.placements
        if placement.error is None and placement.dtype == next(iter(study.one_rank))
    ]
    most = [placement for placement in placed if placement.ranks == study.recommended_ranks]
    if placed:
        yield Picture(
            "latency",
            f"Bars of the median latency of {study.batch_size} samples for each strategy and number of ranks: in one "
            "process, and with ranks side by side. The table under it has the numbers.",
            _latency(study, placed, layout),
        )
    if most:
        yield Picture(
            "memory",
            "For each strategy, bars of the bytes that each rank holds, stacked by table.",
            _panels(most, _memory_of(most), "rank", layout),
        )
        yield Picture(
            "traffic",
            f"For each strategy, a matrix of the bytes that ranks send one another for {study.batch_size} samples.",
            _panels(most, _traffic_of(most), "to rank", layout),
        )
    if (dtypes := study.dtype_study) is not None:
        yield Picture(
            "auc_bundles",
            "The AUC that bundles lose over their stored bytes, with intervals: all tables in one dtype, mixed "
            "dtypes, and the recommended one. The table under it has the numbers.",
            draw_bundles(dtypes, layout.width, layout.keys),
        )
        yield Picture(
            "auc_tables",
            "For each table, the AUC that is lost if it alone has a dtype, a point with an interval for each dtype.",
            draw_tables(dtypes, layout.width, layout.keys),
        )
    yield Picture(
        "errors",
        "For each table, 1 − cosine of float and stored rows over the stored share of FP32 bytes, a point a dtype.",
        _errors(study, layout),
    )


def _latency(study: Study, placed: Sequence[Placement], layout: Layout) -> Figure:
    """Bars of the latency of each strategy on each number of ranks."""
    strategies = list(dict.fromkeys(placement.strategy for placement in placed))
    ranks = sorted({placement.ranks for placement in placed})
    figure = Figure(figsize=(layout.width, 2.2 + _INCH * len(strategies) * len(ranks)), layout="constrained")
    figure.suptitle(_LATENCY_TITLE.format(len(study.tables)), x=0.01, ha="left", fontsize=10)
    axes = figure.subplots()
    looks: list[dict[str, Any]] = [
        {"facecolor": colour, "hatch": hatch, "edgecolor": "white"}
        for _, colour, hatch in zip(ranks, cycle(_COLOURS), cycle(_HATCHES), strict=False)
    ]
    bar_height = 0.8 / len(ranks)
    for placement in placed:
        number = ranks.index(placement.ranks)
        position = strategies.index(placement.strategy) + (number - (len(ranks) - 1) / 2) * bar_height
        _draw_latency(axes, placement, position, bar_height, looks[number])
    one_rank_ms = 1e3 * next(iter(study.one_rank.values())).latency_s.median
    _draw_one_rank(axes, one_rank_ms)
    axes.set_yticks(range(len(strategies)), strategies)
    axes.set_ylim(len(strategies) - 0.4, -0.9)
    axes.set_xlabel(f"ms for {study.batch_size} samples")
    axes.set_xlim(0, axes.get_xlim()[1] * 1.08)
    axes.spines[["top", "right"]].set_visible(False)
    (tick,) = axes.plot([], [], color="black", lw=2.5, marker="|", linestyle="none", markersize=10)
    (interval,) = axes.plot([], [], color="black", lw=1)
    keys: list[Artist] = [*(Patch(**look) for look in looks), interval, tick]
    figure.legend(
        keys,
        [
            *(f"{count} ranks in one process, median" for count in ranks),
            "interval of the median",
            "ranks side by side, network not counted",
        ],
        loc="outside lower center",
        ncols=layout.keys // 2,
        frameon=False,
        fontsize=9,
    )
    return figure


def _draw_latency(axes: Axes, placement: Placement, position: float, bar_height: float, look: dict[str, Any]) -> None:
    """A bar of the median in one process, a line over its interval, and a tick for ranks side by side."""
    median, low, high = (1e3 * seconds for seconds in msgspec.structs.astuple(placement.latency_s))
    side_by_side = 1e3 * placement.side_by_side_s
    axes.barh(position, median, bar_height * 0.9, **look)
    axes.plot([low, high], [position, position], color="black", lw=1)
    axes.plot([side_by_side] * 2, [position - bar_height * 0.45, position + bar_height * 0.45], color="black", lw=2.5)
    axes.annotate(f" {median:.3g}", (max(high, side_by_side), position), va="center", fontsize=8)


def _draw_one_rank(axes: Axes, latency_ms: float) -> None:
    axes.axvline(latency_ms, color="black", linestyle=":")
    axes.annotate(
        f"one rank: {latency_ms:.3g} ms ",
        (latency_ms, -0.62),
        fontsize=8,
        ha="left",
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
    )


def _panels(
    placed: Sequence[Placement], paint: Callable[[Axes, Placement], None], xlabel: str, layout: Layout
) -> Figure:
    """A panel for each placement."""
    lines = -(-len(placed) // layout.panels)
    figure = Figure(figsize=(layout.width, 0.9 + 2.1 * lines), layout="constrained")
    grid = figure.subplots(lines, layout.panels, squeeze=False)
    for axes, placement in zip(grid.flat, placed, strict=False):
        paint(axes, placement)
        axes.set_title(placement.strategy, fontsize=9, loc="left")
        axes.set_xlabel(xlabel, fontsize=8)
        axes.tick_params(labelsize=7)
    for axes in list(grid.flat)[len(placed) :]:
        axes.set_axis_off()
    if handles := grid.flat[0].get_legend_handles_labels()[0]:
        labels = grid.flat[0].get_legend_handles_labels()[1]
        figure.legend(handles, labels, loc="outside lower center", ncols=layout.keys, frameon=False, fontsize=8)
    return figure


def _memory_of(placed: Sequence[Placement]) -> Callable[[Axes, Placement], None]:
    """A painter of the bytes of each rank: the largest tables in colours, the rest in grey."""
    totals: Counter[str] = Counter()
    for rank in placed[0].rank_bytes:
        totals.update(rank)
    for placement in placed[1:]:
        for rank in placement.rank_bytes:
            totals.update(dict.fromkeys(rank, 0))
    named = [table for table, _ in totals.most_common(len(_COLOURS))]
    rest = [table for table in totals if table not in named]
    top = max(placement.largest_rank_bytes for placement in placed)

    def paint(axes: Axes, placement: Placement) -> None:
        below = np.zeros(placement.ranks)
        groups = [(table, [table], _COLOURS[n], _HATCHES[n]) for n, table in enumerate(named)]
        if rest:
            groups.append((f"{len(rest)} others", rest, _GREY, ""))
        for label, tables, colour, hatch in groups:
            heights = np.array([sum(rank.get(table, 0) for table in tables) for rank in placement.rank_bytes], float)
            look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "lw": 0.3, "label": label}
            axes.bar(range(placement.ranks), heights, bottom=below, **look)  # type: ignore[arg-type]
            below += heights
        axes.set_ylim(0, top * 1.05)
        axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
        axes.set_xticks(range(placement.ranks))
        axes.spines[["top", "right"]].set_visible(False)

    return paint


def _traffic_of(placed: Sequence[Placement]) -> Callable[[Axes, Placement], None]:
    """A painter of the matrix of bytes from rank to rank, with numbers if there is space for them."""
    largest = max((max(map(max, placement.traffic)) for placement in placed), default=0) or 1

    def paint(axes: Axes, placement: Placement) -> None:
        axes.imshow(placement.traffic, cmap="Blues", vmin=0, vmax=largest)
        axes.set_xticks(range(placement.ranks))
        axes.set_yticks(range(placement.ranks))
        axes.set_ylabel("from rank", fontsize=8)
        if placement.ranks <= 8:
            for source, sent in enumerate(placement.traffic):
                for target, moved in enumerate(sent):
                    shown = _short(moved) if source != target else "·"
                    dark = moved > largest / 2
                    axes.annotate(
                        shown,
                        (target, source),
                        ha="center",
                        va="center",
                        fontsize=7 if placement.ranks <= 4 else 5,
                        color="white" if dark else "black",
                    )

    return paint


def _short(size_bytes: int) -> str:
    return size_text(size_bytes).replace(" ", "\n") if size_bytes else "0"


def _errors(study: Study, layout: Layout) -> Figure:
    """A line for each table, a point for each dtype: error over stored bytes."""
    figure = Figure(figsize=(layout.width, 4.6), layout="constrained")
    axes = figure.subplots()
    by_size = sorted(study.tables, key=lambda name: -study.tables[name].rows * study.tables[name].dim)
    named = by_size[: len(_COLOURS)]
    for name in reversed(by_size):
        table = study.tables[name]
        floats = 4 * table.rows * table.dim
        points = [(dtype.bytes / floats, 1 - dtype.cosine) for dtype in table.dtypes if dtype.cosine < 1]
        if not points:
            continue
        number = named.index(name) if name in named else None
        axes.plot(
            *zip(*points, strict=True),
            marker="os^Dv<>"[number] if number is not None else ".",
            color=_GREY if number is None else _COLOURS[number],
            lw=1,
            label=name if number is not None else None,
            zorder=1 if number is None else 2,
        )
    largest = study.tables[by_size[0]]
    for dtype in largest.dtypes:
        share = dtype.bytes / (4 * largest.rows * largest.dim)
        if dtype.cosine < 1:
            axes.axvline(share, color=_GREY, lw=0.6, linestyle=":", zorder=0)
            axes.annotate(dtype.dtype, (share, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=9)
    axes.set_yscale("log")
    axes.set_xlabel("stored bytes, as a share of FP32")
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylabel("1 − cosine of float and stored rows")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=layout.keys, frameon=False, fontsize=8)
    return figure
