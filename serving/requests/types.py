"""Requests as arrays: as they are sent, accepted and validated. The last step is `serving.requests.batches`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.bundle.tensor_names import LOOKED_UP
from serving.requests.schema import FeatureSet

Ids = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]
Embeddings = npt.NDArray[np.float32] | npt.NDArray[np.float16]
Array = npt.NDArray[np.generic]
# Some of the features of a request; bool [F].
Mask = npt.NDArray[np.bool_]
# Dense inputs in the manifest's order, [B, *shape] each, of their dtypes.
Dense = Sequence[Array]
# The outputs of a request by name. All but `sequences` have a row for each sample, [B, …].
Outputs = Mapping[str, npt.NDArray[Any]]


@dataclass(eq=False, slots=True)
class Tensors:
    """A request as a client sends it. The dtypes and shapes below are not checked yet.

    Fields that are not tensors are sent as parameters (`serving.requests.parameters`).

    Attributes:
        features: the requested features, in the order of the answer, or None for all features of the model.
        values: ids, feature-major; int64 [N].
        lengths: bag sizes, feature-major; int32 [F·B], or fewer if features are shared.
        weights: a weight for each id, float32 [N], or None for models without weights.
        trace: the W3C `traceparent` of the request.
        bundle: the digest of the bundle that must answer, SHA-256 of its manifest.json in hex, or None for any
            bundle.
        every_host: whether to answer only if every host of a router answers, even if its rows are not needed.
        outputs: the requested outputs. Outputs without a feature of the request are left out of the answer.
        dense: dense inputs by name; [B, *shape], of their dtypes.
        tables: in place of `features`, the tables whose rows are requested, in the order of the answer. `values` and
            `lengths` are by table.
        shared: the features and dense inputs that all samples share: one bag, or [1, *shape].
        part_of: the plan that the answering bundle must be a part of, as `serving.bundle.plan.Part.text`, or None for
            any.
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
        feature_set: the features, in the order of the answer.
        values: ids, feature-major; int64 [N].
        lengths: bag sizes, feature-major; int32 [bags]: B for each feature, or one for a shared feature.
        weights: a weight for each id, float32 [N], or None for models without weights.
        samples: B.
        positions: the position of each id in the bag that was sent, int64 [N]; None: in the order of the ids.
        dense: the dense inputs of its scores, or None if it requests no scores.
        outputs: the requested outputs.
        rowless: the ids of sequences that read zeros instead of a row; bool [N], or None if there are none.
        shared: the shared features; bool [F], or None if no feature is shared.
        jagged: the jagged inputs of its scores as they were sent, in the manifest's order, with None for rows.
        jagged_bytes: the bytes of all jagged inputs, with rows as FP32. Shared inputs count for each sample, except
            for the programs of a user side.
        is_user_side: whether the programs of the model's user side score it, which repeat no rows: exactly the inputs
            of the user side are shared, by enough items.
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
        """The bags of each feature in a batch: B, or at least 1 with shared features, whose bag is the first one."""
        return self.samples if self.shared is None else max(self.samples, 1)

    @property
    def has_sequences(self) -> bool:
        """Whether a feature is not pooled."""
        return self.feature_set.pooled is not self.feature_set


@dataclass(eq=False, slots=True)
class ValidatedRequests:
    """R requests, one after the other, with checked lengths and ids. A segment is a feature of a request.

    Attributes:
        requests: the requests [R].
        values: their ids; int64 [N].
        weights: their weights; float32 [N], or None.
        lengths: their bag sizes; int32 [bags].
        offsets: the start of each bag in `values`, then N; int64 [bags + 1].
        bag_bounds: the start of each segment's bags in `lengths`, then the number of bags; int64 [S + 1].
        id_bounds: the start of each segment's ids in `values`, then N; int64 [S + 1].
    """

    requests: Sequence[KjtRequest]
    values: Ids
    weights: Weights | None
    lengths: Lengths
    offsets: Ids
    bag_bounds: Ids
    id_bounds: Ids
