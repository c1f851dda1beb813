"""Find the smallest dtype that keeps a table's elements within a limit, by storing the table in each."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from export.errors import QuantizeError
from export.rows.quantize import packs, quantize
from export.trained.checkpoint import Checkpoint, blocks
from export.trained.tables import TrainedTable
from serving.bundle.rows import Floats, WeightDtype, dequantize


def smallest_dtype(
    table: TrainedTable, weights: Checkpoint, limit: float, progress: Callable[[int], None]
) -> WeightDtype:
    """The dtype with the fewest bytes in a row that moves no element of a table by more than `limit`.

    All dtypes are tried while the table is read once. A wider dtype is not always closer, since it rounds otherwise.

    Args:
        table: the trained table.
        weights: the checkpoint with its rows.
        limit: largest |float − stored|, in the units of the weights.
        progress: is given the number of elements that were just read.

    Raises:
        QuantizeError: a row holds NaN or infinity.
    """
    left = [dtype for dtype in WeightDtype if dtype is not WeightDtype.FP32 and packs(table.dim, dtype)]
    for start, rows in blocks(table, weights):
        quantize(table.name, start, rows, WeightDtype.FP32)  # refuses NaN and infinity
        floats = rows.float().numpy()
        left = [dtype for dtype in left if _moves(table, start, rows, floats, dtype) <= limit]
        progress(rows.numel())
        if not left:
            break
    return min(left, key=lambda dtype: dtype.row_bytes(table.dim), default=WeightDtype.FP32)


def _moves(table: TrainedTable, start: int, rows: Tensor, floats: Floats, dtype: WeightDtype) -> float:
    """The largest error of an element of `rows` [n, dim]; infinite where a number is beyond the dtype.

    `rows` are as trained, `floats` the same as float32.
    """
    try:
        stored = quantize(table.name, start, rows, dtype).numpy()
    except QuantizeError:
        return float("inf")
    return float(np.abs(floats - dequantize(stored, dtype)).max())
