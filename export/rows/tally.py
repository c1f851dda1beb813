"""How far two versions a and b of a table's numbers are from one another, gathered block by block."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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

    def add(self, start: int, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Compare some rows of both versions.

        Args:
            start: index of the first row.
            a: float32 or float64 [n, dim], n > 0. All numbers are finite: see `finite`.
            b: likewise.

        Returns:
            The largest error of each row [n], in the dtype of a − b.
        """
        # By torch: numpy takes several times as long to reduce short rows, or starts BLAS threads.
        error = torch.from_numpy(a - b)
        self.squared += _squared(error)
        self.squared_a += _squared(torch.from_numpy(a))
        self.squared_b += _squared(torch.from_numpy(b))
        error.abs_()
        worst: npt.NDArray[Any] = error.amax(1).numpy()
        self.absolute += float(error.sum())
        self.elements += error.numel()
        if not worst.max() <= self.largest:
            self.worst_row = start + int(np.argmax(worst))
            self.largest = float(worst.max())
        return worst

    def join(self, later: "Tally") -> None:
        """Add what was found in rows after these."""
        if not later.largest <= self.largest:
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


def _squared(numbers: Tensor) -> float:
    """The sum of the squares of numbers, of any shape."""
    flat = numbers.reshape(-1)
    squared = float(torch.dot(flat, flat))
    if math.isfinite(squared):
        return squared
    flat = flat.double()  # squares beyond FP32
    return float(torch.dot(flat, flat))
