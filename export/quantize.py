"""Float rows to the bytes that FBGEMM's TBE kernel reads, in blocks of rows."""

import torch
from torch import Tensor

from export.errors import QuantizeError
from serving.bundle import WeightDtype


def packs(dim: int, dtype: WeightDtype) -> bool:
    """Whether the codes of a row fill 16-bit words: FBGEMM's quantize op packs no others."""
    return not (dtype.quantized and dim * dtype.bits % 16)


def check_dim(table: str, dim: int, dtype: WeightDtype) -> None:
    """Refuse a dim that does not pack as `dtype`.

    Raises:
        QuantizeError: naming the table and the multiple that its dim has to be of.
    """
    if not packs(dim, dtype):
        raise QuantizeError(
            f"table {table!r}: expected a dim that is a multiple of {16 // dtype.bits} for {dtype.value}, "
            f"got {dim}: store it as another dtype"
        )


def quantize(table: str, start: int, rows: Tensor, dtype: WeightDtype) -> Tensor:
    """Store `rows` as `dtype`, exactly as TorchRec's quantized modules do.

    Args:
        table: its name, for errors.
        start: index of the first row, for errors.
        rows: fp32 or fp16 [n, dim].

    Returns:
        uint8 [n, dtype.row_bytes(dim)].

    Raises:
        QuantizeError: a row holds NaN or infinity, or does not fit FP16 where FP16 stores it, its scale or bias.
    """
    _expect_finite(table, start, rows, "holds NaN or infinity: find out how the training made it")
    if dtype is WeightDtype.FP32:
        return rows.float().contiguous().view(torch.uint8)
    if dtype is WeightDtype.FP16:
        half = rows.half()
        _expect_finite(table, start, half, "is beyond FP16 (±65504): store the table as FP32")
        return half.contiguous().view(torch.uint8)
    fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows.contiguous(), dtype.bits)
    qparams = fused[:, -4:].contiguous()
    _expect_finite(
        table,
        start,
        qparams.view(torch.float16),
        "has a scale or bias beyond FP16 (±65504): store the table as FP32",
    )
    # The op puts scale and bias behind the codes, the kernel reads them in front.
    return torch.cat((qparams, fused[:, :-4]), dim=1)


def _expect_finite(table: str, start: int, rows: Tensor, otherwise: str) -> None:
    # NaN and infinity survive a sum, and a sum costs a fortieth of looking at each number.
    if torch.isfinite(rows.sum(dtype=torch.float32)):
        return
    finite = torch.isfinite(rows).all(dim=1)
    if not finite.all():  # else large numbers overflowed the sum
        first = start + int((~finite).nonzero()[0])
        raise QuantizeError(f"table {table!r}: row {first} {otherwise}")
