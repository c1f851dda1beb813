"""The tables of a bundle: their rows, as they are stored and as numbers, and the features that read them.

A row of floats is `dim` FP32 or FP16 numbers. A quantized row is FBGEMM's fused row: FP16 scale, FP16 bias, then
`dim` codes, the lower bits of a byte first (https://github.com/pytorch/FBGEMM, QuantUtils). Its numbers are
code × scale + bias.

All of it is numpy. The program's answers are compared with it, so it shares no code with FBGEMM.
"""

import enum
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.bundle.id_maps import IdMap
from serving.bundle.plan import Shard
from serving.files import Strict

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Bytes = npt.NDArray[np.uint8]

# Rounding errors: half a unit in the last place, relative to the number. FP16_SUBNORMAL: absolute, below the smallest
# normal FP16.
FP16_UNIT = 2.0**-11
FP16_SUBNORMAL = 2.0**-25
FP32_UNIT = 2.0**-24

# The number of valid ids where any int64 is one.
ANY_INT64 = 2**64
_SCALE_AND_BIAS_BYTES = 4
# Requests and config.pbtxt list names with commas. Control characters break lines of logs and metrics.
# UTF-8 has no surrogates.
_NAME = re.compile(r"[^,\x00-\x1f\x7f-\x9f\ud800-\udfff]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """How a row of one weight dtype is stored.

    Attributes:
        sparse_type: the dtype's number in FBGEMM's SparseType.
        bits: size of one element.
        float_name: numpy's and torch's name of an element's dtype. None: elements are codes.
        dim_multiple: the dim must be a multiple of this. FBGEMM's op packs only codes that fill words of 16 bits.
    """

    sparse_type: int
    bits: int
    float_name: str | None = None
    dim_multiple: int = 1

    @property
    def quantized(self) -> bool:
        """Whether elements are codes, and a row carries a scale and a bias."""
        return self.float_name is None

    @property
    def header_bytes(self) -> int:
        """Bytes before the elements: those of scale and bias."""
        return _SCALE_AND_BIAS_BYTES if self.quantized else 0

    @property
    def largest_code(self) -> int:
        """The largest code of `bits` bits."""
        return (1 << self.bits) - 1


class WeightDtype(enum.Enum):
    """How a table's rows are stored. The names are those of FBGEMM's SparseType."""

    FP32 = "FP32"
    FP16 = "FP16"
    INT8 = "INT8"
    INT4 = "INT4"
    INT2 = "INT2"

    @property
    def format(self) -> RowFormat:
        """Its entry in the table of row formats."""
        return ROW_FORMATS[self]

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` elements at row alignment 1, scale and bias included."""
        return self.format.header_bytes + dim * self.format.bits // 8


# All properties of a dtype are here, and nowhere else.
ROW_FORMATS = {
    WeightDtype.FP32: RowFormat(sparse_type=0, bits=32, float_name="float32"),
    WeightDtype.FP16: RowFormat(sparse_type=1, bits=16, float_name="float16"),
    WeightDtype.INT8: RowFormat(sparse_type=2, bits=8, dim_multiple=2),
    WeightDtype.INT4: RowFormat(sparse_type=3, bits=4, dim_multiple=4),
    WeightDtype.INT2: RowFormat(sparse_type=4, bits=2, dim_multiple=8),
}


def dequantize(rows: Bytes, dtype: WeightDtype) -> Floats:
    """The numbers of stored rows.

    Args:
        rows: uint8 [n, row bytes].
        dtype: how they are stored.

    Returns:
        float32 [n, dim]. It shares the memory of `rows` if these are FP32.
    """
    row_format = dtype.format
    if row_format.float_name is not None:
        return rows.view(row_format.float_name).astype(np.float32, copy=False)
    codes = rows[:, row_format.header_bytes :]
    in_byte = 8 // row_format.bits
    numbers: Floats = np.empty((len(rows), codes.shape[1] * in_byte), np.float32)
    if in_byte == 1:
        np.copyto(numbers, codes)
    else:
        # A table with the codes of each byte is six times as fast as shifting and masking. `clip` clips nothing here:
        # with another mode, numpy would copy `out`.
        np.take(_codes_of_bytes(dtype), codes, axis=0, out=numbers.reshape(*codes.shape, in_byte), mode="clip")
    scales_and_biases = scales_and_biases_of(rows).astype(np.float32)
    numbers *= scales_and_biases[:, :1]
    numbers += scales_and_biases[:, 1:]
    return numbers


def scales_and_biases_of(rows: Bytes) -> Halves:
    """The scale and the bias of each quantized row.

    Args:
        rows: uint8 [n, row bytes], of a dtype with codes.

    Returns:
        float16 [n, 2], a copy: the scale, then the bias.
    """
    # As one number of four bytes, which numpy copies at once. Otherwise it copies byte by byte.
    return rows[:, :_SCALE_AND_BIAS_BYTES].view(np.uint32).copy().view(np.float16)


@cache
def _codes_of_bytes(dtype: WeightDtype) -> Floats:
    """The codes in each byte, the lower bits first: float32 [256, codes in a byte]."""
    shifts = np.arange(0, 8, dtype.format.bits)
    codes: Floats = ((np.arange(256)[:, np.newaxis] >> shifts) & dtype.format.largest_code).astype(np.float32)
    return codes


def is_name(text: str) -> bool:
    """Whether `text` may name a table, a feature or a key: in UTF-8, not empty, without commas and controls."""
    return _NAME.fullmatch(text) is not None


class Pooling(enum.Enum):
    """How the rows of a bag are pooled into one. An empty bag gives zeros.

    NONE does not pool: the answer has the row of each id, as that of TorchRec's EmbeddingCollection.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class IdPolicy(enum.Enum):
    """What happens to an id outside [0, rows).

    ERROR: the request is refused. ZERO: the id contributes nothing, and MEAN does not count it. MODULO: every int64
    is a valid id. It reads row id mod rows, which is in [0, rows) for negative ids, too.
    """

    ERROR = "error"
    ZERO = "zero"
    MODULO = "modulo"


class DefaultRow(Strict, frozen=True):
    """An id policy: an id outside [0, rows) reads the row `default_row` instead. MEAN counts it."""

    default_row: int

    @property
    def value(self) -> str:
        """The policy as `--id-policy` takes it."""
        return f"default_row:{self.default_row}"


class OutputDtype(enum.Enum):
    """The dtype of embeddings, by its KServe name."""

    FP32 = "FP32"
    FP16 = "FP16"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The same of numpy."""
        return np.dtype(np.float32) if self is OutputDtype.FP32 else np.dtype(np.float16)


class Feature(Strict, frozen=True, omit_defaults=True):
    """A feature: the bags of one key of a request, looked up in one table.

    Attributes:
        name: of the feature.
        table: name of the table that it reads.
        shared_key: its key in a request, if several tables read that key. None: the key has the feature's name.
        position_weights: FP32. The n-th id of a bag has the n-th of these weights. A bag may have no more ids than
            there are weights. The request's per-id weights are not used. Empty: each id has the weight 1, and a bag
            may have any number of ids. None: a weighted table uses the request's per-id weights.
    """

    name: str
    table: str
    shared_key: str | None = None
    position_weights: tuple[float, ...] | None = None

    @property
    def key(self) -> str:
        """The key of the feature in a request: TorchRec's KJT key."""
        return self.name if self.shared_key is None else self.shared_key


class Table(Strict, frozen=True, omit_defaults=True):
    """One embedding matrix.

    Attributes:
        weighted: whether its rows are weighted when they are pooled, by per-id weights or position weights.
        dtype: how its rows are stored.
        id_map: maps raw ids to rows. Then it says what a valid id is, and the id policy is `error`. None: ids are row
            numbers.
    """

    name: str
    rows: int
    dim: int
    pooling: Pooling
    weighted: bool
    dtype: WeightDtype
    id_policy: IdPolicy | DefaultRow
    id_map: IdMap | None = None

    @property
    def is_sequence(self) -> bool:
        """Whether the answer has a row for each id, not a pooled one."""
        return self.pooling is Pooling.NONE

    @property
    def valid_ids(self) -> int:
        """The valid ids are those in [0, valid_ids). `ANY_INT64`: any int64 is one."""
        if self.id_map is None:
            return self.rows
        valid_ids = self.id_map.valid_ids
        return ANY_INT64 if valid_ids is None else valid_ids

    @property
    def row_bytes(self) -> int:
        """Bytes of one whole row."""
        return self.dtype.row_bytes(self.dim)

    @property
    def policy_error(self) -> str | None:
        """What is wrong with the id policy, or None."""
        policy = self.id_policy
        if isinstance(policy, DefaultRow) and not 0 <= policy.default_row < self.rows:
            return f"id policy default_row: expected a row in [0, {self.rows}), got {policy.default_row}"
        return None

    def shard_bytes(self, shard: Shard) -> int:
        """Bytes of a shard of this table. Each shard has its own copy of a row's scale and bias."""
        return shard.height * self.dtype.row_bytes(shard.width)

    def columns_at(self, shard: Shard) -> slice:
        """Where in a whole row the elements of a shard are, in bytes."""
        # A column begins where a row that ended before it would end.
        return slice(*map(self.dtype.row_bytes, shard.columns))

    def shard_columns(self, stored: Bytes, shard: Shard) -> Bytes:
        """A shard's columns of whole rows, scale and bias included: [n, row bytes] → [n, row bytes of the shard]."""
        if shard.width == self.dim:
            return stored
        header = self.dtype.format.header_bytes
        return np.concatenate((stored[:, :header], stored[:, self.columns_at(shard)]), axis=1)

    def whole_shard(self, rank: int) -> Shard:
        """One shard with all of this table, at byte offset 0."""
        return Shard(table=self.name, rank=rank, rows=(0, self.rows), columns=(0, self.dim), offset_bytes=0)
