"""The formats of stored rows: a class for each weight dtype, with all properties of the dtype.

Two layouts exist. A row of floats is `dim` numbers. A row of codes is FBGEMM's fused row: FP16 scale, FP16 bias, then
`dim` codes, the lower bits of a byte first (https://github.com/pytorch/FBGEMM, QuantUtils). Its numbers are
code × scale + bias.

This code uses numpy alone. It shares no code with FBGEMM, because the program's answers are compared with it.
"""

import enum
from abc import ABC, abstractmethod
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Bytes = npt.NDArray[np.uint8]

# Rounding errors: half a unit in the last place, relative to the number. FP16_SUBNORMAL: absolute, below the smallest
# normal FP16.
FP16_UNIT = 2.0**-11
FP16_SUBNORMAL = 2.0**-25
FP32_UNIT = 2.0**-24

_SCALE_AND_BIAS_BYTES = 4


class RowFormat(ABC):
    """How the rows of one weight dtype are stored.

    Attributes:
        name: the dtype's name in FBGEMM's SparseType, in manifests and in options.
        sparse_type: the dtype's number in FBGEMM's SparseType.
        max_width_argument: the argument of FBGEMM's TBE operator for the widest table of this dtype.
        bits: the size of an element in bits.
        dim_multiple: the dim must be a multiple of this.
        header_bytes: the bytes of a row before its elements.
        torch_name: torch's name of the dtype of a stored element.
        is_exact: whether trained FP32 numbers are stored unchanged.
    """

    name: ClassVar[str]
    sparse_type: ClassVar[int]
    max_width_argument: ClassVar[str]
    bits: ClassVar[int]
    dim_multiple: ClassVar[int] = 1
    header_bytes: ClassVar[int] = 0
    torch_name: ClassVar[str]
    is_exact: ClassVar[bool] = False

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` elements at row alignment 1, with its header."""
        return self.header_bytes + dim * self.bits // 8

    @abstractmethod
    def stored_floats(self, rows: Bytes) -> npt.NDArray[Any]:
        """The floats that are stored in rows. If they are finite, so are all numbers of the rows.

        Args:
            rows: uint8 [n, row bytes].

        Returns:
            [n, floats of a row].
        """

    @abstractmethod
    def dequantize(self, rows: Bytes) -> Floats:
        """The numbers of stored rows.

        Args:
            rows: uint8 [n, row bytes].

        Returns:
            float32 [n, dim]. It may share the memory of `rows`.
        """


class FloatRows(RowFormat):
    """Rows of floats. `numpy` is the dtype of an element."""

    numpy: ClassVar[np.dtype[Any]]

    def stored_floats(self, rows: Bytes) -> npt.NDArray[Any]:
        """All numbers of the rows: [n, dim]."""
        return rows.view(self.numpy)

    def dequantize(self, rows: Bytes) -> Floats:
        """As `RowFormat.dequantize`. The result shares the memory of FP32 rows."""
        return rows.view(self.numpy).astype(np.float32, copy=False)


class CodeRows(RowFormat):
    """Rows of codes of 2, 4 or 8 bits after a scale and a bias. FBGEMM packs only rows of whole 16-bit words."""

    header_bytes = _SCALE_AND_BIAS_BYTES
    torch_name = "uint8"

    @property
    def largest_code(self) -> int:
        """The largest code of `bits` bits."""
        return (1 << self.bits) - 1

    def stored_floats(self, rows: Bytes) -> Halves:
        """Scale and bias, float16 [n, 2]: codes times finite scales, plus finite biases, are finite FP32 numbers."""
        return scales_and_biases_of(rows)

    def dequantize(self, rows: Bytes) -> Floats:
        """As `RowFormat.dequantize`. The result shares no memory."""
        codes = rows[:, self.header_bytes :]
        codes_in_byte = 8 // self.bits
        numbers: Floats = np.empty((len(rows), codes.shape[1] * codes_in_byte), np.float32)
        if codes_in_byte == 1:
            np.copyto(numbers, codes)
        else:
            # A table with the codes of each byte is six times as fast as shifting and masking. `clip` clips nothing
            # here: with another mode, numpy would copy `out`.
            out = numbers.reshape(*codes.shape, codes_in_byte)
            np.take(_codes_of_bytes(self.bits), codes, axis=0, out=out, mode="clip")
        scales_and_biases = scales_and_biases_of(rows).astype(np.float32)
        numbers *= scales_and_biases[:, :1]
        numbers += scales_and_biases[:, 1:]
        return numbers


def scales_and_biases_of(rows: Bytes) -> Halves:
    """The scale and the bias of each row of codes.

    Args:
        rows: uint8 [n, row bytes].

    Returns:
        float16 [n, 2], a copy: the scale, then the bias.
    """
    # As one number of four bytes, which numpy copies at once. Two numbers of two bytes are copied byte by byte.
    return rows[:, :_SCALE_AND_BIAS_BYTES].view(np.uint32).copy().view(np.float16)


@cache
def _codes_of_bytes(bits: int) -> Floats:
    """The codes in each byte, the lower bits first: float32 [256, codes in a byte]."""
    shifts = np.arange(0, 8, bits)
    codes: Floats = ((np.arange(256)[:, np.newaxis] >> shifts) & ((1 << bits) - 1)).astype(np.float32)
    return codes


class Fp32(FloatRows):
    """Rows as they were trained."""

    name = "FP32"
    sparse_type = 0
    max_width_argument = "max_float32_D"
    bits = 32
    torch_name = "float32"
    numpy = np.dtype(np.float32)
    is_exact = True


class Fp16(FloatRows):
    """Rows of half precision."""

    name = "FP16"
    sparse_type = 1
    max_width_argument = "max_float16_D"
    bits = 16
    torch_name = "float16"
    numpy = np.dtype(np.float16)


class Int8(CodeRows):
    """A code in each byte."""

    name = "INT8"
    sparse_type = 2
    max_width_argument = "max_int8_D"
    bits = 8
    dim_multiple = 2


class Int4(CodeRows):
    """Two codes in each byte."""

    name = "INT4"
    sparse_type = 3
    max_width_argument = "max_int4_D"
    bits = 4
    dim_multiple = 4


class Int2(CodeRows):
    """Four codes in each byte."""

    name = "INT2"
    sparse_type = 4
    max_width_argument = "max_int2_D"
    bits = 2
    dim_multiple = 8


class WeightDtype(enum.Enum):
    """The dtype of a table's stored rows, with the name that FBGEMM's SparseType has for it.

    Attributes:
        format: the class of the dtype.
    """

    _value_: str
    format: RowFormat

    FP32 = Fp32()
    FP16 = Fp16()
    INT8 = Int8()
    INT4 = Int4()
    INT2 = Int2()

    def __new__(cls, row_format: RowFormat) -> Self:
        """The member of a format. In manifests, its value is the name of the format."""
        member = object.__new__(cls)
        member._value_ = row_format.name
        member.format = row_format
        return member

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` elements at row alignment 1, with its header."""
        return self.format.row_bytes(dim)
