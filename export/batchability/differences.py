"""Differences between scores, and how large they may be if only rounding causes them."""

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from export.rows.table_error import finite
from serving.bundle.scores import DenseDtype

Numbers = npt.NDArray[Any]
# The limit of a difference, relative to the largest score. A matrix product is rounded in another order if there are
# more samples, or if it is compiled.
_RELATIVE_LIMIT = {DenseDtype.FP32: 1e-5, DenseDtype.BF16: 2**-6, DenseDtype.INT8: 1e-5}


def rounding_limit(numbers: Numbers, dtype: DenseDtype) -> float:
    """The limit of a difference that only rounding causes.

    Args:
        numbers: scores.
        dtype: of the weights.
    """
    return _RELATIVE_LIMIT[dtype] * scale_of(numbers)


def largest_difference(one: Numbers, other: Numbers) -> float:
    """The largest |difference|. Infinity if the shapes differ, or one number is finite and the other is not."""
    if one.shape != other.shape:
        return float("inf")
    return float(np.nan_to_num(differences(one, other), nan=np.inf).max(initial=0))


def differences(one: Numbers, other: Numbers) -> Numbers:
    """The |difference| of each number; float64 if they are integers or booleans."""
    if one.dtype.kind != "f":
        # float64 cannot hold every integer beyond 2**53, so numbers that differ differ by 1 at least.
        difference = np.abs(one.astype(np.float64) - other.astype(np.float64))
        is_different: npt.NDArray[Any] = one != other
        return np.maximum(difference, is_different.astype(np.float64))
    return cast(Numbers, np.abs(np.subtract(*finite(one, other))))


def scale_of(numbers: Numbers) -> float:
    """The largest finite |number|."""
    return float(np.abs(numbers[np.isfinite(numbers)].astype(np.float64)).max(initial=0))
