"""The figures of AUC by dtype: of bundles over their bytes, and of each table alone."""

from collections.abc import Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from export.compare.dtype_study import AucLoss, DtypeStudy, Measured
from serving.bundle.formats import WeightDtype

MOST_TABLES = 20
_COLOURS_AND_MARKERS = (
    ("#D55E00", "v"),
    ("#E69F00", "^"),
    ("#009E73", "s"),
    ("#0072B2", "D"),
    ("#000000", "o"),
    ("#56B4E9", "P"),
    ("#F0E442", "X"),
)
# By dtype, from few bits to many: colour and marker. The colours are of Okabe and Ito's palette, as in
# `export.compare.figures`.
_LOOKS = dict(
    zip(
        [dtype.value.lower() for dtype in sorted(WeightDtype, key=lambda dtype: dtype.format.bits)],
        cycle(_COLOURS_AND_MARKERS),
        strict=False,
    )
)
_GREY = "#8C8C8C"
_PINK = "#CC79A7"


def draw_bundles(study: DtypeStudy, width: float, keys: int) -> Figure:
    """The AUC loss of bundles over their bytes: all tables in one dtype, the measured steps, the recommended one."""
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    axes = figure.subplots()
    exact = study.bundles["fp32"].bytes
    steps = sorted((step.measured for step in study.steps), key=lambda measured: measured.bytes)
    _draw_over_bytes(axes, exact, steps, "mixed dtypes", _GREY, ".")
    for dtype, measured in study.bundles.items():
        colour, marker = _LOOKS[dtype]
        _draw_over_bytes(axes, exact, [measured], f"all {dtype}", colour, marker)
    recommended = study.recommended
    if recommended.held_out is not None:
        _draw_over_bytes(axes, exact, [recommended.held_out], "recommended, held-out rows", _PINK, "x")
    best = recommended.measured
    axes.plot(
        [best.bytes / exact],
        [best.auc.loss],
        "o",
        markersize=13,
        fillstyle="none",
        color=_PINK,
        mew=2,
        label="recommended",
    )
    axes.axhline(study.max_auc_loss, color="black", linestyle="--", lw=1)
    axes.set_yscale("symlog", linthresh=study.max_auc_loss)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.tick_params(labelsize=8)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("stored bytes, as a share of FP32")
    axes.set_ylabel("AUC loss")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=keys, frameon=False, fontsize=8)
    return figure


def draw_tables(study: DtypeStudy, width: float, keys: int) -> Figure:
    """The AUC loss of each table alone in each dtype; the `MOST_TABLES` tables that lose most."""
    tables = sorted(study.tables, key=lambda table: -_largest_loss(study, table))[:MOST_TABLES]
    figure = Figure(figsize=(width, 1.6 + 0.36 * len(tables)), layout="constrained")
    axes = figure.subplots()
    dtypes = [dtype for dtype in _LOOKS if any(dtype in study.tables[table] for table in tables)]
    for number, dtype in enumerate(dtypes):
        rows = [row for row, table in enumerate(tables) if dtype in study.tables[table]]
        losses = [study.tables[tables[row]][dtype].auc for row in rows]
        offset = 0.7 * ((number + 0.5) / len(dtypes) - 0.5)
        colour, marker = _LOOKS[dtype]
        axes.errorbar(
            [loss.loss for loss in losses],
            [row + offset for row in rows],
            xerr=_bars(losses),
            color=colour,
            marker=marker,
            markersize=4,
            linestyle="none",
            elinewidth=1,
            label=dtype,
        )
    axes.axvline(study.max_auc_loss, color="black", linestyle="--", lw=1)
    axes.axvline(0, color=_GREY, lw=0.6)
    axes.set_xscale("symlog", linthresh=study.max_auc_loss)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_yticks(range(len(tables)), tables, fontsize=8)
    axes.set_ylim(len(tables) - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("AUC loss, with this table alone in a dtype")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=keys, frameon=False, fontsize=8)
    return figure


def _draw_over_bytes(
    axes: Axes, exact: int, bundles: Sequence[Measured], label: str, colour: str, marker: str
) -> None:
    losses = [measured.auc for measured in bundles]
    axes.errorbar(
        [measured.bytes / exact for measured in bundles],
        [loss.loss for loss in losses],
        yerr=_bars(losses),
        label=label,
        color=colour,
        marker=marker,
        linestyle="-" if len(bundles) > 1 else "none",
        lw=0.8,
        elinewidth=1,
    )


def _bars(losses: Sequence[AucLoss]) -> list[list[float]]:
    return [[loss.loss - loss.low for loss in losses], [loss.high - loss.loss for loss in losses]]


def _largest_loss(study: DtypeStudy, table: str) -> float:
    return max((measured.auc.loss for measured in study.tables[table].values()), default=0.0)
