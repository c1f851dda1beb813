"""What the right answer is, in plain numpy: no FBGEMM, no torch, nothing of `export` or `serving`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.bundle_reader import BITS

Floats = npt.NDArray[np.float64]


def pool(
    table: npt.NDArray[Any],
    bags: Sequence[Sequence[int]],
    pooling: str,
    weights: Sequence[Sequence[float]] | None = None,
) -> Floats:
    """One bag after the other: [B, dim]."""
    answer = np.zeros((len(bags), table.shape[1]))
    for sample, bag in enumerate(bags):
        for position, id_ in enumerate(bag):
            answer[sample] += table[id_].astype(np.float64) * (weights[sample][position] if weights else 1)
        if pooling == "MEAN" and bag:
            answer[sample] /= len(bag)
    return answer


def row_range_bound(table: npt.NDArray[Any], dtype: str) -> Floats:
    """How far quantizing may move an element of each row: half a step, and FP16 rounding of range and minimum."""
    rows = table.astype(np.float64)
    if dtype == "FP32":
        return np.zeros(len(rows))
    largest: Floats = np.abs(rows).max(axis=1)
    if dtype == "FP16":
        return largest * 2.0**-11 + 2.0**-24
    low, high = rows.min(axis=1), rows.max(axis=1)
    steps = 2 ** BITS[dtype] - 1
    spread: Floats = high - low
    bound: Floats = spread * (0.5 / steps + 2.0**-10) + largest * 2.0**-10 + steps * 2.0**-23
    return bound
