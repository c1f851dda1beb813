"""Bundles, plans and verifications as tables that fit a terminal of 80 columns."""

from collections.abc import Iterable, Iterator

from rich import box
from rich.filesize import decimal
from rich.table import Table

from export.plan_report import PlanReport
from export.verify import Verification
from serving.bundle import Agreement, Manifest, Parity
from serving.plan import Plan


def tables_table(manifest: Manifest) -> Table:
    """What each table is, and its bytes before and after."""
    table = _table("tables", "table", "features", right=("shape", "pooling", "dtype", "bad ids", "float", "stored"))
    table.columns[1].no_wrap = False
    table.columns[1].overflow = "fold"
    table.columns[1].min_width = 12
    for spec in manifest.tables:
        features = ", ".join(feature.name for feature in manifest.features if feature.table == spec.name)
        table.add_row(
            spec.name,
            features,
            f"{spec.rows:,} × {spec.dim}",
            spec.pooling.value + ("·w" if spec.weighted else ""),
            spec.dtype.value,
            spec.id_policy.value,
            size(4 * spec.rows * spec.dim),
            size(spec.rows * spec.row_bytes),
        )
    if manifest.weighted:
        table.caption = "·w: its ids carry weights"
    return table


def placement_table(report: PlanReport) -> Table:
    """How each table is cut, and where its shards are."""
    table = _table("placement", "table", right=("shape", "dtype", "type", "shards", "largest", "ranks"))
    for name, placed in report.tables.items():
        table.add_row(
            name,
            f"{placed.rows:,} × {placed.dim}",
            placed.dtype.value,
            placed.sharding_type.value,
            str(len(placed.shards)),
            size(max(shard.bytes for shard in placed.shards)),
            _ranges({shard.rank for shard in placed.shards}),
        )
    return table


def ranks_table(report: PlanReport, *, traffic: bool) -> Table:
    """What each rank holds, and, if `traffic`, what a request sends it and gets back."""
    columns = ("rank", "host", "shards", "bytes", "share") + (("ids in", "sums out") if traffic else ())
    title = f"ranks, and what a request of {report.batch_size:,} samples moves" if traffic else "ranks"
    table = _table(title, right=columns)
    for number, rank in enumerate(report.ranks):
        moved = (size(rank.bytes_in), size(rank.bytes_out)) if traffic else ()
        table.add_row(str(number), str(rank.host), str(rank.shards), size(rank.bytes), f"{rank.share:.1%}", *moved)
    return table


def parity_table(parity: Iterable[Parity]) -> Table:
    """The largest error of an element at each step, one row a table."""
    table = _table(
        "largest error of an element, step by step from the float table",
        "table",
        right=("quantized", "limit", "cosine", "sharded", "scripted", "reloaded", "trained"),
    )
    for each in parity:
        table.add_row(
            each.table,
            shown_error(each.quantized.largest),
            shown_error(each.limit),
            f"{each.quantized.cosine:.6f}",
            *(shown_error(step.largest) for step in (each.sharded, each.scripted, each.reloaded)),
            shown_error(each.trained.largest) if each.trained else "–",
        )
    table.caption = "trained: answers of the trained module itself; – where it could not be run"
    return table


def remarks(noted: Manifest | PlanReport) -> Iterator[str]:
    """A line for what is not in a bundle, and for each thing that one should know of it, or of a plan."""
    if isinstance(noted, Manifest) and noted.left_out:
        yield f"left out: {', '.join(noted.left_out)}"
    yield from (f"note: {note}" for note in noted.notes)


def verification_table(verification: Verification) -> Table:
    """Every step of every table."""
    table = _table("", "table", "step", right=("largest", "mean", "cosine", "worst row"))
    for each in verification.parity:
        steps: dict[str, Agreement] = {
            "float ↔ quantized": each.quantized,
            "quantized ↔ sharded": each.sharded,
            "sharded ↔ scripted": each.scripted,
            "scripted ↔ reloaded": each.reloaded,
        }
        for name, step in steps.items():
            # The last three compare answers to a probe: a row of one is a sample, not a row of the table.
            row = f"{step.worst_row:,}" if step.largest else "–"
            row += "" if step is each.quantized or row == "–" else " (probe)"
            table.add_row(
                each.table, name, shown_error(step.largest), shown_error(step.mean), f"{step.cosine:.8f}", row
            )
        table.add_section()
    return table


def size(size_bytes: int) -> str:
    """Bytes as people read them: 1.5 MB, 10⁶ of them."""
    return decimal(size_bytes).replace("bytes", "B").replace("byte", "B")


def shown_error(error: float) -> str:
    """An error in two digits; 0 where there is none."""
    return f"{error:.1e}" if error else "0"


def is_sharded(plan: Plan) -> bool:
    """Whether there is anything to say about placement."""
    return len(plan.ranks) > 1


def _ranges(numbers: set[int]) -> str:
    """{0, 1, 2, 5} as 0–2, 5."""
    runs: list[list[int]] = []
    for each in sorted(numbers):
        if runs and runs[-1][-1] == each - 1:
            runs[-1].append(each)
        else:
            runs.append([each])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _table(title: str, *left: str, right: tuple[str, ...]) -> Table:
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
