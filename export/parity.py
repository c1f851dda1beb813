"""How far each table's answers move: float ↔ quantized ↔ scripted ↔ reloaded. The gate of an export."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from export.dequantize import FP16_SUBNORMAL, FP16_UNIT, FP32_UNIT, Bytes, Floats, dequantize
from export.errors import ParityError
from export.probe import Pooled
from serving.bundle import Manifest, Parity, Table, WeightDtype


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


def compare(
    manifest: Manifest,
    errors: Mapping[str, TableError],
    limits: Mapping[str, float | None],
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
    failures = pooled.refusals(manifest, scripted)
    program_errors = pooled.errors(manifest, scripted)
    parity = []
    for table in manifest.tables:
        error = errors[table.name]
        limit = error.bound if (chosen := limits[table.name]) is None else chosen
        failures += _refusals(table, error, limit)
        moved = np.abs(_columns(manifest, table, reloaded) - _columns(manifest, table, scripted))
        if moved.any():
            failures.append(f"table {table.name!r}: a fresh process answers differently, by {moved.max():.3g}")
        parity.append(
            Parity(
                table=table.name,
                quantized=error.quantized,
                mean=error.total / error.elements,
                limit=limit,
                scripted=program_errors[table.name],
                reloaded=float(moved.max()),
            )
        )
    if failures:
        raise ParityError("\n".join(failures))
    return tuple(parity)


def _refusals(table: Table, error: TableError, limit: float) -> list[str]:
    refusals = []
    if error.unexplained_row is not None:
        refusals.append(f"table {table.name!r}: row {error.unexplained_row} moved further than rounding explains")
    if error.quantized > limit:
        refusals.append(
            f"table {table.name!r}: {table.dtype.value} moves an element by {error.quantized:.3g}, "
            f"expected at most {limit:.3g}: store it as a wider dtype"
        )
    return refusals


def _columns(manifest: Manifest, table: Table, answer: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The columns of `answer` that came from `table`, of all features that read it."""
    of_feature = [feature.table == table.name for feature in manifest.features]
    dims = [each.dim for each in manifest.feature_tables]
    columns: npt.NDArray[np.float64] = answer[:, np.repeat(of_feature, dims)].astype(np.float64)
    return columns
