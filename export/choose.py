"""The smallest dtype that keeps a table's elements within a limit, found by measuring."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from export.checkpoint import Checkpoint, blocks
from export.errors import QuantizeError
from export.quantize import packs, quantize
from export.tables import TrainedTable
from serving.bundle import WeightDtype
from serving.dequantize import Floats, dequantize


def smallest_dtype(
    table: TrainedTable, weights: Checkpoint, limit: float, progress: Callable[[int], None]
) -> WeightDtype:
    """Store every row in each dtype that may do, until an element moves by more than `limit`.

    All are tried side by side, in one reading: a wider dtype is not always closer, since its rounding differs.

    Args:
        limit: largest |float − stored|, in the units of the weights.
        progress: called with the number of elements just read.

    Raises:
        QuantizeError: a row holds NaN or infinity.
    """
    left = [dtype for dtype in WeightDtype if dtype is not WeightDtype.FP32 and packs(table.dim, dtype)]
    for start, rows in blocks(table, weights):
        quantize(table.name, start, rows, WeightDtype.FP32)  # what FP32 cannot store, nothing can
        floats = rows.float().numpy()
        left = [dtype for dtype in left if _moves(table, start, rows, floats, dtype) <= limit]
        progress(rows.numel())
        if not left:
            break
    return min(left, key=lambda dtype: dtype.row_bytes(table.dim), default=WeightDtype.FP32)


def _moves(table: TrainedTable, start: int, rows: Tensor, floats: Floats, dtype: WeightDtype) -> float:
    """The largest error of an element; infinite where a number is beyond the dtype."""
    try:
        stored = quantize(table.name, start, rows, dtype).numpy()
    except QuantizeError:
        return float("inf")
    return float(np.abs(floats - dequantize(stored, dtype)).max())
