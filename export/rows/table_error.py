"""How far the stored rows of a table are from its float ones, and how far rounding alone can move them."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from export.rows.compiled import bounds_of_codes, compare_codes
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

_UNITS = (FP16_UNIT, FP16_SUBNORMAL, FP32_UNIT)

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
        halves = torch.from_numpy(scales_and_biases_of(stored))
        found: Doubles = bounds_of_codes(halves, dtype.format.largest_code, _UNITS).numpy()
        return found
    if dtype is WeightDtype.FP32:
        return np.zeros(len(rows))
    number = np.finfo(dtype.format.float_name)
    half_unit, half_subnormal = float(number.eps) / 2, float(number.smallest_subnormal) / 2
    bounds: Doubles = np.abs(rows).max(axis=1) * half_unit + half_subnormal
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

    def add(self, start: int, rows: Floats, stored: Bytes, scratch: Floats) -> None:
        """Compare some rows with what was stored for them.

        Args:
            start: index of the first row.
            rows: float32 [n, dim].
            stored: uint8 [n, row bytes].
            scratch: float32 [n, dim], contiguous, is overwritten. New memory for each block would cost as much as
                the comparison.
        """
        if self.dtype.format.quantized:
            self._add_codes(start, rows, stored, scratch)
            return
        worst = self.tally.add(start, rows, dequantize(stored, self.dtype), scratch)
        low, high = torch.from_numpy(rows).aminmax()
        self.largest = max(self.largest, float(high), -float(low))
        bounds = rounding_bounds(rows, stored, self.dtype)
        self.bound = max(self.bound, float(bounds.max()))
        moved = ~(worst <= bounds)  # NaN, too
        if self.unexplained_row is None and moved.any():
            self.unexplained_row = start + int(np.argmax(moved))

    def _add_codes(self, start: int, rows: Floats, stored: Bytes, scratch: Floats) -> None:
        """As `add`, of a dtype with codes."""
        worst_row, sums, largest, bound, unexplained = compare_codes(
            torch.from_numpy(rows),
            torch.from_numpy(stored[:, self.dtype.format.header_bytes :]),
            self.dtype.format.bits,
            torch.from_numpy(scales_and_biases_of(stored)),
            torch.from_numpy(scratch),
            _UNITS,
        )
        tally = Tally.of(start, worst_row, rows.size, sums)
        self.join(TableError(self.dtype, tally, bound, largest, None if unexplained < 0 else start + unexplained))

    def join(self, later: "TableError") -> None:
        """Add what was found in rows after these."""
        self.tally.join(later.tally)
        self.bound = max(self.bound, later.bound)
        self.largest = max(self.largest, later.largest)
        if self.unexplained_row is None:
            self.unexplained_row = later.unexplained_row
