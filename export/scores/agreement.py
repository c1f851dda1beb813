"""Whether two answers with scores of the same numbers agree."""

from typing import Any

import numpy as np
import numpy.typing as npt

from export.rows.tally import finite
from serving.bundle.scores import DenseDtype

# Scores of the same numbers may differ by this, relative to the largest: a product of matrices is rounded in another
# order where there are more samples, and where it is compiled.
_ROUNDING = 1e-5
_ROUNDING_OF = {DenseDtype.FP32: _ROUNDING, DenseDtype.BF16: 2**-6, DenseDtype.INT8: _ROUNDING}
# Samples of the pieces that a probe is answered in, to see whether samples are mixed.
_PIECES = (1, 3)


def pieces_of(samples: int) -> list[int]:
    """The samples of each of the requests that a probe is cut into, to see whether samples are mixed."""
    return [*_PIECES, samples - sum(_PIECES)]


def allowed(numbers: npt.NDArray[Any], dtype: DenseDtype) -> float:
    """By how much scores of the same numbers may differ."""
    return _ROUNDING_OF[dtype] * scale_of(numbers)


def largest(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """The largest |difference|; infinity where shapes differ, or one number is finite and the other is not."""
    if one.shape != other.shape:
        return float("inf")
    moved = np.abs(np.subtract(*finite(one, other)))
    return float(np.nan_to_num(moved, nan=np.inf).max(initial=0))


def scale_of(numbers: npt.NDArray[Any]) -> float:
    """The largest |number|, of those that are finite."""
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0))
