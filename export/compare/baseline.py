"""The baseline of a study: the tables in one dtype on one rank. Placements are made from it, and compared with it."""

import glob
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
from torch import nn

from export.compare.measure import Times, measure, traffic_between
from export.compare.recommend import recommend
from export.compare.study import MIXED, DtypeReport, Placement, Recommendation, StudyOptions
from export.config import ExportConfig
from export.errors import ParityError, PlanError
from export.parity.answers import Arguments, as_arguments, run_program
from export.plan.report import report_plan
from export.plan.sharding import Sharding
from export.prepare import describe
from export.program.compile import compile_program
from export.rows.rank_files import store_rows, write_rows
from export.trained.checkpoint import Checkpoint
from export.trained.probe_request import make_probe
from export.trained.tables import TrainedTable
from serving.bench.report import Figure
from serving.bench.requests import Distribution, random_requests
from serving.bundle.formats import WeightDtype
from serving.bundle.load import weights_path, weights_paths
from serving.bundle.manifest import Manifest
from serving.errors import ConfigurationError
from serving.lookup.build_program import build_program
from serving.reference import pool
from serving.tables.table_files import TableFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedTables:
    """Tables, and the traffic that they are measured with.

    Attributes:
        trained: the tables.
        weights: the checkpoint with their rows.
        pooling_factors: mean number of ids in a bag, by table. 1 for a table that is missing.
        generated: whether the rows are random, not trained.

    Raises:
        ConfigurationError: a pooling factor cannot be used.
    """

    trained: Sequence[TrainedTable]
    weights: Checkpoint
    pooling_factors: Mapping[str, float]
    generated: bool

    def __post_init__(self) -> None:
        Sharding(pooling_factors=self.pooling_factors)  # checks them

    def pooling_factor_of(self, table: str) -> float:
        """Mean number of ids in a bag of `table`."""
        return self.pooling_factors.get(table, 1.0)

    @property
    def pooling_factors_by_pattern(self) -> dict[str, float]:
        """The pooling factors for Sharding, which takes names as globs."""
        return {glob.escape(name): factor for name, factor in self.pooling_factors.items()}

    def describe(self, dtype: WeightDtype, sharding: Sharding, of: Sequence[TrainedTable] | None = None) -> Manifest:
        """The manifest of the tables, or of some `of` them, in one dtype.

        Raises:
            ConfigurationError, QuantizeError, PlanError: as `export_model`.
        """
        config = ExportConfig(dtype={"*": dtype}, sharding=sharding)
        return describe(self.trained if of is None else of, config, lambda: self.weights)


_BLOCK_BYTES = 1 << 24


def recut_rows(source: Path, one_rank: Manifest, target: Path, manifest: Manifest) -> None:
    """Write the weights files of `manifest` into `target`.

    Args:
        source: the folder with the weights file of `one_rank`.
        one_rank: the manifest of the same tables in the same dtypes, each whole on the only rank.
        target: the folder for the new weights files.
        manifest: the tables in the new plan.
    """
    stored = np.memmap(weights_path(source, one_rank, 0), np.uint8, mode="r")
    offsets = {shard.table: shard.offset_bytes for shard in one_rank.plan.shards}
    files = {
        number: os.open(weights_path(target, manifest, number), os.O_WRONLY | os.O_CREAT)
        for number in range(len(manifest.plan.ranks))
    }
    shards = manifest.plan.shards_by_table
    try:
        for table in manifest.tables:
            rows = stored[offsets[table.name] :][: table.rows * table.row_bytes].reshape(table.rows, -1)
            step = max(1, _BLOCK_BYTES // table.row_bytes)
            for start in range(0, table.rows, step):
                block = rows[start : start + step]
                write_rows(files, table, shards[table.name], start, block)
    finally:
        for file in files.values():
            os.close(file)


ONE_RANK = "one_rank"


class Baseline:
    """The tables in one dtype, each whole on one rank.

    Args:
        directory: the folder for the stored rows. It must not exist.
        tables: the tables.
        options: how placements are made and measured.
        dtype: how all rows are stored.

    Raises:
        ConfigurationError, CheckpointError, QuantizeError: the tables cannot be stored.
        ParityError: the program's answers differ from the stored rows.
    """

    def __init__(self, directory: Path, tables: ComparedTables, options: StudyOptions, dtype: WeightDtype) -> None:
        directory.mkdir()
        self._directory = directory
        self._tables = tables
        self._options = options
        self._dtype = dtype
        self._times: list[Times] = []
        self._manifest = tables.describe(dtype, Sharding())
        for _ in store_rows(weights_paths(directory, self._manifest), tables.trained, self._manifest, tables.weights):
            pass
        tables.weights.check_unchanged()
        self._requests = _requests(self._manifest, tables, options.batch_size)
        self._program = _checked_program(directory, self._manifest)

    def recommend(self, ranks: int, errors: Mapping[str, Sequence[DtypeReport]]) -> dict[str, Recommendation]:
        """The recommended sharding type and dtype of each table.

        Args:
            ranks: number of ranks.
            errors: bytes and error of each table in each dtype.
        """
        readers = Counter(feature.table for feature in self._manifest.features)
        return recommend(self._manifest.tables, readers, self._sharding(ranks), errors)

    def place(self, strategy: str, ranks: int, advice: Mapping[str, Recommendation]) -> Placement:
        """Shard the tables over ranks by a strategy, and measure.

        Args:
            strategy: of STRATEGIES.
            ranks: number of ranks.
            advice: the recommendations, for MIXED.

        Returns:
            The placement. If the tables cannot be placed this way, its `error` says why.

        Raises:
            ParityError: the placement's answers differ from the stored rows.
        """
        types = {"*": strategy}
        if strategy == MIXED:
            types = {glob.escape(name): advice_of_table.sharding_type for name, advice_of_table in advice.items()}
        sharding = self._sharding(ranks, types)
        try:
            manifest = self._tables.describe(self._dtype, sharding)
        except (PlanError, ConfigurationError) as error:
            return Placement(
                strategy=strategy,
                ranks=sharding.ranks,
                hosts=sharding.hosts,
                dtype=self._dtype.value.lower(),
                error=str(error),
            )
        with tempfile.TemporaryDirectory(dir=self._directory) as folder:
            recut_rows(self._directory, self._manifest, Path(folder), manifest)
            program = _checked_program(Path(folder), manifest)
            times = self._measure(program, ranks)
        self._times.append(times)
        return _placement(strategy, manifest, sharding, times)

    def placement(self) -> Placement:
        """The baseline itself. It was timed in turn with the placements, so that caches were as cold for both."""
        sharding = self._sharding(1)
        placement = _placement(ONE_RANK, self._manifest, sharding, self._measure(self._program, 1))
        if not self._times:
            return placement
        latency_s = Figure.of([times.one_rank_s.median for times in self._times])
        return msgspec.structs.replace(
            placement,
            latency_s=latency_s,
            latency_p99_s=median(times.one_rank_p99_s for times in self._times),
            one_rank_s=latency_s,
            slowest_rank_s=latency_s.median,
            samples_per_s=sharding.batch_size / latency_s.median,
        )

    def remove(self) -> None:
        """Remove the stored rows."""
        for path in self._directory.iterdir():
            path.unlink()

    def _sharding(self, ranks: int, types: Mapping[str, str] | None = None) -> Sharding:
        factors = self._tables.pooling_factors_by_pattern
        return replace(self._options.sharding(ranks), types=types or {}, pooling_factors=factors)

    def _measure(self, program: nn.Module, ranks: int) -> Times:
        return measure(program, self._program, self._requests, ranks, self._options.seconds)


def _requests(manifest: Manifest, tables: ComparedTables, batch_size: int) -> list[Arguments]:
    """Requests of `batch_size` samples with uniform ids, as programs take them."""
    factors = {feature.key: tables.pooling_factor_of(feature.table) for feature in manifest.features}
    requests = random_requests(manifest, batch_size, Distribution(), factors)
    return [as_arguments(manifest, request, None) for request in requests]


def _checked_program(directory: Path, manifest: Manifest) -> nn.Module:
    """The program of `manifest` over the weights files in `directory`, checked on a probe.

    Raises:
        ParityError: its answers to the probe differ from the stored rows.
    """
    program = compile_program(manifest) or build_program(manifest)
    program.weights_host = TableFiles(directory, manifest).tensors  # type: ignore[assignment]
    probe = make_probe(manifest, {})
    expected = pool(directory, manifest, probe)
    for feature, error in expected.misses(expected.by_feature(run_program(program, manifest, probe, None))):
        raise ParityError(f"feature {feature!r}: the placement's answers differ from the stored rows by {error:.3g}")
    return program


def _placement(strategy: str, manifest: Manifest, sharding: Sharding, times: Times) -> Placement:
    report = report_plan(manifest, sharding)
    return Placement(
        strategy=strategy,
        ranks=sharding.ranks,
        hosts=sharding.hosts,
        dtype=manifest.tables[0].dtype.value.lower(),
        sharding={table: kind.value for table, kind in manifest.plan.sharding.items()},
        latency_s=times.latency_s,
        latency_p99_s=times.latency_p99_s,
        one_rank_s=times.one_rank_s,
        over_one_rank=times.over_one_rank,
        side_by_side_over_one_rank=times.side_by_side_over_one_rank,
        split_s=times.split_s,
        slowest_rank_s=times.slowest_rank_s,
        merge_s=times.merge_s,
        samples_per_s=sharding.batch_size / times.latency_s.median,
        rank_bytes=[rank.tables for rank in report.ranks],
        traffic=np.rint(traffic_between(manifest, sharding)).astype(int).tolist(),
    )
