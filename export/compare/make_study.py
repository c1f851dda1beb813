"""Make a study: store the tables once in each dtype, place them by every strategy, and measure each placement."""

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from export.compare.baseline import Baseline, ComparedTables
from export.compare.dtype_study import DtypeStudy
from export.compare.measure import CONFIDENCE
from export.compare.recommend import recommend_dtypes
from export.compare.study import DtypeReport, Placement, Recommendation, Study, StudyOptions, TableStudy, judge
from export.plan.sharding import Sharding
from export.rows.quantize import packs
from export.rows.rank_files import store_rows
from export.trained.tables import TrainedTable
from serving.bundle.formats import WeightDtype
from serving.bundle.load import weights_paths
from serving.bundle.manifest import Agreement
from serving.pins import installed


def measure_dtype_errors(tables: ComparedTables) -> dict[str, list[DtypeReport]]:
    """Store every table in every dtype that can hold it.

    Returns:
        For each table its dtypes, the narrowest first.

    Raises:
        CheckpointError, QuantizeError: a table cannot be stored.
    """
    reports: dict[str, list[DtypeReport]] = {table.name: [] for table in tables.trained}
    for dtype in sorted(WeightDtype, key=lambda dtype: dtype.format.bits):
        storable = [table for table in tables.trained if packs(table.dim, dtype)]
        agreements = _agreements(tables, storable, dtype) if storable else {}
        for table in storable:
            agreement = agreements[table.name]
            reports[table.name].append(
                DtypeReport(
                    dtype=dtype.value.lower(),
                    bytes=table.rows * dtype.row_bytes(table.dim),
                    largest_error=agreement.largest,
                    mean_error=agreement.mean,
                    cosine=agreement.cosine,
                )
            )
    return reports


def _agreements(tables: ComparedTables, storable: Sequence[TrainedTable], dtype: WeightDtype) -> dict[str, Agreement]:
    """The agreement of float and stored rows, for some tables."""
    manifest = tables.describe(dtype, Sharding(), of=storable)
    with tempfile.TemporaryDirectory(prefix="tbe-compare-") as folder:
        stored = store_rows(weights_paths(Path(folder), manifest), storable, manifest, tables.weights)
        return {table.table: table.error.tally.agreement for table in stored}


def make_study(
    tables: ComparedTables,
    options: StudyOptions | None,
    command: str,
    progress: Callable[[str, int, int], None],
    dtype_study: DtypeStudy | None,
) -> Study:
    """Place `tables` in all ways that `options` name, and measure each.

    Args:
        tables: the tables.
        options: strategies, numbers of ranks and dtypes. None: shardings are not measured.
        command: the command line, for the report.
        progress: called when a step begins: with its name, the number of steps done, and the number of all steps.
        dtype_study: the AUC that dtypes cost, if it was measured. It recommends the dtypes.

    Raises:
        ConfigurationError, CheckpointError, QuantizeError: the tables cannot be stored.
        ParityError: the answers of a placement differ from the stored rows.
    """
    errors = measure_dtype_errors(tables)
    shardings = _Shardings() if options is None else _measure_shardings(tables, options, errors, progress)
    recommendations = shardings.recommendations
    return Study(
        command=command,
        made_at=time.time(),
        machine=f"{_cpu()}, {len(os.sched_getaffinity(0))} cores",
        versions=installed(),
        batch_size=shardings.batch_size,
        generated=tables.generated,
        tables=_table_studies(tables, errors),
        one_rank=shardings.one_rank,
        placements=shardings.placements,
        confidence=CONFIDENCE,
        verdicts=judge(shardings.placements),
        recommended_ranks=shardings.recommended_ranks,
        recommendations=recommendations if dtype_study is None else recommend_dtypes(dtype_study, recommendations),
        dtype_study=dtype_study,
    )


@dataclass(slots=True)
class _Shardings:
    """What was measured of shardings. Attributes are those of `Study`."""

    batch_size: int | None = None
    recommended_ranks: int | None = None
    one_rank: dict[str, Placement] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)
    recommendations: dict[str, Recommendation] = field(default_factory=dict)


def _measure_shardings(
    tables: ComparedTables,
    options: StudyOptions,
    errors: dict[str, list[DtypeReport]],
    progress: Callable[[str, int, int], None],
) -> _Shardings:
    measured = _Shardings(options.batch_size, max(options.ranks))
    step = _steps(progress, len(options.dtypes) * (1 + len(options.ranks) * len(options.strategies)))
    with tempfile.TemporaryDirectory(prefix="tbe-compare-") as folder, _one_thread():
        for dtype in options.dtypes:
            step(f"storing {dtype.value.lower()}")
            baseline = Baseline(Path(folder) / dtype.value, tables, options, dtype)
            measured.recommendations = measured.recommendations or baseline.recommend(max(options.ranks), errors)
            for ranks in options.ranks:
                advice = baseline.recommend(ranks, errors)
                for strategy in options.strategies:
                    step(f"{strategy} on {ranks} ranks, {dtype.value.lower()}")
                    measured.placements.append(baseline.place(strategy, ranks, advice))
            measured.one_rank[dtype.value.lower()] = baseline.placement()
            baseline.remove()
    return measured


def _steps(progress: Callable[[str, int, int], None], total: int) -> Callable[[str], None]:
    """A function that calls `progress` when a step begins."""
    completed = 0

    def step(what: str) -> None:
        nonlocal completed
        progress(what, completed, total)
        completed += 1

    return step


def _table_studies(tables: ComparedTables, errors: dict[str, list[DtypeReport]]) -> dict[str, TableStudy]:
    return {
        table.name: TableStudy(
            rows=table.rows,
            dim=table.dim,
            pooling_factor=tables.pooling_factor_of(table.name),
            dtypes=errors[table.name],
        )
        for table in tables.trained
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    """In the block, torch uses one thread, as in a served model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
