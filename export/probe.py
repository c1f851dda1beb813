"""One request that asks every table, and its answer: by numpy, by a program here, by a fresh process."""

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
from torch import nn

from export.dequantize import FP16_SUBNORMAL, FP16_UNIT, FP32_UNIT, Floats
from export.errors import ParityError
from export.shards import read_rows
from serving.bundle import Manifest, OutputDtype, Pooling, Table

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

    @property
    def answer(self) -> npt.NDArray[np.float64]:
        """All features side by side [B, D]."""
        return np.concatenate(self.answers, axis=1)

    def refusals(self, manifest: Manifest, answer: npt.NDArray[Any]) -> list[str]:
        """A line for each feature whose columns of `answer` [B, D] are further off than rounding explains."""
        errors = np.abs(answer.astype(np.float64) - self.answer)
        ends = np.cumsum([table.dim for table in manifest.feature_tables])
        refusals = []
        for feature, bound, end in zip(manifest.features, self.bounds, ends, strict=True):
            error = errors[:, end - bound.shape[1] : end]
            if not (error <= bound).all():
                refusals.append(
                    f"table {feature.table!r}: the program is off by {error.max():.3g} for feature {feature.name!r}"
                )
        return refusals


def pool(directory: Path, manifest: Manifest, probe: Probe) -> Pooled:
    """Answer `probe` in float64 from the stored bytes."""
    pieces = manifest.plan.pieces_by_table
    ends = np.cumsum(probe.lengths.sum(axis=1))
    answers, bounds = [], []
    for table, bags, end in zip(manifest.feature_tables, probe.lengths, ends, strict=True):
        here = slice(end - bags.sum(), end)
        rows, sizes = read_rows(directory, manifest, pieces[table.name], table, probe.values[here])
        if probe.weights is not None:
            rows *= probe.weights[here, np.newaxis]
            sizes *= np.abs(probe.weights[here, np.newaxis])
        answer, bound = _pool_bags(rows, sizes, bags, table)
        if manifest.output_dtype is OutputDtype.FP16:
            bound += np.abs(answer) * FP16_UNIT + FP16_SUBNORMAL
        answers.append(answer)
        bounds.append(bound)
    return Pooled(answers, bounds)


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


def run_program(program: nn.Module, probe: Probe) -> npt.NDArray[Any]:
    """A program's answer to `probe`, [B, D]; compiled or not."""
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
