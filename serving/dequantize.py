"""The numbers that stored rows stand for, by the format of `serving.bundle`.

In numpy: this is what the program's answers are compared with, so it shares no code with FBGEMM.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from serving.bundle import WeightDtype

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

# Half a unit in the last place, relative to a number, and the same below the smallest normal FP16.
FP16_UNIT = 2.0**-11
FP16_SUBNORMAL = 2.0**-25
FP32_UNIT = 2.0**-24


def dequantize(rows: Bytes, dtype: WeightDtype) -> Floats:
    """The numbers that stored rows stand for.

    Args:
        rows: uint8 [n, row bytes], in the format of `serving.bundle`.

    Returns:
        float32 [n, dim].
    """
    if dtype is WeightDtype.FP32:
        return rows.view(np.float32)
    if dtype is WeightDtype.FP16:
        return rows.view(np.float16).astype(np.float32)
    qparams = rows[:, :4].copy().view(np.float16).astype(np.float32)
    codes = rows[:, 4:]
    if dtype is WeightDtype.INT8:
        numbers: Floats = codes.astype(np.float32)
    else:
        # A table of what each byte holds: six times as fast as shifting and masking.
        numbers = np.take(_unpacked(dtype), codes, axis=0).reshape(len(rows), -1)
    numbers *= qparams[:, :1]
    numbers += qparams[:, 1:]
    return numbers


@cache
def _unpacked(dtype: WeightDtype) -> Floats:
    """The codes that each byte holds, the lower bits first [256, codes of a byte]."""
    shifts = np.arange(0, 8, dtype.bits)
    codes: Floats = ((np.arange(256)[:, np.newaxis] >> shifts) & (2**dtype.bits - 1)).astype(np.float32)
    return codes
