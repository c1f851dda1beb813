"""The baseline of a study: the tables in one dtype on one rank. Placements are cut from it and measured beside it."""

import glob
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import torch

from export.compare.measure import Times, measure
from export.compare.options import MIXED, StudyOptions
from export.compare.recommend import recommend
from export.compare.recut import recut_rows
from export.compare.study import DtypeReport, Placement, Recommendation
from export.compare.tables import ComparedTables
from export.compare.traffic import traffic_between
from export.errors import ParityError, PlanError
from export.parity.probe import Arguments, as_arguments, make_probe, run_program
from export.plan.report import report_plan
from export.plan.sharding import Sharding
from export.program.compile import compile_program
from export.rows.store_blocks import store_rows
from serving.bench.ids import Distribution, random_requests
from serving.bench.report import Figure
from serving.bundle.manifest import Manifest
from serving.bundle.rows import WeightDtype
from serving.bundle.weights import weights_paths
from serving.errors import ConfigurationError
from serving.ranks.weights import Weights
from serving.reference import pool

ONE_RANK = "one_rank"


class Baseline:
    """The tables in one dtype, each whole on one rank.

    Args:
        directory: takes the stored rows; must not exist.
        tables: the tables.
        options: how placements are made and measured.
        dtype: how all rows are stored.

    Raises:
        ConfigurationError, CheckpointError, QuantizeError: the tables cannot be stored.
        ParityError: the program answers otherwise than the stored rows say.
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
        self._requests = _requests(self._manifest, tables, options.batch_size)
        self._program = _checked_program(directory, self._manifest)

    def recommend(self, ranks: int, errors: Mapping[str, Sequence[DtypeReport]]) -> dict[str, Recommendation]:
        """What suits each table on so many ranks.

        Args:
            ranks: how many.
            errors: what each dtype does to each table.
        """
        readers = Counter(feature.table for feature in self._manifest.features)
        return recommend(self._manifest.tables, readers, self._sharding(ranks), errors)

    def place(self, strategy: str, ranks: int, advice: Mapping[str, Recommendation]) -> Placement:
        """Cut the tables over ranks as `strategy` says, and measure; `advice` is what MIXED follows.

        Returns:
            The placement. Its `error` says why where the tables cannot be placed so.

        Raises:
            ParityError: the placement answers otherwise than the stored rows say.
        """
        types = {"*": strategy}
        if strategy == MIXED:
            types = {glob.escape(name): each.sharding_type for name, each in advice.items()}
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
        """The baseline itself, with the times measured beside every placement: caches are as cold for both."""
        sharding = self._sharding(1)
        found = _placement(ONE_RANK, self._manifest, sharding, self._measure(self._program, 1))
        if not self._times:
            return found
        latency_s = Figure.of([each.one_rank_s.median for each in self._times])
        return msgspec.structs.replace(
            found,
            latency_s=latency_s,
            latency_p99_s=median(each.one_rank_p99_s for each in self._times),
            one_rank_s=latency_s,
            slowest_rank_s=latency_s.median,
            samples_per_s=sharding.batch_size / latency_s.median,
        )

    def remove(self) -> None:
        """Free the disk."""
        for path in self._directory.iterdir():
            path.unlink()

    def _sharding(self, ranks: int, types: Mapping[str, str] | None = None) -> Sharding:
        factors = self._tables.pooling_factors_by_pattern
        return replace(self._options.sharding(ranks), types=types or {}, pooling_factors=factors)

    def _measure(self, program: torch.jit.ScriptModule, ranks: int) -> Times:
        return measure(program, self._program, self._requests, ranks, self._options.seconds)


def _requests(manifest: Manifest, tables: ComparedTables, batch_size: int) -> list[Arguments]:
    """Requests of `batch_size` samples with uniform ids, as programs take them."""
    factors = {feature.key: tables.pooling_factor_of(feature.table) for feature in manifest.features}
    requests = random_requests(manifest, batch_size, Distribution(), factors)
    return [as_arguments(manifest, request, None) for request in requests]


def _checked_program(directory: Path, manifest: Manifest) -> torch.jit.ScriptModule:
    """The program of `manifest` over the weights files in `directory`. What is fast must also be right.

    Raises:
        ParityError: it answers a probe otherwise than the stored rows say.
    """
    program = compile_program(manifest)
    program.weights_host = Weights(directory, manifest).tensors
    probe = make_probe(manifest, {})
    expected = pool(directory, manifest, probe)
    for feature, error in expected.misses(expected.by_feature(run_program(program, manifest, probe, None))):
        raise ParityError(f"feature {feature!r}: the placement answers otherwise than its rows say, by {error:.3g}")
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
