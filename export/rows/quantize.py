"""Quantize float rows to the bytes that FBGEMM's TBE kernel reads."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from export.errors import QuantizeError
from export.rows.compiled import code
from export.trained.checkpoint import Checkpoint, blocks
from export.trained.tables import TrainedTable
from serving.bundle.formats import CodeRows, Floats, WeightDtype

_NOT_FINITE = "holds NaN or infinity: find out how the training made it"


def packs(dim: int, dtype: WeightDtype) -> bool:
    """Whether rows of `dim` elements can be stored as `dtype`."""
    return dim % dtype.format.dim_multiple == 0


def torch_dtype(dtype: WeightDtype) -> torch.dtype:
    """torch's dtype of a stored element: a float, or uint8 where elements are codes."""
    stored: torch.dtype = getattr(torch, dtype.format.torch_name)
    return stored


def check_dim(table: str, dim: int, dtype: WeightDtype) -> None:
    """Refuse a dim that does not pack as `dtype`.

    Raises:
        QuantizeError: naming the table, and the number that its dim must be a multiple of.
    """
    if not packs(dim, dtype):
        raise QuantizeError(
            f"table {table!r}: expected a dim that is a multiple of {dtype.format.dim_multiple} for {dtype.value}, "
            f"got {dim}: store it as another dtype"
        )


def quantize(table: str, start: int, rows: Tensor, dtype: WeightDtype) -> Tensor:
    """Store `rows` as `dtype`, exactly as TorchRec's quantized modules do.

    Args:
        table: name of the table, for errors.
        start: index of the first row, for errors.
        rows: float32 or float16 [n, dim].
        dtype: how to store them.

    Returns:
        uint8 [n, dtype.row_bytes(dim)].

    Raises:
        QuantizeError: a row has NaN or infinity; or a number, scale or bias is too large for FP16.
    """
    if isinstance(dtype.format, CodeRows):
        return _coded(table, start, rows, dtype.format)
    return _rounded(table, start, rows, dtype)


def _rounded(table: str, start: int, rows: Tensor, dtype: WeightDtype) -> Tensor:
    """Rows of floats: `rows` as `quantize` takes them → uint8 [n, row bytes]."""
    _expect_finite(table, start, rows, _NOT_FINITE)
    floats = rows.to(torch_dtype(dtype))
    if not dtype.format.is_exact:
        largest = f"±{torch.finfo(floats.dtype).max:.0f}"
        _expect_finite(table, start, floats, f"is beyond {dtype.value} ({largest}): store the table as FP32")
    return floats.contiguous().view(torch.uint8)


def _coded(table: str, start: int, rows: Tensor, row_format: CodeRows) -> Tensor:
    """Rows of codes after a scale and a bias: `rows` as `quantize` takes them → uint8 [n, row bytes]."""
    halves = torch.empty(len(rows), 2, dtype=torch.float16)
    stored, total, total_of_halves = code(rows.contiguous(), row_format.bits, halves.view(torch.uint8), halves)
    if not math.isfinite(total):
        _expect_finite(table, start, rows, _NOT_FINITE)
    if not math.isfinite(total_of_halves):
        _expect_finite(table, start, halves, "has a scale or bias beyond FP16 (±65504): store the table as FP32")
    return stored


def _expect_finite(table: str, start: int, rows: Tensor, problem: str) -> None:
    """Refuse rows, float32 or float16 [n, columns], with NaN or infinity. `problem` is the message."""
    # A sum shows NaN and infinity, at a fortieth of the cost of checking each number.
    if torch.isfinite(rows.sum(dtype=torch.float32)):
        return
    finite = torch.isfinite(rows).all(dim=1)
    if not finite.all():  # else only the sum overflowed
        first = start + int((~finite).nonzero()[0])
        raise QuantizeError(f"table {table!r}: row {first} {problem}")


def smallest_dtype(
    table: TrainedTable, weights: Checkpoint, limit: float, progress: Callable[[int], None]
) -> WeightDtype:
    """The dtype with the fewest bytes in a row that moves no element of a table by more than `limit`.

    All dtypes are tried while the table is read once. A wider dtype is not always closer, because it rounds
    differently.

    Args:
        table: the trained table.
        weights: the checkpoint with its rows.
        limit: largest |float − stored|, in the units of the weights.
        progress: called with the number of elements that were just read.

    Raises:
        QuantizeError: a row holds NaN or infinity.
    """
    candidates = [dtype for dtype in WeightDtype if not dtype.format.is_exact and packs(table.dim, dtype)]
    for start, rows in blocks(table, weights):
        quantize(table.name, start, rows, WeightDtype.FP32)  # refuses NaN and infinity
        floats = rows.float().numpy()
        candidates = [dtype for dtype in candidates if _error(table, start, rows, floats, dtype) <= limit]
        progress(rows.numel())
        if not candidates:
            break
    return min(candidates, key=lambda dtype: dtype.row_bytes(table.dim), default=WeightDtype.FP32)


def _error(table: TrainedTable, start: int, rows: Tensor, floats: Floats, dtype: WeightDtype) -> float:
    """The largest error of an element of `rows` [n, dim]. It is infinite if a number is too large for the dtype.

    `rows` are as trained, `floats` are the same rows in float32.
    """
    try:
        stored = quantize(table.name, start, rows, dtype).numpy()
    except QuantizeError:
        return float("inf")
    return float(np.abs(floats - dtype.format.dequantize(stored)).max())
