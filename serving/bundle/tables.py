"""The tables of a bundle, and the features that read them."""

import enum
import re

from serving.bundle.id_maps import IdMap
from serving.bundle.plan import Shard
from serving.bundle.rows import WeightDtype
from serving.files.reading import Strict

# Requests and config.pbtxt list names with commas. Control characters break lines of logs and metrics.
_NAME = re.compile(r"[^,\x00-\x1f\x7f-\x9f]+")


def is_name(text: str) -> bool:
    """Whether `text` may name a table, a feature or a key: it is not empty, without commas and control characters."""
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
    """The dtype of the pooled embeddings, by its KServe name."""

    FP32 = "FP32"
    FP16 = "FP16"


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
        id_map: maps raw ids to rows. Then any int64 is a valid id, and the id policy is `error`. None: ids are row
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
