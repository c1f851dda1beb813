"""How far two versions of a table's numbers are from one another, gathered block by block."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serving.bundle import Agreement


@dataclass(slots=True)
class Tally:
    """Sums over all elements seen so far."""

    largest: float = 0.0
    worst_row: int = 0
    elements: int = 0
    absolute: float = 0.0
    squared: float = 0.0
    squared_a: float = 0.0
    squared_b: float = 0.0

    def add(self, start: int, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Compare rows `start`, `start` + 1, … of both [n, dim], n > 0; the largest error of each row [n]."""
        # torch's reductions: numpy's take several times as long along short rows, or start BLAS threads.
        error = torch.from_numpy(difference(a, b))
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
        """Take in what was found in rows behind these."""
        if not later.largest <= self.largest:
            self.largest, self.worst_row = later.largest, later.worst_row
        self.elements += later.elements
        self.absolute += later.absolute
        self.squared += later.squared
        self.squared_a += later.squared_a
        self.squared_b += later.squared_b

    @property
    def agreement(self) -> Agreement:
        """What the sums come to. Two tables of zeros have cosine 1, a table of zeros and another 0."""
        lengths = math.sqrt(self.squared_a * self.squared_b)
        if lengths:
            # By way of the error: rounding in the two long sums then hardly moves a cosine close to 1.
            cosine = (self.squared_a + self.squared_b - self.squared) / (2 * lengths)
        else:
            cosine = float(self.squared_a == self.squared_b)
        return Agreement(
            largest=self.largest,
            mean=self.absolute / max(self.elements, 1),
            cosine=cosine,
            worst_row=self.worst_row,
        )


def difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """a − b; 0 where both are the same infinity, or no number."""
    with np.errstate(invalid="ignore", over="ignore"):
        moved: npt.NDArray[Any] = a - b
        if not np.isfinite(moved.sum()):
            moved = np.where((a == b) | (np.isnan(a) & np.isnan(b)), np.zeros_like(moved), moved)
    return moved


def _squared(numbers: Tensor) -> float:
    """The sum of the squares of all finite numbers."""
    flat = numbers.reshape(-1)
    squared = float(torch.dot(flat, flat))
    if math.isfinite(squared):
        return squared
    flat = flat.double()
    flat = flat[flat.isfinite()]
    return float(torch.dot(flat, flat))
