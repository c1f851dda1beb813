"""How far each table's answers move: float ↔ quantized ↔ scripted ↔ reloaded. The gate of an export.

The oracle is numpy: it reads the stored bytes by their published format and shares no code with the program.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from export.errors import ParityError
from serving.bundle import Manifest, OutputDtype, Parity, Pooling, Shard, Table, WeightDtype

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_PROBE_SEED = 20_451
_PROBE_SAMPLES = 64
_LONGEST_BAG = 100
_FP16_ULP = 2.0**-11
_FP16_SUBNORMAL = 2.0**-25
_FP32_ULP = 2.0**-24


def dequantize(rows: Bytes, dtype: WeightDtype) -> Floats:
    """The numbers that stored rows stand for.

    Args:
        rows: uint8 [n, row bytes], in the format of `serving.bundle`.

    Returns:
        float32 [n, dim].
    """
    if dtype is WeightDtype.FP32:
        return rows.view(np.float32)
    if dtype is WeightDtype.FP16:
        return rows.view(np.float16).astype(np.float32)
    qparams = rows[:, :4].copy().view(np.float16).astype(np.float32)
    codes = rows[:, 4:]
    if dtype is not WeightDtype.INT8:
        shifts = np.arange(0, 8, dtype.bits, dtype=np.uint8)
        codes = (codes[:, :, np.newaxis] >> shifts) & np.uint8(2**dtype.bits - 1)
        codes = codes.reshape(len(rows), -1)
    numbers: Floats = codes.astype(np.float32)
    numbers *= qparams[:, :1]
    numbers += qparams[:, 1:]
    return numbers


def rounding_bounds(rows: Floats, stored: Bytes, dtype: WeightDtype) -> npt.NDArray[np.float64]:
    """The largest error of any element of each row that rounding alone can make [n].

    Codes round to half a step. Scale and bias are themselves rounded to FP16, which moves the largest code by
    its own size times FP16's half unit, and the bias by its.
    """
    if dtype is WeightDtype.FP32:
        return np.zeros(len(rows))
    if dtype is WeightDtype.FP16:
        bound: npt.NDArray[np.float64] = np.abs(rows).max(axis=1) * _FP16_ULP + _FP16_SUBNORMAL
        return bound
    qparams = stored[:, :4].copy().view(np.float16).astype(np.float64)
    scale, bias = qparams[:, 0], np.abs(qparams[:, 1])
    steps = 2**dtype.bits - 1
    step: npt.NDArray[np.float64] = scale * (0.5 + steps * _FP16_ULP) + (steps + 1) * _FP16_SUBNORMAL
    # The op computes in FP32: a few of its units of the largest number in the row.
    step += bias * _FP16_ULP + 4 * _FP32_ULP * (bias + steps * scale)
    return step


@dataclass(slots=True)
class TableError:
    """The error of one table's stored rows, gathered block by block."""

    dtype: WeightDtype
    quantized: float = 0.0
    total: float = 0.0
    elements: int = 0
    bound: float = 0.0
    unexplained_row: int | None = field(default=None)

    def add(self, start: int, rows: Floats, stored: Bytes) -> None:
        """Compare float `rows` [n, dim], the first of which is row `start`, with what was stored for them."""
        error = rows - dequantize(stored, self.dtype)
        np.abs(error, out=error)
        worst = error.max(axis=1)
        bounds = rounding_bounds(rows, stored, self.dtype)
        self.quantized = max(self.quantized, float(worst.max()))
        self.total += float(error.sum(dtype=np.float64))
        self.elements += error.size
        self.bound = max(self.bound, float(bounds.max()))
        if self.unexplained_row is None and (worst > bounds).any():
            self.unexplained_row = start + int(np.argmax(worst > bounds))


@dataclass(frozen=True, slots=True)
class Probe:
    """One request over all features: values int64 [N], lengths int32 [F, B], weights float32 [N] or None."""

    values: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    weights: Floats | None


def make_probe(manifest: Manifest) -> Probe:
    """A seeded request with empty bags, a long bag, and the first and last row of every table."""
    random = np.random.default_rng(_PROBE_SEED)
    tables = manifest.feature_tables
    lengths = random.integers(0, 9, (len(tables), _PROBE_SAMPLES)).astype(np.int32)
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
            bound += np.abs(answer) * _FP16_ULP + _FP16_SUBNORMAL
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
    bound = size * ((bags[:, np.newaxis] + 8) * _FP32_ULP)
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


def compare(
    manifest: Manifest,
    errors: dict[str, TableError],
    limits: dict[str, float | None],
    pooled: Pooled,
    scripted: npt.NDArray[Any],
    reloaded: npt.NDArray[Any],
) -> tuple[Parity, ...]:
    """The parity of every table.

    Args:
        errors: float ↔ quantized, by table.
        limits: `ExportConfig.max_error`, by table.
        pooled: numpy's answers to the probe.
        scripted: the program's answer in this process [B, D].
        reloaded: the answer of a fresh process [B, D].

    Raises:
        ParityError: naming each table that moved further than its limit, and the step at which it did.
    """
    failures = []
    moved = {name: [0.0, 0.0] for name in errors}
    ends = np.cumsum([table.dim for table in manifest.feature_tables])
    for position, table in enumerate(manifest.feature_tables):
        here = slice(ends[position] - table.dim, ends[position])
        step = np.abs(scripted[:, here].astype(np.float64) - pooled.answers[position])
        again = np.abs(reloaded[:, here].astype(np.float64) - scripted[:, here].astype(np.float64))
        moved[table.name] = [
            max(moved[table.name][0], float(step.max())),
            max(moved[table.name][1], float(again.max())),
        ]
        feature = manifest.features[position].name
        if not (step <= pooled.bounds[position]).all():
            failures.append(f"table {table.name!r}: the program is off by {step.max():.3g} for feature {feature!r}")
        if not np.array_equal(reloaded[:, here], scripted[:, here]):
            failures.append(f"table {table.name!r}: a fresh process answers differently for feature {feature!r}")

    parity = []
    for name, error in errors.items():
        limit = error.bound if (chosen := limits[name]) is None else chosen
        if error.unexplained_row is not None:
            failures.append(f"table {name!r}: row {error.unexplained_row} moved further than rounding explains")
        if error.quantized > limit:
            failures.append(
                f"table {name!r}: {error.dtype.value} moves an element by {error.quantized:.3g}, "
                f"expected at most {limit:.3g}: store it as a wider dtype"
            )
        parity.append(
            Parity(
                table=name,
                quantized=error.quantized,
                mean=error.total / error.elements,
                limit=limit,
                scripted=moved[name][0],
                reloaded=moved[name][1],
            )
        )
    if failures:
        raise ParityError("\n".join(failures))
    return tuple(parity)
