"""Run a study: store the tables once in each dtype, lay them out in every way, and measure each."""

import glob
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from export.checkpoint import Checkpoint
from export.compare.measure import measure, prepare
from export.compare.recommend import recommend
from export.compare.study import DtypeReport, Placement, Recommendation, Study, TableStudy
from export.compare.traffic import traffic_between
from export.config import ExportConfig
from export.errors import ConfigError, ParityError, PlanError, QuantizeError
from export.pipeline import describe
from export.plan_report import report_plan
from export.probe import make_probe, run_program
from export.program import compile_program
from export.quantize import check_dim
from export.sharding import CHOICES, Sharding
from export.shards import write_rows
from export.store import store_rows
from export.tables import TrainedTable
from serving.bundle import Agreement, Manifest, WeightDtype
from serving.engine import map_weights
from serving.load.ids import Distribution, random_requests
from serving.pins import installed
from serving.reference import pool

# Each table as this package's own recommendation has it.
MIXED = "mixed"
STRATEGIES = (*(each for each in CHOICES if not each.startswith("auto")), MIXED, "auto", "auto-simple")
_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """What is compared.

    Attributes:
        trained: the tables.
        weights: their rows.
        pooling_factors: ids in a bag on average, by table.
        generated: whether the rows are made up.
    """

    trained: Sequence[TrainedTable]
    weights: Checkpoint
    pooling_factors: Mapping[str, float]
    generated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How it is compared: every strategy on every number of ranks in every dtype, for `seconds` each."""

    strategies: Sequence[str] = STRATEGIES
    ranks: Sequence[int] = (2, 4)
    ranks_per_host: int | None = None
    memory_bytes: int | None = None
    dtypes: Sequence[WeightDtype] = (WeightDtype.INT8, WeightDtype.INT4)
    batch_size: int = 128
    seconds: float = 1.0

    def __post_init__(self) -> None:
        for strategy in self.strategies:
            if strategy not in STRATEGIES:
                raise ConfigError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
        if min(self.ranks) < 2:
            raise ConfigError(f"ranks: expected 2 or more (one rank is always measured), got {min(self.ranks)}")
        for name in ("batch_size", "seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: expected > 0, got {getattr(self, name)}")


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
            whole = _Whole(Path(folder) / dtype.value, tables, options, dtype)
            one_rank[dtype.value.lower()] = whole.placement(options)
            for ranks in options.ranks:
                sharding = whole.sharding(options, ranks)
                advice = recommend(whole.manifest.tables, whole.readers, sharding, errors)
                if dtype is options.dtypes[0] and ranks == max(options.ranks):
                    recommendations = advice
                for strategy in options.strategies:
                    step(f"{strategy} on {ranks} ranks, {dtype.value.lower()}")
                    placements.append(whole.place(strategy, advice, sharding, options))
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
        recommended_ranks=max(options.ranks),
        recommendations=recommendations,
    )


class _Whole:
    """The tables in one dtype, whole on one rank: what placements are cut from, and measured beside."""

    def __init__(self, directory: Path, tables: Tables, options: Options, dtype: WeightDtype) -> None:
        directory.mkdir()
        self._directory = directory
        self._tables = tables
        self._dtype = dtype
        self.manifest = self._describe(Sharding())
        for _ in store_rows(directory, tables.trained, self.manifest, tables.weights):
            pass
        self.readers = Counter(feature.table for feature in self.manifest.features)
        factors = {feature.name: tables.pooling_factors.get(feature.table, 1.0) for feature in self.manifest.features}
        self._requests = prepare(random_requests(self.manifest, options.batch_size, Distribution(), factors))
        self._program = compile_program(self.manifest)
        self._program.weights_host = map_weights(directory, self.manifest.plan)
        self._check(directory, self.manifest, self._program)

    def _describe(self, sharding: Sharding) -> Manifest:
        config = ExportConfig(dtype={"*": self._dtype}, sharding=sharding)
        return describe(self._tables.trained, config, lambda: self._tables.weights)

    def sharding(self, options: Options, ranks: int, types: Mapping[str, str] | None = None) -> Sharding:
        """What is asked of the planner."""
        return Sharding(
            ranks=ranks,
            ranks_per_host=options.ranks_per_host if ranks > (options.ranks_per_host or ranks) else None,
            memory_bytes=options.memory_bytes,
            types=types or {},
            pooling_factors={glob.escape(name): factor for name, factor in self._tables.pooling_factors.items()},
            batch_size=options.batch_size,
        )

    def placement(self, options: Options) -> Placement:
        """The one rank itself."""
        return self._measured("one_rank", self._directory, self.manifest, self.sharding(options, 1), options.seconds)

    def place(
        self, strategy: str, advice: Mapping[str, Recommendation], sharding: Sharding, options: Options
    ) -> Placement:
        """Cut the tables as `strategy` says, and measure."""
        types = {"*": strategy}
        if strategy == MIXED:
            types = {glob.escape(name): each.sharding_type for name, each in advice.items()}
        asked = self.sharding(options, sharding.ranks, types)
        try:
            manifest = self._describe(asked)
        except (PlanError, ConfigError) as error:
            return Placement(
                strategy=strategy,
                ranks=asked.ranks,
                hosts=asked.hosts,
                dtype=self._dtype.value.lower(),
                error=str(error),
            )
        with tempfile.TemporaryDirectory(dir=self._directory) as folder:
            self._cut(Path(folder), manifest)
            return self._measured(strategy, Path(folder), manifest, asked, options.seconds)

    def remove(self) -> None:
        """Free the disk."""
        for path in self._directory.iterdir():
            path.unlink()

    def _measured(
        self, strategy: str, directory: Path, manifest: Manifest, sharding: Sharding, seconds: float
    ) -> Placement:
        program = compile_program(manifest)
        program.weights_host = map_weights(directory, manifest.plan)
        self._check(directory, manifest, program)
        times = measure(program, self._program, self._requests, len(manifest.plan.ranks), seconds)
        report = report_plan(manifest, sharding)
        return Placement(
            strategy=strategy,
            ranks=sharding.ranks,
            hosts=sharding.hosts,
            dtype=self._dtype.value.lower(),
            sharding={table: kind.value for table, kind in manifest.plan.sharding.items()},
            latency_s=times.latency_s,
            latency_p99_s=times.latency_p99_s,
            over_one_rank=times.latency_s / times.one_rank_s,
            split_s=times.split_s,
            slowest_rank_s=times.slowest_rank_s,
            merge_s=times.merge_s,
            samples_per_s=sharding.batch_size / times.latency_s,
            rank_bytes=[rank.tables for rank in report.ranks],
            traffic=np.rint(traffic_between(manifest, sharding)).astype(int).tolist(),
        )

    def _cut(self, directory: Path, manifest: Manifest) -> None:
        """Write the ranks' files of `manifest` from the rows of the one rank."""
        stored = np.memmap(self._directory / self.manifest.plan.ranks[0].weights, np.uint8, mode="r")
        offsets = {shard.table: shard.offset_bytes for shard in self.manifest.plan.shards}
        files = {
            number: os.open(directory / rank.weights, os.O_WRONLY | os.O_CREAT)
            for number, rank in enumerate(manifest.plan.ranks)
        }
        try:
            for table in manifest.tables:
                rows = stored[offsets[table.name] :][: table.rows * table.row_bytes].reshape(table.rows, -1)
                step = max(1, _BLOCK_BYTES // table.row_bytes)
                for start in range(0, table.rows, step):
                    block = rows[start : start + step]
                    write_rows(files, table, manifest.plan.shards_by_table[table.name], start, block)
        finally:
            for file in files.values():
                os.close(file)

    def _check(self, directory: Path, manifest: Manifest, program: torch.jit.ScriptModule) -> None:
        """What is fast must also be right."""
        probe = make_probe(manifest)
        answer = run_program(program, probe)
        for feature, error in pool(directory, manifest, probe).misses(answer):
            raise ParityError(
                f"feature {feature!r}: the placement answers otherwise than its rows say, by {error:.3g}"
            )


def _errors(tables: Tables) -> dict[str, list[DtypeReport]]:
    """Every dtype that can hold it, for each table; in the order of their bytes."""
    found: dict[str, list[DtypeReport]] = {table.name: [] for table in tables.trained}
    for dtype in sorted(WeightDtype, key=lambda each: each.bits):
        packs = [table for table in tables.trained if _packs(table, dtype)]
        if not packs:
            continue
        agreements = _stored_errors(tables, packs, dtype)
        for table in packs:
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


def _stored_errors(tables: Tables, packs: Sequence[TrainedTable], dtype: WeightDtype) -> dict[str, Agreement]:
    config = ExportConfig(dtype={"*": dtype})
    manifest = describe(packs, config, lambda: tables.weights)
    with tempfile.TemporaryDirectory(prefix="tbe-compare-") as folder:
        return {
            name: error.tally.agreement
            for name, error, _ in store_rows(Path(folder), packs, manifest, tables.weights)
        }


def _packs(table: TrainedTable, dtype: WeightDtype) -> bool:
    try:
        check_dim(table.name, table.dim, dtype)
    except QuantizeError:
        return False
    return True


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
