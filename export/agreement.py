"""How far two versions of a table's numbers are from one another, gathered block by block."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
        """Compare rows `start`, `start` + 1, … of both [n, dim]; the largest error of each row [n]."""
        error = a - b
        self.squared += _squared(error)
        self.squared_a += _squared(a)
        self.squared_b += _squared(b)
        np.abs(error, out=error)
        worst: npt.NDArray[Any] = error.max(axis=1, initial=0.0)
        self.absolute += float(error.sum(dtype=np.float64))
        self.elements += error.size
        if worst.size and not worst.max() <= self.largest:
            self.worst_row = start + int(np.argmax(worst))
            self.largest = float(worst.max())
        return worst

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


def _squared(numbers: npt.NDArray[Any]) -> float:
    flat = numbers.reshape(-1)
    return float(np.dot(flat, flat))
