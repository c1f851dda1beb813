"""Requests as arrays: as they are sent, accepted and validated. The last step is `serving.requests.batches`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.requests.schema import FeatureSet

# The inputs of a lookup. Others are dense.
IDS = ("values", "lengths", "weights")
# The output with the pooled embeddings, [B, D]; and the output with rows, a row for each id: [M], for each feature
# [n, dim], one after the other.
EMBEDDINGS, SEQUENCES = "embeddings", "sequences"
# The output with the pooled embeddings of features that come once, [1, D].
SHARED = "once"
# The outputs of a lookup. Others are scores.
LOOKED_UP = (EMBEDDINGS, SEQUENCES, SHARED)

Ids = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]
Embeddings = npt.NDArray[np.float32] | npt.NDArray[np.float16]
Array = npt.NDArray[np.generic]
# Some of the features of a request; bool [F].
Mask = npt.NDArray[np.bool_]
# Dense inputs in the manifest's order, [B, *shape] each, of their dtypes.
Dense = Sequence[Array]
# What a request is answered with, by the name of the output. Each has the samples of the request first, [B, …], but
# `sequences` does not.
Outputs = Mapping[str, npt.NDArray[Any]]


@dataclass(eq=False, slots=True)
class Tensors:
    """A request as a client sends it. Dtypes and shapes are those of a good request; a bad one may have any.

    Fields that are not tensors travel as parameters (`serving.requests.parameters`).

    Attributes:
        features: the features asked for, in the order of the answer; all features of the model where None.
        values: ids, feature-major; int64 [N].
        lengths: bag sizes, feature-major; int32 [F·B], fewer where some features come once.
        weights: a weight for each id; float32 [N]. None for models that are not weighted.
        trace: the W3C `traceparent` that came with the request.
        bundle: the digest of the bundle that has to answer, SHA-256 of its manifest.json in hex. None: any bundle.
        every_host: whether to answer only if every host of a router does, even if no row of it is needed.
        outputs: the outputs that are asked for. Those that no feature of the request is answered in are left out.
        dense: dense inputs by name; [B, *shape], of their dtypes.
        tables: instead of `features`: the tables whose rows are asked for, in the order of the answer. `values` and
            `lengths` are by table.
        shared: the features, and dense inputs, that come once and count for all samples: one bag, or [1, *shape].
        part_of: what the bundle that answers has to be a part of, as `serving.bundle.plan.Part.text`. None: of any
            plan, or of none.
    """

    features: Sequence[str] | None
    values: Array
    lengths: Array
    weights: Array | None = None
    _: KW_ONLY
    trace: str | None = None
    bundle: str | None = None
    every_host: bool = False
    outputs: Collection[str] = LOOKED_UP
    dense: Mapping[str, Array] = field(default_factory=dict)
    tables: Sequence[str] | None = None
    shared: Collection[str] = ()
    part_of: str | None = None


@dataclass(eq=False, slots=True)
class KjtRequest:
    """A request over F features and B samples with the right dtypes and shapes. Lengths and ids are not checked.

    Attributes:
        selection: the features, in the order of the answer.
        values: ids, feature-major; int64 [N].
        lengths: bag sizes, feature-major; int32 [bags]: B of each feature, and one of each that comes once.
        weights: a weight for each id; float32 [N]. None for models that are not weighted.
        samples: B.
        positions: the place of each id in the bag that was sent, int64 [N]; None: as the ids lie.
        dense: what its scores need beside ids; None: no scores are asked for.
        outputs: the outputs that are asked for.
        rowless: the ids of sequences that read no row, but zeros; bool [N]. None: no such ids.
        shared: the shared features; bool [F]. None: no shared features.
        jagged: the jagged inputs of its scores as they were sent, in the manifest's order; None in place of rows.
        jagged_bytes: of all of them, rows as FP32; what is shared is repeated for each sample, except for the
            programs of a user side.
        is_user_side: whether the programs of the model's user side score it, for which no rows are repeated: exactly
            this side is shared, by enough items.
    """

    feature_set: FeatureSet
    values: Ids
    lengths: Lengths
    weights: Weights | None
    samples: int
    positions: Ids | None = None
    dense: Dense | None = None
    outputs: Collection[str] = LOOKED_UP
    rowless: npt.NDArray[np.bool_] | None = None
    shared: Mask | None = None
    jagged: Sequence[Array | None] = ()
    jagged_bytes: int = 0
    is_user_side: bool = False

    @property
    def bag_count(self) -> int:
        """The bags of each feature in a batch: B, at least 1 with shared features, whose bag is the first."""
        return self.samples if self.shared is None else max(self.samples, 1)

    @property
    def has_sequences(self) -> bool:
        """Whether some feature is not pooled."""
        return self.feature_set.pooled is not self.feature_set


@dataclass(eq=False, slots=True)
class ValidatedRequests:
    """R requests, one after the other, whose lengths and ids are right. A segment is a feature of a request.

    Attributes:
        requests: the requests [R].
        values: their ids; int64 [N].
        weights: their weights; float32 [N], or None.
        lengths: their bag sizes; int32 [bags].
        offsets: where each bag starts in `values`, then N; int64 [bags + 1].
        bag_bounds: where the bags of each segment start in `lengths`, then their number; int64 [S + 1].
        id_bounds: where the ids of each segment start in `values`, then N; int64 [S + 1].
    """

    requests: Sequence[KjtRequest]
    values: Ids
    weights: Weights | None
    lengths: Lengths
    offsets: Ids
    bag_bounds: Ids
    id_bounds: Ids
