"""Batches: the input of a TBE call for several requests, in three kinds, each of which can unmerge its answer.

`PooledBatch` has a bag of each feature for each sample, `SharedBatch` a bag for each request, and `SequenceBatch` a
bag of one id for each row of a sequence. `CombinedBatch` is a `SequenceBatch` that also has the pooled features of
its single request. `serving.requests.merge` makes them.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from serving.bundle.tensor_names import EMBEDDINGS, SEQUENCES, SHARED
from serving.requests.offsets import concatenate, ranges
from serving.requests.schema import FeatureSet
from serving.requests.types import Embeddings, Ids, Mask, Outputs, ValidatedRequests, Weights


class Member(Protocol):
    """The part of a request in a batch: the whole request, or a `Part` of it."""

    @property
    def feature_set(self) -> FeatureSet:
        """Its features."""

    @property
    def samples(self) -> int:
        """B."""

    @property
    def shared(self) -> Mask | None:
        """The features that its samples share; bool [F], or None if no feature is shared."""

    @property
    def bag_count(self) -> int:
        """The number of bags of each of its features in the batch."""


@dataclass(eq=False, slots=True)
class Part:
    """Some features of a request, for a batch that does not have all features. Attributes as in `Member`."""

    feature_set: FeatureSet
    samples: int
    shared: Mask | None
    bag_count: int


@dataclass(eq=False, slots=True)
class Batch(ABC):
    """The input of a TBE call. A feature has the bags of the first request, then of the second, and so on.

    Attributes:
        feature_set: the features of the batch.
        values: ids, feature-major; int64 [N].
        offsets: the start of each bag in `values`, then N; int64 [F·B + 1].
        weights: a weight for each id; float32 [N], or None.
    """

    feature_set: FeatureSet
    values: Ids
    offsets: Ids
    weights: Weights | None

    @property
    @abstractmethod
    def bounds(self) -> Ids:
        """The start of each request's bags among the bags of each feature, then their end; int64 [F, R + 1]."""


@dataclass(eq=False, slots=True)
class PooledBatch(Batch):
    """R requests with a bag of each feature for each sample.

    In a request for scores, the only bag of a shared feature is the first one, and the others are empty.

    Attributes:
        members: the part of each request in the batch [R].
    """

    members: Sequence[Member]

    @property
    def bounds(self) -> Ids:
        """As in `Batch`. All features have the same."""
        bounds = np.cumsum([0, *(member.bag_count for member in self.members)])
        return np.broadcast_to(bounds, (len(self.feature_set.names), bounds.size))

    def unmerge(self, embeddings: Embeddings) -> list[Embeddings]:
        """Split the answer to this batch into the answers to its requests.

        Args:
            embeddings: the answer; float32 or float16 [B, D].

        Returns:
            An array [bag_count, D_r] for each request, of the same dtype: a view of `embeddings`, or a copy if the
            features of the request or their order differ from the batch.
        """
        merged = self.feature_set
        answers: list[Embeddings] = []
        end = 0
        for member in self.members:
            start, end = end, end + member.bag_count
            answer = embeddings[start:end]
            if member.feature_set is not merged:
                positions = merged.positions_of(member.feature_set)
                answer = answer.take(ranges((merged.ends - merged.dims)[positions], merged.dims[positions]), axis=1)
            answers.append(answer)
        return answers

    def outputs(self, member: Member, embeddings: Embeddings, requested: Collection[str]) -> dict[str, Embeddings]:
        """The outputs of one request: `embeddings` [B, D_1] and, for shared features, `once` [1, D_2].

        Args:
            member: the part of the request in this batch.
            embeddings: its part of the answer, [bag_count, D_1 + D_2].
            requested: the requested outputs.
        """
        if member.shared is None:
            return {EMBEDDINGS: embeddings} if EMBEDDINGS in requested else {}
        is_shared = np.repeat(member.shared, member.feature_set.dims)
        outputs = {}
        if EMBEDDINGS in requested and not member.shared.all():
            outputs[EMBEDDINGS] = embeddings[: member.samples, ~is_shared]
        if SHARED in requested and member.shared.any():
            outputs[SHARED] = embeddings[:1, is_shared]
        return outputs

    def for_scores(self, embeddings: Embeddings, numbers: Sequence[int], *, repeated: bool) -> Embeddings:
        """The pooled embeddings for the scores of some requests, one request after another, [B, D].

        Args:
            embeddings: the answer to this batch, with all pooled features of the model. Rows of shared features are
                overwritten.
            numbers: the requests, as sorted positions in `members`.
            repeated: whether the row of a shared feature is repeated for each sample. If not, only the first row of
                its request has it.
        """
        members = [self.members[number] for number in numbers]
        if len(numbers) == len(self.members) and all(member.shared is None for member in members):
            return embeddings
        bounds = np.cumsum([0, *(member.bag_count for member in self.members)])
        parts = [embeddings[bounds[number] : bounds[number + 1]] for number in numbers]
        if not repeated:
            return concatenate([part[: member.samples] for part, member in zip(parts, members, strict=True)])
        return concatenate([repeat_shared(part, member) for part, member in zip(parts, members, strict=True)])


@dataclass(eq=False, slots=True)
class SharedBatch(PooledBatch):
    """R requests with one bag of each feature, which all samples of the request share."""

    def outputs(
        self,
        member: Member,  # noqa: ARG002
        embeddings: Embeddings,
        requested: Collection[str],  # noqa: ARG002
    ) -> dict[str, Embeddings]:
        """The outputs of one request: `once` [1, D_r]."""
        return {SHARED: embeddings}


@dataclass(eq=False, slots=True)
class SequenceBatch(Batch):
    """R requests with a bag of one id for each row of a sequence. Shorter sequences have empty bags at the end.

    Attributes:
        row_bounds: the bounds of `Batch`, which differ by feature; int64 [F, R + 1].
    """

    row_bounds: Ids

    @property
    def bounds(self) -> Ids:
        """As in `Batch`."""
        return self.row_bounds

    @property
    def sequences(self) -> Iterable[int]:
        """The positions of the batch's features that are sequences."""
        return range(len(self.feature_set.names))

    def unmerge(self, embeddings: Embeddings) -> dict[tuple[int, int], Embeddings]:
        """Split the answer to this batch into the rows of each request.

        Args:
            embeddings: the answer; float32 or float16 [B, D].

        Returns:
            [n, dim] by the number of the request and the position of the feature in the schema; views.
        """
        features = self.feature_set
        ends = features.ends.tolist()
        rows = {}
        for feature in self.sequences:
            dim, end, position = features.dims.item(feature), ends[feature], features.positions.item(feature)
            for number, (first, last) in enumerate(pairwise(self.row_bounds[feature].tolist())):
                rows[number, position] = embeddings[first:last, end - dim : end]
        return rows


@dataclass(eq=False, slots=True)
class CombinedBatch(SequenceBatch):
    """The sequences of one request for scores, and its pooled features with a bag for each sample.

    Attributes:
        samples: B.
    """

    samples: int

    @property
    def sequences(self) -> Iterable[int]:
        """As in `SequenceBatch`."""
        sequences: list[int] = np.flatnonzero(self.feature_set.sequence).tolist()
        return sequences

    def for_scores(
        self,
        embeddings: Embeddings,
        numbers: Sequence[int],  # noqa: ARG002
        *,
        repeated: bool,  # noqa: ARG002
    ) -> Embeddings:
        """As `PooledBatch.for_scores`, for its only request."""
        return embeddings[: self.samples, self.feature_set.pooled_columns]


def unmerge_rows(batches: Sequence[Batch], answers: Sequence[Embeddings]) -> dict[tuple[int, int], Embeddings]:
    """The rows of all sequences, by the number of the request and the position of the feature in the schema.

    They are [n, dim]: views of `answers`, or copies if several batches have parts of a sequence.
    """
    parts: dict[tuple[int, int], list[Embeddings]] = {}
    for batch, answer in zip(batches, answers, strict=True):
        if isinstance(batch, SequenceBatch):
            for key, rows in batch.unmerge(answer).items():
                parts.setdefault(key, []).append(rows)
    return {key: concatenate(rows) for key, rows in parts.items()}


def unmerge(validated: ValidatedRequests, batches: Sequence[Batch], answers: Sequence[Embeddings]) -> list[Outputs]:
    """The outputs of each request, from the answers to all batches.

    Returns:
        The requested outputs of each request: `embeddings` [B, D], `once` [1, D] and `sequences` [M]; float32 or
        float16. `sequences` has the rows [n, dim] of each feature, one feature after another.
    """
    outputs: list[dict[str, Embeddings]] = [{} for _ in validated.requests]
    for batch, answer in zip(batches, answers, strict=True):
        if not isinstance(batch, PooledBatch):
            continue
        parts = zip(outputs, validated.requests, batch.members, batch.unmerge(answer), strict=True)
        for outputs_of_request, request, member, embeddings in parts:
            if member.feature_set.names:
                outputs_of_request |= batch.outputs(member, embeddings, request.outputs)
    if len(batches) == 1 and isinstance(batches[0], PooledBatch):
        return outputs  # type: ignore[return-value]
    with_sequences = [
        number
        for number, request in enumerate(validated.requests)
        if SEQUENCES in request.outputs and request.has_sequences
    ]
    rows = unmerge_rows(batches, answers) if with_sequences else {}
    for number in with_sequences:
        features = validated.requests[number].feature_set
        positions = features.positions[features.sequence].tolist()
        outputs[number][SEQUENCES] = concatenate([rows[number, position].reshape(-1) for position in positions])
    return outputs  # type: ignore[return-value]


def repeat_shared(embeddings: Embeddings, member: Member) -> Embeddings:
    """Repeat the rows of shared features for each sample of a request.

    Args:
        embeddings: its part of the answer to a batch, [bag_count, D], which is overwritten.
        member: the part of the request in the batch.

    Returns:
        [B, D].
    """
    if member.shared is not None:
        features = member.feature_set
        for feature in np.flatnonzero(member.shared).tolist():
            columns = slice(features.ends[feature] - features.dims[feature], features.ends[feature])
            embeddings[1:, columns] = embeddings[0, columns]
    return embeddings[: member.samples]
