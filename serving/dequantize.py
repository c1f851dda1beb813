"""The numbers that stored rows stand for, by the format of `serving.bundle`.

In numpy: this is what the program's answers are compared with, so it shares no code with FBGEMM.
"""

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
    if dtype is not WeightDtype.INT8:
        shifts = np.arange(0, 8, dtype.bits, dtype=np.uint8)
        codes = (codes[:, :, np.newaxis] >> shifts) & np.uint8(2**dtype.bits - 1)
        codes = codes.reshape(len(rows), -1)
    numbers: Floats = codes.astype(np.float32)
    numbers *= qparams[:, :1]
    numbers += qparams[:, 1:]
    return numbers
