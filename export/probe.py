"""One request that asks every table, and its answer in three ways: numpy, the program here, a fresh process."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from export.dequantize import FP16_SUBNORMAL, FP16_UNIT, FP32_UNIT, Bytes, Floats, dequantize
from export.errors import ParityError
from serving.bundle import Manifest, OutputDtype, Pooling, Shard, Table, WeightDtype

_SEED = 20_451
_SAMPLES = 64
_LONGEST_BAG = 100


@dataclass(frozen=True, slots=True)
class Probe:
    """One request over all features: values int64 [N], lengths int32 [F, B], weights float32 [N] or None."""

    values: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    weights: Floats | None


def make_probe(manifest: Manifest) -> Probe:
    """A seeded request with empty bags, a long bag, and the first and last row of every table."""
    random = np.random.default_rng(_SEED)
    tables = manifest.feature_tables
    lengths = random.integers(0, 9, (len(tables), _SAMPLES)).astype(np.int32)
    lengths[:, 0] = _LONGEST_BAG
    lengths[:, 1] = 0
    columns = []
    for table, bags in zip(tables, lengths, strict=True):
        ids = random.integers(0, table.rows, bags.sum())
        ids[:2] = 0, table.rows - 1
        columns.append(ids)
    values = np.concatenate(columns)
    weights = random.normal(size=values.size).astype(np.float32) if manifest.weighted else None
    if weights is not None:
        counted = np.repeat([table.weighted for table in tables], lengths.sum(axis=1))
        weights[~counted] = 1
    return Probe(values, lengths, weights)


@dataclass(frozen=True, slots=True)
class Pooled:
    """What numpy says a probe's answer is, and how far FP32 summation may be from it, by feature [B, dim]."""

    answers: Sequence[npt.NDArray[np.float64]]
    bounds: Sequence[npt.NDArray[np.float64]]

    def errors(self, manifest: Manifest, answer: npt.NDArray[Any]) -> dict[str, float]:
        """The largest difference between `answer` [B, D] and numpy's, by table."""
        errors = {table.name: 0.0 for table in manifest.tables}
        for feature, step in zip(manifest.features, self._steps(answer), strict=True):
            errors[feature.table] = max(errors[feature.table], float(step.max()))
        return errors

    def refusals(self, manifest: Manifest, answer: npt.NDArray[Any]) -> list[str]:
        """A line for each feature whose columns of `answer` [B, D] are further off than rounding explains."""
        return [
            f"table {feature.table!r}: the program is off by {step.max():.3g} for feature {feature.name!r}"
            for feature, step, bound in zip(manifest.features, self._steps(answer), self.bounds, strict=True)
            if not (step <= bound).all()
        ]

    def _steps(self, answer: npt.NDArray[Any]) -> list[npt.NDArray[np.float64]]:
        ends = np.cumsum([expected.shape[1] for expected in self.answers])
        return [
            np.abs(answer[:, end - expected.shape[1] : end].astype(np.float64) - expected)
            for expected, end in zip(self.answers, ends, strict=True)
        ]


def pool(directory: Path, manifest: Manifest, probe: Probe) -> Pooled:
    """Answer `probe` in float64 from the stored bytes."""
    shards = {shard.table: shard for shard in manifest.plan.shards}
    ends = np.cumsum(probe.lengths.sum(axis=1))
    answers, bounds = [], []
    for table, bags, end in zip(manifest.feature_tables, probe.lengths, ends, strict=True):
        here = slice(end - bags.sum(), end)
        stored = _stored_rows(directory, manifest, shards[table.name], table)[probe.values[here]]
        rows = dequantize(stored, table.dtype).astype(np.float64)
        sizes = _sizes(rows, stored, table.dtype)
        if probe.weights is not None:
            rows *= probe.weights[here, np.newaxis]
            sizes *= np.abs(probe.weights[here, np.newaxis])
        answer, bound = _pool_bags(rows, sizes, bags, table)
        if manifest.output_dtype is OutputDtype.FP16:
            bound += np.abs(answer) * FP16_UNIT + FP16_SUBNORMAL
        answers.append(answer)
        bounds.append(bound)
    return Pooled(answers, bounds)


def _stored_rows(directory: Path, manifest: Manifest, shard: Shard, table: Table) -> Bytes:
    return np.memmap(
        directory / manifest.plan.ranks[shard.rank].weights,
        np.uint8,
        mode="r",
        offset=shard.offset_bytes,
        shape=(table.rows, table.row_bytes),
    )


def _sizes(rows: npt.NDArray[np.float64], stored: Bytes, dtype: WeightDtype) -> npt.NDArray[np.float64]:
    """What rounding acts on: |code × scale| + |bias|, which may cancel to a small number [n, dim]."""
    bias = stored[:, 2:4].copy().view(np.float16).astype(np.float64) if dtype.quantized else 0.0
    sizes: npt.NDArray[np.float64] = np.abs(rows - bias) + np.abs(bias)
    return sizes


def _pool_bags(
    rows: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64], bags: npt.NDArray[np.int32], table: Table
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    bag_of = np.repeat(np.arange(bags.size), bags)
    answer = np.zeros((bags.size, table.dim))
    size = np.zeros_like(answer)
    np.add.at(answer, bag_of, rows)
    np.add.at(size, bag_of, sizes)
    # Each of the bag's additions, and the arithmetic of a row, may round once.
    bound = size * ((bags[:, np.newaxis] + 8) * FP32_UNIT)
    if table.pooling is Pooling.MEAN:
        counts = np.maximum(bags, 1)[:, np.newaxis]
        answer, bound = answer / counts, bound / counts
    return answer, bound


def run_program(program: torch.jit.ScriptModule, probe: Probe) -> npt.NDArray[Any]:
    """The program's own answer to `probe`, [B, D]."""
    offsets = np.concatenate([[0], np.cumsum(probe.lengths)])
    weights = None if probe.weights is None else torch.from_numpy(probe.weights)
    answer: npt.NDArray[Any] = program(
        torch.from_numpy(probe.values), torch.from_numpy(offsets), weights, None
    ).numpy()
    return answer


def run_reloaded(directory: Path, probe: Probe) -> npt.NDArray[Any]:
    """The answer of a fresh process that opens the bundle at `directory` as serving does, [B, D].

    Raises:
        ParityError: it cannot open the bundle, or refuses the probe.
    """
    with tempfile.TemporaryDirectory() as folder:
        arrays: dict[str, npt.NDArray[Any]] = {"values": probe.values, "lengths": probe.lengths.ravel()}
        if probe.weights is not None:
            arrays["weights"] = probe.weights
        np.savez(Path(folder) / "probe.npz", **arrays)
        command = [sys.executable, "-P", str(Path(__file__).with_name("reload.py")), str(directory), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ParityError(f"{directory}: a fresh process could not answer from it:\n{done.stderr.strip()}")
        answer: npt.NDArray[Any] = np.load(Path(folder) / "answer.npy", allow_pickle=False)
        return answer
