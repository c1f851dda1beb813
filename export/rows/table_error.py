"""The error of a table's stored rows against its float ones, and the largest error that rounding alone can make."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from export.rows.compiled import bounds_of_codes, compare, compare_codes
from export.rows.quantize import torch_dtype
from serving.bundle.formats import (
    FP16_SUBNORMAL,
    FP16_UNIT,
    FP32_UNIT,
    Bytes,
    CodeRows,
    Floats,
    WeightDtype,
    scales_and_biases_of,
)
from serving.bundle.manifest import Agreement

Doubles = npt.NDArray[np.float64]


@dataclass(slots=True)
class Tally:
    """Sums over the elements of two versions a and b of a table, so far.

    Attributes:
        largest: the largest |a − b|.
        worst_row: the row with the largest |a − b|.
        elements: their number.
        absolute: sum of |a − b|.
        squared: sum of (a − b)².
        squared_a: sum of a².
        squared_b: sum of b².
    """

    largest: float = 0.0
    worst_row: int = 0
    elements: int = 0
    absolute: float = 0.0
    squared: float = 0.0
    squared_a: float = 0.0
    squared_b: float = 0.0

    def add(
        self, start: int, a: npt.NDArray[Any], b: npt.NDArray[Any], out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """Compare some rows of both versions.

        Args:
            start: index of the first row.
            a: float32 or float64 [n, dim], n > 0. NaN and infinity make sums of their kind: see `finite`.
            b: likewise.
            out: in the dtype of a − b, contiguous, takes the errors, and may be b; None: memory of their own.

        Returns:
            The largest error of each row [n], in the dtype of a − b.
        """
        error = np.empty(a.shape, np.result_type(a, b)) if out is None else out
        worst, worst_row, sums = compare(torch.from_numpy(a), torch.from_numpy(b), torch.from_numpy(error))
        self.join(Tally.of(start, worst_row, error.size, sums))
        errors: npt.NDArray[Any] = worst.numpy()
        return errors

    @classmethod
    def of(cls, start: int, worst_row: int, elements: int, sums: Sequence[float]) -> Self:
        """The tally of what `export.rows.compiled.compare` returned, for `elements` elements of rows from `start`."""
        return cls(sums[0], start + worst_row, elements, *sums[1:])

    def join(self, later: "Tally") -> None:
        """Add the tally of later rows."""
        # NaN is worse than any number: the first one stays.
        if not (later.largest <= self.largest or math.isnan(self.largest)):
            self.largest, self.worst_row = later.largest, later.worst_row
        self.elements += later.elements
        self.absolute += later.absolute
        self.squared += later.squared
        self.squared_a += later.squared_a
        self.squared_b += later.squared_b

    @property
    def agreement(self) -> Agreement:
        """The Agreement of these sums. The cosine of two tables of zeros is 1, of zeros and another table 0."""
        lengths = math.sqrt(self.squared_a * self.squared_b)
        if lengths:
            # a·b = (a² + b² − (a − b)²) / 2. So rounding of the long sums hardly moves a cosine close to 1.
            cosine = (self.squared_a + self.squared_b - self.squared) / (2 * lengths)
        else:
            cosine = float(self.squared_a == self.squared_b)
        return Agreement(
            largest=self.largest,
            mean=self.absolute / max(self.elements, 1),
            cosine=cosine,
            worst_row=self.worst_row,
        )


def finite(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Both arrays, of any shape, with 0 wherever both have NaN or the same infinity."""
    same = ~np.isfinite(a) & ((a == b) | (np.isnan(a) & np.isnan(b)))
    return np.where(same, 0, a), np.where(same, 0, b)


_UNITS = (FP16_UNIT, FP16_SUBNORMAL, FP32_UNIT)


def rounding_bounds(rows: Floats, stored: Bytes, dtype: WeightDtype) -> Doubles:
    """The largest error of an element of each row that rounding alone can make.

    Args:
        rows: float32 [n, dim].
        stored: uint8 [n, row bytes], what was stored for them.
        dtype: how they are stored.

    Returns:
        float64 [n].
    """
    row_format = dtype.format
    if isinstance(row_format, CodeRows):
        halves = torch.from_numpy(scales_and_biases_of(stored))
        bounds: Doubles = bounds_of_codes(torch.from_numpy(rows), halves, row_format.largest_code, _UNITS).numpy()
        return bounds
    if row_format.is_exact:
        return np.zeros(len(rows))
    number = torch.finfo(torch_dtype(dtype))
    half_unit, half_subnormal = number.eps / 2, number.smallest_normal * number.eps / 2
    bounds = np.abs(rows).max(axis=1) * half_unit
    bounds += half_subnormal
    return bounds


@dataclass(slots=True)
class CoarseRows:
    """Rows that are too small for FP16: for their numbers, or for the scale and bias of their codes.

    Attributes:
        count: their number.
        first: the first of them.
        lost: how far the worst of those moved that moved by more than a quarter of their own largest element.
        lost_row: which row that is, or None.
        usual: the largest error of an element of any other row.
    """

    count: int = 0
    first: int | None = None
    lost: float = 0.0
    lost_row: int | None = None
    usual: float = 0.0

    @classmethod
    def of(cls, numbers: npt.NDArray[np.int64], moved: Doubles, magnitudes: Doubles, usual: float) -> Self:
        """The coarse rows of a block: their numbers, how far they moved, and their largest |element|, [k] each."""
        rows = cls(count=len(numbers), first=int(numbers[0]) if len(numbers) else None, usual=usual)
        lost = np.where(moved > magnitudes / 4, moved, 0.0)
        if lost.any():
            rows.lost, rows.lost_row = float(lost.max()), int(numbers[lost.argmax()])
        return rows

    def join(self, later: "CoarseRows") -> None:
        """Add the coarse rows of later rows."""
        self.count += later.count
        self.first = later.first if self.first is None else self.first
        if later.lost > self.lost:
            self.lost, self.lost_row = later.lost, later.lost_row
        self.usual = max(self.usual, later.usual)

    def renumbered(self, numbers: npt.NDArray[np.int64]) -> "CoarseRows":
        """The same rows, by their numbers in `numbers`."""
        first, lost = (None if row is None else int(numbers[row]) for row in (self.first, self.lost_row))
        return replace(self, first=first, lost_row=lost)

    def refusal(self, usual: float = 0.0) -> str | None:
        """Why the rows cannot be stored so, in words; None: they can.

        Rows that are lost may be stored if they moved no further than others, such as the rows of ids that a training
        has hardly seen.

        Args:
            usual: the largest error of rows of the table that are stored already.
        """
        if self.lost_row is None or self.lost <= max(self.usual, usual):
            return None
        return f"row {self.lost_row} is too small for its scale and numbers in FP16, and moves by {self.lost:.3g}"

    def note(self, dtype: WeightDtype) -> str | None:
        """What to know about them, in words, or None."""
        if self.first is None:
            return None
        rows = (
            f"row {self.first} is" if self.count == 1 else f"{self.count:,} rows, the first is row {self.first}, are"
        )
        scales = "" if dtype is WeightDtype.FP16 else f", the dtype of {dtype.value} scales"
        return (
            f"{rows} too small for FP16{scales}, and moved by more than 3 % of the largest element: store the table "
            "as FP32 if that matters"
        )


@dataclass(slots=True)
class TableError:
    """The error of one table's stored rows, added up block by block.

    Attributes:
        dtype: how the rows are stored.
        tally: of float and stored elements.
        bound: the largest error of an element that rounding can make in any of the rows.
        largest: the largest |element| of the float rows.
        unexplained_row: the first row that moved further than rounding can move it, or None.
        coarse: rows that moved by much of their own size.
    """

    dtype: WeightDtype
    tally: Tally = field(default_factory=Tally)
    bound: float = 0.0
    largest: float = 0.0
    unexplained_row: int | None = None
    coarse: CoarseRows = field(default_factory=CoarseRows)

    def add(self, start: int, rows: Floats, stored: Bytes, scratch: Floats) -> None:
        """Compare some float rows with the stored ones.

        Args:
            start: index of the first row.
            rows: float32 [n, dim].
            stored: uint8 [n, row bytes].
            scratch: float32 [n, dim], contiguous, is overwritten. New memory for each block would cost as much as
                the comparison.
        """
        if isinstance(self.dtype.format, CodeRows):
            self._add_codes(start, rows, stored, scratch, self.dtype.format)
            return
        worst = self.tally.add(start, rows, self.dtype.format.dequantize(stored), scratch)
        low, high = torch.from_numpy(rows).aminmax()
        self.largest = max(self.largest, float(high), -float(low))
        bounds = rounding_bounds(rows, stored, self.dtype)
        self.bound = max(self.bound, float(bounds.max()))
        moved = ~(worst <= bounds)  # NaN, too
        if self.unexplained_row is None and moved.any():
            self.unexplained_row = start + int(np.argmax(moved))
        if not self.dtype.format.is_exact:
            magnitudes = np.abs(rows).max(axis=1).astype(np.float64)
            unit = torch.finfo(torch_dtype(self.dtype)).eps
            is_coarse = (worst > magnitudes / 32) & (worst > unit * magnitudes)
            usual = float(worst[~is_coarse].max(initial=0.0))
            (numbers,) = is_coarse.nonzero()
            self.coarse.join(CoarseRows.of(start + numbers, worst[numbers], magnitudes[numbers], usual))

    def _add_codes(self, start: int, rows: Floats, stored: Bytes, scratch: Floats, row_format: CodeRows) -> None:
        """As `add`, of a dtype with codes."""
        sums, (largest, bound, usual), (worst_row, unexplained), numbers, moved, magnitudes = compare_codes(
            torch.from_numpy(rows),
            torch.from_numpy(stored[:, row_format.header_bytes :]),
            row_format.bits,
            torch.from_numpy(scales_and_biases_of(stored)),
            torch.from_numpy(scratch),
            _UNITS,
        )
        tally = Tally.of(start, worst_row, rows.size, sums)
        coarse = CoarseRows.of(start + numbers.numpy(), moved.double().numpy(), magnitudes.numpy(), usual)
        self.join(
            TableError(self.dtype, tally, bound, largest, None if unexplained < 0 else start + unexplained, coarse)
        )

    def join(self, later: "TableError") -> None:
        """Add what was found in rows after these."""
        self.tally.join(later.tally)
        self.bound = max(self.bound, later.bound)
        self.largest = max(self.largest, later.largest)
        if self.unexplained_row is None:
            self.unexplained_row = later.unexplained_row
        self.coarse.join(later.coarse)
