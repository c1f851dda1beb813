"""How far each table's numbers move: float ↔ quantized ↔ sharded ↔ scripted ↔ reloaded. The gate of an export."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from export.agreement import Tally, difference
from export.errors import ParityError
from export.probe import make_probe, run_program, run_reloaded
from export.program import build_program
from serving.bundle import Agreement, Manifest, Parity, Table, WeightDtype
from serving.dequantize import FP16_SUBNORMAL, FP16_UNIT, FP32_UNIT, Bytes, Floats, dequantize
from serving.engine import map_weights
from serving.kjt import Tensors
from serving.reference import Pooled, pool


def rounding_bounds(rows: Floats, stored: Bytes, dtype: WeightDtype) -> npt.NDArray[np.float64]:
    """The largest error of any element of each row that rounding alone can make [n].

    Codes round to half a step. Scale and bias are themselves rounded to FP16, which moves the largest code by
    its own size times FP16's half unit, and the bias by its.
    """
    if dtype is WeightDtype.FP32:
        return np.zeros(len(rows))
    if dtype is WeightDtype.FP16:
        bound: npt.NDArray[np.float64] = np.abs(rows).max(axis=1) * FP16_UNIT + FP16_SUBNORMAL
        return bound
    qparams = stored[:, :4].copy().view(np.float16).astype(np.float64)
    scale, bias = qparams[:, 0], np.abs(qparams[:, 1])
    steps = 2**dtype.bits - 1
    step: npt.NDArray[np.float64] = scale * (0.5 + steps * FP16_UNIT) + (steps + 1) * FP16_SUBNORMAL
    # The op computes in FP32: a few of its units of the largest number in the row.
    step += bias * FP16_UNIT + 4 * FP32_UNIT * (bias + steps * scale)
    return step


@dataclass(slots=True)
class TableError:
    """The error of one table's stored rows, and its largest element by size, gathered block by block."""

    dtype: WeightDtype
    tally: Tally = field(default_factory=Tally)
    bound: float = 0.0
    largest: float = 0.0
    unexplained_row: int | None = None

    def add(self, start: int, rows: Floats, stored: Bytes) -> None:
        """Compare float `rows` [n, dim], the first of which is row `start`, with what was stored for them."""
        worst = self.tally.add(start, rows, dequantize(stored, self.dtype))
        self.largest = max(self.largest, float(rows.max()), -float(rows.min()))
        bounds = rounding_bounds(rows, stored, self.dtype)
        self.bound = max(self.bound, float(bounds.max()))
        if self.unexplained_row is None and (worst > bounds).any():
            self.unexplained_row = start + int(np.argmax(worst > bounds))

    def join(self, later: "TableError") -> None:
        """Take in what was found in rows behind these."""
        self.tally.join(later.tally)
        self.bound = max(self.bound, later.bound)
        self.largest = max(self.largest, later.largest)
        if self.unexplained_row is None:
            self.unexplained_row = later.unexplained_row


@dataclass(frozen=True, slots=True)
class Answers:
    """A probe, and its answers [B, D] on the way from the stored rows to a served model."""

    probe: Tensors
    pooled: Pooled
    sharded: npt.NDArray[Any]
    scripted: npt.NDArray[Any]
    reloaded: npt.NDArray[Any]

    def refusals(self, manifest: Manifest) -> list[str]:
        """A line for each table that moved where it may not: anywhere, or further than FP32 summation explains."""
        tables = {feature.name: feature.table for feature in manifest.features}
        refusals = [
            f"table {tables[name]!r}: the program is off by {error:.3g} for feature {name!r}"
            for name, error in self.pooled.misses(self.sharded)
        ]
        for what, before, after in (
            ("the compiled program", self.sharded, self.scripted),
            ("a fresh process", self.scripted, self.reloaded),
        ):
            for table in manifest.tables:
                moved = difference(_of_table(manifest, table, after), _of_table(manifest, table, before))
                if moved.any():
                    largest = np.abs(moved).max()
                    refusals.append(f"table {table.name!r}: {what} answers differently, by {largest:.3g}")
        return refusals

    def parity(self, manifest: Manifest, table: Table, quantized: Agreement, limit: float) -> Parity:
        """All steps of one table."""

        def step(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> Agreement:
            tally = Tally()
            tally.add(0, _of_table(manifest, table, before), _of_table(manifest, table, after))
            return tally.agreement

        return Parity(
            table=table.name,
            limit=limit,
            quantized=quantized,
            # Where a sum may leave the range of its dtype, there is nothing to compare with.
            sharded=step(np.where(np.isinf(self.pooled.bound), self.sharded, self.pooled.answer), self.sharded),
            scripted=step(self.sharded, self.scripted),
            reloaded=step(self.scripted, self.reloaded),
        )


def answer_probe(directory: Path, manifest: Manifest, program: nn.Module) -> Answers:
    """Answer a probe at each step.

    Args:
        directory: of a bundle, published or not, with a manifest.
        manifest: its manifest.
        program: the compiled one.

    Raises:
        ParityError: a fresh process cannot answer from the directory.
    """
    probe = make_probe(manifest)
    built = build_program(manifest)
    for each in (built, program):
        each.weights_host = map_weights(directory, manifest.plan)  # type: ignore[assignment]
    return Answers(
        probe=probe,
        pooled=pool(directory, manifest, probe),
        sharded=run_program(built, manifest, probe),
        scripted=run_program(program, manifest, probe),
        reloaded=run_reloaded(directory, probe),
    )


def check_parity(
    manifest: Manifest, errors: Mapping[str, TableError], limits: Mapping[str, float | None], answers: Answers
) -> tuple[Parity, ...]:
    """The parity of every table.

    Args:
        errors: float ↔ quantized, by table.
        limits: `ExportConfig.max_error`, by table.
        answers: to one probe.

    Raises:
        ParityError: naming each table that moved further than its limit, and the step at which it did.
    """
    failures = answers.refusals(manifest)
    parity = []
    for table in manifest.tables:
        error = errors[table.name]
        limit = error.bound if (chosen := limits[table.name]) is None else chosen
        failures += _refusals(table, error, limit)
        parity.append(answers.parity(manifest, table, error.tally.agreement, limit))
    if failures:
        raise ParityError("\n".join(failures))
    return tuple(parity)


def _refusals(table: Table, error: TableError, limit: float) -> list[str]:
    refusals = []
    if error.unexplained_row is not None:
        refusals.append(f"table {table.name!r}: row {error.unexplained_row} moved further than rounding explains")
    if error.tally.largest > limit:
        refusals.append(
            f"table {table.name!r}: {table.dtype.value} moves an element by {error.tally.largest:.3g}, "
            f"expected at most {limit:.3g}: store it as a wider dtype"
        )
    return refusals


def _of_table(manifest: Manifest, table: Table, answer: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The columns of `answer` that came from `table`, of all features that read it."""
    of_feature = [feature.table == table.name for feature in manifest.features]
    dims = [each.dim for each in manifest.feature_tables]
    columns: npt.NDArray[np.float64] = answer[:, np.repeat(of_feature, dims)].astype(np.float64)
    return columns
