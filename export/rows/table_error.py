"""How far the stored rows of a table are from its float ones, and how far rounding alone can move them."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from export.rows.tally import Tally
from serving.bundle.rows import (
    FP16_SUBNORMAL,
    FP16_UNIT,
    FP32_UNIT,
    Bytes,
    Floats,
    WeightDtype,
    dequantize,
    scales_and_biases_of,
)

Doubles = npt.NDArray[np.float64]


def rounding_bounds(rows: Floats, stored: Bytes, dtype: WeightDtype) -> Doubles:
    """The largest error of an element of each row that rounding alone can make.

    Args:
        rows: float32 [n, dim].
        stored: uint8 [n, row bytes], what was stored for them.
        dtype: how they are stored.

    Returns:
        float64 [n].
    """
    if dtype.format.float_name is None:
        return _bounds_of_codes(stored, dtype)
    if dtype is WeightDtype.FP32:
        return np.zeros(len(rows))
    number = np.finfo(dtype.format.float_name)
    half_unit, half_subnormal = float(number.eps) / 2, float(number.smallest_subnormal) / 2
    bounds: Doubles = np.abs(rows).max(axis=1) * half_unit + half_subnormal
    return bounds


def _bounds_of_codes(stored: Bytes, dtype: WeightDtype) -> Doubles:
    """The largest error of an element of each row that was stored as codes: uint8 [n, row bytes] → float64 [n].

    A number rounds to its nearest code, half a step away at most. Scale and bias round to FP16. The rounded scale
    moves the largest code by its own size times half a unit of FP16, the rounded bias moves all by half a unit of it.
    """
    scales_and_biases = scales_and_biases_of(stored).astype(np.float64)
    scale, bias = scales_and_biases[:, 0], np.abs(scales_and_biases[:, 1])
    steps = dtype.format.largest_code
    bounds: Doubles = scale * (0.5 + steps * FP16_UNIT) + (steps + 1) * FP16_SUBNORMAL
    # The op computes in FP32: a few of its units of the largest number in the row.
    bounds += bias * FP16_UNIT + 4 * FP32_UNIT * (bias + steps * scale)
    return bounds


@dataclass(slots=True)
class TableError:
    """The error of one table's stored rows, gathered block by block.

    Attributes:
        dtype: how the rows are stored.
        tally: of float and stored elements.
        bound: the largest error of an element that rounding can make in any of the rows.
        largest: the largest |element| of the float rows.
        unexplained_row: the first row that moved further than rounding can move it, or None.
    """

    dtype: WeightDtype
    tally: Tally = field(default_factory=Tally)
    bound: float = 0.0
    largest: float = 0.0
    unexplained_row: int | None = None

    def add(self, start: int, rows: Floats, stored: Bytes) -> None:
        """Compare some rows with what was stored for them.

        Args:
            start: index of the first row.
            rows: float32 [n, dim].
            stored: uint8 [n, row bytes].
        """
        worst = self.tally.add(start, rows, dequantize(stored, self.dtype))
        low, high = torch.from_numpy(rows).aminmax()
        self.largest = max(self.largest, float(high), -float(low))
        bounds = rounding_bounds(rows, stored, self.dtype)
        self.bound = max(self.bound, float(bounds.max()))
        if self.unexplained_row is None and (worst > bounds).any():
            self.unexplained_row = start + int(np.argmax(worst > bounds))

    def join(self, later: "TableError") -> None:
        """Add what was found in rows after these."""
        self.tally.join(later.tally)
        self.bound = max(self.bound, later.bound)
        self.largest = max(self.largest, later.largest)
        if self.unexplained_row is None:
            self.unexplained_row = later.unexplained_row
