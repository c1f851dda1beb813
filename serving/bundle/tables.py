"""The tables of a bundle, and the features that read them."""

import enum
import re
from typing import Any

import numpy as np

from serving.bundle.formats import Bytes, WeightDtype
from serving.bundle.id_maps import IdMap
from serving.bundle.plan import Shard
from serving.files import Strict

# The number of valid ids if any int64 is valid.
ANY_INT64 = 2**64
# Requests and config.pbtxt separate names by commas. Control characters break lines of logs and metrics.
# UTF-8 has no surrogates.
_NAME = re.compile(r"[^,\x00-\x1f\x7f-\x9f\ud800-\udfff]+")


def is_name(text: str) -> bool:
    """Whether `text` may name a table, a feature or a key: UTF-8, not empty, no commas or control characters."""
    return _NAME.fullmatch(text) is not None


class Pooling(enum.Enum):
    """How the rows of a bag are pooled into one row. An empty bag gives zeros.

    NONE does not pool: the answer has the row of each id, as TorchRec's EmbeddingCollection returns it.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class IdPolicy(enum.Enum):
    """What happens to an id outside [0, rows).

    ERROR: the request is refused. ZERO: the id contributes nothing, and MEAN does not count it. MODULO: every int64
    is a valid id, and reads the row id mod rows, which is in [0, rows) even for negative ids.
    """

    ERROR = "error"
    ZERO = "zero"
    MODULO = "modulo"


class DefaultRow(Strict, frozen=True):
    """An id policy: an id outside [0, rows) reads the row `default_row`. MEAN counts the id."""

    default_row: int

    @property
    def value(self) -> str:
        """The policy in the form of `--id-policy`."""
        return f"default_row:{self.default_row}"


class OutputDtype(enum.Enum):
    """The dtype of embeddings, by its KServe name."""

    FP32 = "FP32"
    FP16 = "FP16"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype."""
        return np.dtype(np.float32) if self is OutputDtype.FP32 else np.dtype(np.float16)


class Feature(Strict, frozen=True, omit_defaults=True):
    """A feature: the bags of one key of a request, looked up in one table.

    Attributes:
        name: the name of the feature.
        table: the name of the table that it reads.
        shared_key: its key in a request, if several tables read that key. None: the key has the feature's name.
        position_weights: FP32. The n-th id of a bag has the n-th of these weights, and a bag has at most as many ids
            as there are weights. The request's per-id weights are not used. Empty: each id has the weight 1, and a
            bag may have any number of ids. None: a weighted table uses the request's per-id weights.
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
        weighted: whether pooling weights its rows, by per-id weights or position weights.
        dtype: the dtype of its stored rows.
        id_map: maps raw ids to rows, and defines the valid ids; the id policy is `error` then. None: ids are row
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
        """Whether the answer has a row for each id, instead of a pooled one."""
        return self.pooling is Pooling.NONE

    @property
    def valid_ids(self) -> int:
        """Valid ids are in [0, valid_ids). `ANY_INT64`: any int64 is valid."""
        if self.id_map is None:
            return self.rows
        valid_ids = self.id_map.valid_ids
        return ANY_INT64 if valid_ids is None else valid_ids

    @property
    def row_bytes(self) -> int:
        """The bytes of a whole row."""
        return self.dtype.row_bytes(self.dim)

    @property
    def policy_error(self) -> str | None:
        """What is wrong with the id policy, or None."""
        policy = self.id_policy
        if isinstance(policy, DefaultRow) and not 0 <= policy.default_row < self.rows:
            return f"id policy default_row: expected a row in [0, {self.rows}), got {policy.default_row}"
        return None

    def shard_bytes(self, shard: Shard) -> int:
        """The bytes of a shard of this table. Each shard has its own copy of a row's scale and bias."""
        return shard.row_count * self.dtype.row_bytes(shard.width)

    def columns_at(self, shard: Shard) -> slice:
        """The bytes of a whole row that are the elements of a shard."""
        # A column begins where a row that ended before it would end.
        return slice(*map(self.dtype.row_bytes, shard.columns))

    def shard_columns(self, stored: Bytes, shard: Shard) -> Bytes:
        """A shard's columns of whole rows, with scale and bias: [n, row bytes] → [n, row bytes of the shard]."""
        if shard.width == self.dim:
            return stored
        header = self.dtype.format.header_bytes
        return np.concatenate((stored[:, :header], stored[:, self.columns_at(shard)]), axis=1)

    def whole_shard(self, rank: int) -> Shard:
        """A shard with the whole table, at byte offset 0."""
        return Shard(table=self.name, rank=rank, rows=(0, self.rows), columns=(0, self.dim), offset_bytes=0)
