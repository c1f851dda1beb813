"""Float rows become the bytes that FBGEMM's TBE kernel reads."""

import math

import torch
from torch import Tensor

from export.errors import QuantizeError
from export.rows.compiled import code
from serving.bundle.rows import WeightDtype

_NOT_FINITE = "holds NaN or infinity: find out how the training made it"


def packs(dim: int, dtype: WeightDtype) -> bool:
    """Whether rows of `dim` elements can be stored as `dtype`."""
    return dim % dtype.format.dim_multiple == 0


def torch_dtype(dtype: WeightDtype) -> torch.dtype:
    """torch's dtype of a stored element: a float, or uint8 where elements are codes."""
    found: torch.dtype = getattr(torch, dtype.format.float_name or "uint8")
    return found


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
        QuantizeError: a row holds NaN or infinity. Or a number, scale or bias that is stored as FP16 is beyond it.
    """
    return (_coded if dtype.format.quantized else _rounded)(table, start, rows, dtype)


def _rounded(table: str, start: int, rows: Tensor, dtype: WeightDtype) -> Tensor:
    """Rows of floats: `rows` as `quantize` takes them → uint8 [n, row bytes]."""
    _expect_finite(table, start, rows, _NOT_FINITE)
    floats = rows.to(torch_dtype(dtype))
    if dtype is not WeightDtype.FP32:
        largest = f"±{torch.finfo(floats.dtype).max:.0f}"
        _expect_finite(table, start, floats, f"is beyond {dtype.value} ({largest}): store the table as FP32")
    return floats.contiguous().view(torch.uint8)


def _coded(table: str, start: int, rows: Tensor, dtype: WeightDtype) -> Tensor:
    """Rows of codes behind a scale and a bias: `rows` as `quantize` takes them → uint8 [n, row bytes]."""
    halves = torch.empty(len(rows), 2, dtype=torch.float16)
    stored, total, total_of_halves = code(rows.contiguous(), dtype.format.bits, halves.view(torch.uint8), halves)
    if not math.isfinite(total):
        _expect_finite(table, start, rows, _NOT_FINITE)
    if not math.isfinite(total_of_halves):
        _expect_finite(table, start, halves, "has a scale or bias beyond FP16 (±65504): store the table as FP32")
    return stored


def _expect_finite(table: str, start: int, rows: Tensor, otherwise: str) -> None:
    """Refuse rows, float32 or float16 [n, columns], with NaN or infinity; `otherwise` says what is wrong then."""
    # A sum shows NaN and infinity, at a fortieth of the cost of looking at each number.
    if torch.isfinite(rows.sum(dtype=torch.float32)):
        return
    finite = torch.isfinite(rows).all(dim=1)
    if not finite.all():  # else only the sum overflowed
        first = start + int((~finite).nonzero()[0])
        raise QuantizeError(f"table {table!r}: row {first} {otherwise}")
