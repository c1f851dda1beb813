"""Run a study: store the tables once in each dtype, lay them out in every way, and measure each."""

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from export.compare.asked import Options, Tables
from export.compare.measure import CONFIDENCE
from export.compare.recommend import recommend
from export.compare.study import DtypeReport, Placement, Recommendation, Study, TableStudy
from export.compare.verdict import judge
from export.compare.whole import Whole
from export.config import ExportConfig
from export.pipeline import describe
from export.quantize import packs
from export.store import store_rows
from export.tables import TrainedTable
from serving.bundle import Agreement, WeightDtype
from serving.pins import installed


def run_study(
    tables: Tables, options: Options, command: str, progress: Callable[[str, int, int], None] = lambda *_: None
) -> Study:
    """Compare `tables` under `options`.

    Args:
        command: what a person typed, for the report.
        progress: called with what is being done, and how many of all steps are.

    Raises:
        ConfigError, CheckpointError, QuantizeError: the tables cannot be stored.
        ParityError: a placement answered otherwise than its rows say.
    """
    steps = len(options.dtypes) * (1 + len(options.ranks) * len(options.strategies))
    done = 0

    def step(what: str) -> None:
        nonlocal done
        progress(what, done, steps)
        done += 1

    errors = _errors(tables)
    one_rank: dict[str, Placement] = {}
    placements: list[Placement] = []
    recommendations: dict[str, Recommendation] = {}
    with tempfile.TemporaryDirectory(prefix="tbe-compare-") as folder, _one_thread():
        for dtype in options.dtypes:
            step(f"storing {dtype.value.lower()}")
            whole = Whole(Path(folder) / dtype.value, tables, options, dtype)
            for ranks in options.ranks:
                sharding = whole.sharding(options, ranks)
                advice = recommend(whole.manifest.tables, whole.readers, sharding, errors)
                if dtype is options.dtypes[0] and ranks == max(options.ranks):
                    recommendations = advice
                for strategy in options.strategies:
                    step(f"{strategy} on {ranks} ranks, {dtype.value.lower()}")
                    placements.append(whole.place(strategy, advice, sharding, options))
            one_rank[dtype.value.lower()] = whole.placement(options)
            whole.remove()
    return Study(
        command=command,
        made_at=time.time(),
        machine=f"{_cpu()}, {len(os.sched_getaffinity(0))} cores",
        versions=installed(),
        batch_size=options.batch_size,
        generated=tables.generated,
        tables={
            table.name: TableStudy(
                rows=table.rows,
                dim=table.dim,
                pooling_factor=tables.pooling_factors.get(table.name, 1.0),
                dtypes=errors[table.name],
            )
            for table in tables.trained
        },
        one_rank=one_rank,
        placements=placements,
        confidence=CONFIDENCE,
        verdicts=judge(placements),
        recommended_ranks=max(options.ranks),
        recommendations=recommendations,
    )


def _errors(tables: Tables) -> dict[str, list[DtypeReport]]:
    """Every dtype that can hold it, for each table; in the order of their bytes."""
    found: dict[str, list[DtypeReport]] = {table.name: [] for table in tables.trained}
    for dtype in sorted(WeightDtype, key=lambda each: each.bits):
        held = [table for table in tables.trained if packs(table.dim, dtype)]
        if not held:
            continue
        agreements = _stored_errors(tables, held, dtype)
        for table in held:
            agreement = agreements[table.name]
            found[table.name].append(
                DtypeReport(
                    dtype=dtype.value.lower(),
                    bytes=table.rows * dtype.row_bytes(table.dim),
                    largest_error=agreement.largest,
                    mean_error=agreement.mean,
                    cosine=agreement.cosine,
                )
            )
    return found


def _stored_errors(tables: Tables, held: Sequence[TrainedTable], dtype: WeightDtype) -> dict[str, Agreement]:
    config = ExportConfig(dtype={"*": dtype})
    manifest = describe(held, config, lambda: tables.weights)
    with tempfile.TemporaryDirectory(prefix="tbe-compare-") as folder:
        return {
            name: error.tally.agreement for name, error, _ in store_rows(Path(folder), held, manifest, tables.weights)
        }


@contextmanager
def _one_thread() -> Iterator[None]:
    """As a served model has it."""
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
