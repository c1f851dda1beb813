"""Make a study: store the tables once in each dtype, place them in every way, and measure each placement."""

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from export.compare.baseline import Baseline
from export.compare.dtype_errors import measure_dtype_errors
from export.compare.fastest import judge
from export.compare.measure import CONFIDENCE
from export.compare.options import StudyOptions
from export.compare.study import DtypeReport, Placement, Recommendation, Study, TableStudy
from export.compare.tables import ComparedTables
from serving.pins import installed


def make_study(
    tables: ComparedTables,
    options: StudyOptions,
    command: str,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Study:
    """Compare `tables` as `options` say.

    Args:
        tables: what is compared.
        options: in which ways.
        command: what a person typed, for the report.
        progress: called with the step that starts, how many steps are done, and how many there are.

    Raises:
        ConfigurationError, CheckpointError, QuantizeError: the tables cannot be stored.
        ParityError: a placement answers otherwise than its rows say.
    """
    errors = measure_dtype_errors(tables)
    one_rank: dict[str, Placement] = {}
    placements: list[Placement] = []
    recommendations: dict[str, Recommendation] = {}
    step = _steps(progress, len(options.dtypes) * (1 + len(options.ranks) * len(options.strategies)))
    with tempfile.TemporaryDirectory(prefix="tbe-compare-") as folder, _one_thread():
        for dtype in options.dtypes:
            step(f"storing {dtype.value.lower()}")
            baseline = Baseline(Path(folder) / dtype.value, tables, options, dtype)
            recommendations = recommendations or baseline.recommend(max(options.ranks), errors)
            for ranks in options.ranks:
                advice = baseline.recommend(ranks, errors)
                for strategy in options.strategies:
                    step(f"{strategy} on {ranks} ranks, {dtype.value.lower()}")
                    placements.append(baseline.place(strategy, ranks, advice))
            one_rank[dtype.value.lower()] = baseline.placement()
            baseline.remove()
    return Study(
        command=command,
        made_at=time.time(),
        machine=f"{_cpu()}, {len(os.sched_getaffinity(0))} cores",
        versions=installed(),
        batch_size=options.batch_size,
        generated=tables.generated,
        tables=_table_studies(tables, errors),
        one_rank=one_rank,
        placements=placements,
        confidence=CONFIDENCE,
        verdicts=judge(placements),
        recommended_ranks=max(options.ranks),
        recommendations=recommendations,
    )


def _steps(progress: Callable[[str, int, int], None], total: int) -> Callable[[str], None]:
    """A function that tells `progress` of each step as it starts."""
    done = 0

    def step(what: str) -> None:
        nonlocal done
        progress(what, done, total)
        done += 1

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
    """Let torch use one thread, as in a served model."""
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
