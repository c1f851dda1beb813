"""Tables whole on one rank, and every placement that is cut from them, built, checked and measured."""

import glob
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import torch

from export.compare.asked import MIXED, Options, Tables
from export.compare.measure import Times, measure
from export.compare.study import Placement, Recommendation
from export.compare.traffic import traffic_between
from export.config import ExportConfig
from export.errors import ConfigError, ParityError, PlanError
from export.pipeline import describe
from export.plan_report import report_plan
from export.probe import as_arguments, make_probe, run_program
from export.program import compile_program
from export.sharding import Sharding
from export.shards import write_rows
from export.store import store_rows
from serving.bundle import Manifest, WeightDtype
from serving.engine import map_weights
from serving.load.ids import Distribution, random_requests
from serving.load.report import Figure
from serving.reference import pool

ONE_RANK = "one_rank"
_BLOCK_BYTES = 1 << 24


class Whole:
    """The tables in one dtype, whole on one rank: what placements are cut from, and measured beside."""

    def __init__(self, directory: Path, tables: Tables, options: Options, dtype: WeightDtype) -> None:
        directory.mkdir()
        self._directory = directory
        self._times: list[Times] = []
        self._tables = tables
        self._dtype = dtype
        self.manifest = self._describe(Sharding())
        for _ in store_rows(directory, tables.trained, self.manifest, tables.weights):
            pass
        self.readers = Counter(feature.table for feature in self.manifest.features)
        factors = {feature.key: tables.pooling_factors.get(feature.table, 1.0) for feature in self.manifest.features}
        requests = random_requests(self.manifest, options.batch_size, Distribution(), factors)
        self._requests = [as_arguments(self.manifest, request) for request in requests]
        self._program = compile_program(self.manifest)
        self._program.weights_host = map_weights(directory, self.manifest.plan)
        self._check(directory, self.manifest, self._program)

    def _describe(self, sharding: Sharding) -> Manifest:
        config = ExportConfig(dtype={"*": self._dtype}, sharding=sharding)
        return describe(self._tables.trained, config, lambda: self._tables.weights)

    def sharding(self, options: Options, ranks: int, types: Mapping[str, str] | None = None) -> Sharding:
        """What is asked of the planner."""
        return replace(
            options.sharding(ranks),
            types=types or {},
            pooling_factors={glob.escape(name): factor for name, factor in self._tables.pooling_factors.items()},
        )

    def placement(self, options: Options) -> Placement:
        """The one rank itself, as it was measured beside every placement: caches are as cold for both."""
        found = self._measured(ONE_RANK, self._directory, self.manifest, self.sharding(options, 1), options.seconds)
        if not self._times:
            return found
        latency_s = Figure.of([each.one_rank_s.median for each in self._times])
        return msgspec.structs.replace(
            found,
            latency_s=latency_s,
            latency_p99_s=median(each.one_rank_p99_s for each in self._times),
            one_rank_s=latency_s,
            slowest_rank_s=latency_s.median,
            samples_per_s=options.batch_size / latency_s.median,
        )

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
        if strategy != ONE_RANK:
            self._times.append(times)
        report = report_plan(manifest, sharding)
        return Placement(
            strategy=strategy,
            ranks=sharding.ranks,
            hosts=sharding.hosts,
            dtype=self._dtype.value.lower(),
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
        answer = run_program(program, manifest, probe)
        for feature, error in pool(directory, manifest, probe).misses(answer):
            raise ParityError(
                f"feature {feature!r}: the placement answers otherwise than its rows say, by {error:.3g}"
            )
