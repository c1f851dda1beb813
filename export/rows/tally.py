"""How far two versions a and b of a table's numbers are from one another, gathered block by block."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from export.rows.compiled import compare
from serving.bundle.manifest import Agreement


@dataclass(slots=True)
class Tally:
    """Sums over all elements so far.

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
        found: npt.NDArray[Any] = worst.numpy()
        return found

    @classmethod
    def of(cls, start: int, worst_row: int, elements: int, sums: Sequence[float]) -> Self:
        """What `export.rows.compiled.compare` found in `elements` elements of rows that begin at `start`."""
        return cls(sums[0], start + worst_row, elements, *sums[1:])

    def join(self, later: "Tally") -> None:
        """Add what was found in rows after these."""
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
        """The figures of the sums. The cosine of two tables of zeros is 1, of one and another table 0."""
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
    """Both answers, any shape, with 0 in both where both are NaN or the same infinity."""
    same = ~np.isfinite(a) & ((a == b) | (np.isnan(a) & np.isnan(b)))
    return np.where(same, 0, a), np.where(same, 0, b)
