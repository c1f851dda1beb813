"""Index arithmetic on jagged arrays: ranges of different sizes in flat arrays, without a Python loop.

*Bounds* of n adjacent ranges are n + 1 numbers: the start of each range, and the end of the last one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
_UINT32 = np.dtype(np.uint32)
# The ufunc behind `cumsum`. For a small request, numpy's Python function doubles the time.
_accumulate = np.add.accumulate


def concatenate(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Arrays [n_i] of one dtype, one after the other [sum n_i]. A single array is returned unchanged."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def bag_offsets(lengths: npt.NDArray[np.int32]) -> Ids:
    """The bounds int64 [n + 1] of bags with these `lengths`, int32 [n].

    A negative length counts as the unsigned number with the same bits, 2³¹ or more, so that the sum is always wrong.
    """
    offsets = np.empty(lengths.size + 1, np.int64)
    offsets[0] = 0
    _accumulate(lengths.view(_UINT32), out=offsets[1:])
    return offsets


def bounds_of(sizes: Ids) -> Ids:
    """The bounds int64 [n + 1] of ranges with these `sizes`, int64 [n]."""
    bounds = np.empty(sizes.size + 1, np.int64)
    bounds[0] = 0
    _accumulate(sizes, out=bounds[1:])
    return bounds


def ranges(starts: Ids, sizes: Ids) -> Ids:
    """The numbers of the ranges [start, start + size), one range after the other.

    Args:
        starts, sizes: int64 [n].

    Returns:
        int64 [sum of sizes].
    """
    ends = sizes.cumsum()
    numbers: Ids = (starts - ends + sizes).repeat(sizes)
    numbers += np.arange(numbers.size)
    return numbers


def index_of_ranges(starts: Ids, sizes: Ids) -> slice | Ids:
    """An index for the numbers of `ranges`: a slice, which copies nothing, if the ranges are adjacent.

    Args:
        starts, sizes: int64 [n]; at least one.
    """
    ends = starts + sizes
    if (starts[1:] == ends[:-1]).all():
        return slice(int(starts[0]), int(ends[-1]))
    return ranges(starts, sizes)
