"""Merge sequences into batches: features that are not pooled, so that the answer has a row for each id.

A sequence of n ids is n bags of one id, whose sums are the rows, bit for bit. So the program that pools also looks up
rows, for all shardings. Sequences have different numbers of bags, so they take separate calls: one for each feature,
or one for several features with small answers. Shorter sequences have empty bags at the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from serving.bundle.tensor_names import SEQUENCES
from serving.requests.batches import CombinedBatch, SequenceBatch
from serving.requests.offsets import bag_offsets, bounds_of, concatenate, index_of_ranges
from serving.requests.schema import LookupSchema, ScoringSchema
from serving.requests.types import Ids, KjtRequest, Mask, ValidatedRequests, Weights

# Several features are in one call if its answer has at most this many numbers: 256 KiB of FP32. A larger one leaves
# the processor's cache, and copying its columns takes longer than a separate call.
_MOST_NUMBERS = 64 << 10
# Maximum rows of a call. Hosts count them as samples, of which they accept 65,536 by default.
_MOST_ROWS = 32 << 10


def merge_sequences(schema: LookupSchema, validated: ValidatedRequests) -> Iterator[SequenceBatch]:
    """The batches of all sequences that requests or their scores need."""
    sequences = _sequences_of(schema, validated)
    if sequences is None:
        return
    for group in _grouped(sequences):
        if len(group) > 1:
            yield _merge_several(schema, sequences, group)
            continue
        (feature,) = group
        start, end = int(sequences.first[feature]), int(sequences.first[feature + 1])
        for first in range(start, max(end, start + 1), _MOST_ROWS):
            last = min(first + _MOST_ROWS, end)
            bounds = sequences.bounds[[feature]]
            if last - first < end - start:
                bounds = (bounds - (first - start)).clip(0, last - first)
            yield _merge_one(schema, sequences, feature, slice(first, last), bounds)


def merge_combined(schema: LookupSchema, validated: ValidatedRequests) -> CombinedBatch | None:
    """All features for the scores of one request in one batch: pooled features and sequences.

    Returns:
        The batch, or None if its answer would be large, or if the request has shared features, weights, ids without
        rows, or outputs that are not scores.
    """
    (request,) = validated.requests
    features, samples = request.feature_set, request.samples
    is_plain = request.shared is None and request.rowless is None and validated.weights is None
    is_for_scores = request.dense is not None and schema.scores.issuperset(request.outputs)
    if not samples or not is_plain or not is_for_scores:
        return None
    if not isinstance(schema, ScoringSchema) or not schema.scores_all_rows:
        return None
    bags = np.where(features.sequence, validated.id_bounds[1:] - validated.id_bounds[:-1], samples)
    most_bags = max(samples, int(bags.max()))
    if most_bags * features.ends.item(-1) > _MOST_NUMBERS:
        return None
    lengths = (np.arange(most_bags) < bags[:, np.newaxis]).astype(np.int32)
    pooled = features.pooled.positions
    lengths[pooled, :samples] = validated.lengths.reshape(-1, samples)[pooled]
    bounds = np.zeros((bags.size, 2), np.int64)
    bounds[:, 1] = bags
    return CombinedBatch(features, validated.values, bag_offsets(lengths.ravel()), None, bounds, samples)


@dataclass(frozen=True, eq=False, slots=True)
class _Sequences:
    """The sequences to look up for R requests: S features, in the schema's order, each with the ids of all requests.

    Attributes:
        positions: the features, as positions in the schema; int64 [S].
        dims: the columns of each feature; int64 [S].
        ids: ids, feature-major; int64 [N].
        has_row: whether an id reads a row; bool [N], or None if all ids do.
        first: the start of each feature's ids, then N; int64 [S + 1].
        bounds: the start of each request's ids among the ids of the feature, then their end; int64 [S, R + 1].
        weighted: whether the model takes weights.
    """

    positions: Ids
    dims: Ids
    ids: Ids
    has_row: Mask | None
    first: Ids
    bounds: Ids
    weighted: bool

    def weights(self, values: Ids) -> Weights | None:
        """A weight of 1 for each of `values`, if the model takes weights."""
        return np.ones(values.size, np.float32) if self.weighted else None


def _sequences_of(schema: LookupSchema, validated: ValidatedRequests) -> _Sequences | None:
    """The sequences to look up for some requests, or None if they need none."""
    requests = validated.requests
    masks = [_features_to_look_up(schema, request) for request in requests]
    segments = np.flatnonzero(concatenate(masks))
    if not segments.size:
        return None
    features = concatenate([request.feature_set.positions for request in requests])[segments]
    # Segments are in the order of requests. A stable sort puts them in the order of features.
    order = features.argsort(kind="stable")
    segments, features = segments[order], features[order]
    starts = validated.id_bounds[segments]
    counts = validated.id_bounds[segments + 1] - starts
    is_first = np.ones(features.size, np.bool_)
    np.not_equal(features[1:], features[:-1], out=is_first[1:])
    positions = features[is_first]
    bounds = np.zeros((positions.size, len(requests) + 1), np.int64)
    request_of = np.arange(len(requests)).repeat([mask.size for mask in masks])[segments]
    bounds[is_first.cumsum() - 1, request_of + 1] = counts
    np.add.accumulate(bounds, axis=1, out=bounds)
    index = index_of_ranges(starts, counts)
    return _Sequences(
        positions,
        schema.all_features.dims[positions],
        validated.values[index],
        _have_rows(requests, index),
        bounds_of(bounds[:, -1]),
        bounds,
        validated.weights is not None,
    )


def _features_to_look_up(schema: LookupSchema, request: KjtRequest) -> Mask:
    """The features whose rows a request or its scores need: bool [F]."""
    if SEQUENCES in request.outputs or request.dense is None or not isinstance(schema, ScoringSchema):
        return request.feature_set.sequence & (SEQUENCES in request.outputs)
    return schema.scored_rows  # the request has all features, in the schema's order


def _have_rows(requests: Sequence[KjtRequest], index: slice | Ids) -> Mask | None:
    """Whether the ids at `index` read a row: bool, or None if all ids do."""
    if all(request.rowless is None for request in requests):
        return None
    rowless = [
        np.zeros(request.values.size, np.bool_) if request.rowless is None else request.rowless
        for request in requests
    ]
    has_row: Mask = ~concatenate(rowless)[index]
    return has_row


def _merge_one(schema: LookupSchema, sequences: _Sequences, feature: int, index: slice, bounds: Ids) -> SequenceBatch:
    """A batch for the rows of one feature, for the ids at `index`. `bounds`: int64 [1, R + 1]."""
    values = sequences.ids[index]
    offsets = np.arange(values.size + 1)
    if sequences.has_row is not None:
        has_row = sequences.has_row[index]
        values, offsets = values[has_row], bounds_of(has_row.astype(np.int64))
    features = schema.subset((int(sequences.positions[feature]),))
    return SequenceBatch(features, values, offsets, sequences.weights(values), bounds)


def _merge_several(schema: LookupSchema, sequences: _Sequences, group: Sequence[int]) -> SequenceBatch:
    """A batch for the rows of several features. Features with fewer ids get empty bags at the end."""
    bounds = sequences.bounds[group]
    index = index_of_ranges(sequences.first[group], bounds[:, -1])
    values = sequences.ids[index]
    has_bag = np.arange(bounds[:, -1].max()) < bounds[:, -1:]
    lengths = has_bag.astype(np.int32)
    if sequences.has_row is not None:
        has_row = sequences.has_row[index]
        lengths[has_bag] = has_row
        values = values[has_row]
    features = schema.subset(tuple(sequences.positions[group].tolist()))
    return SequenceBatch(features, values, bag_offsets(lengths.ravel()), sequences.weights(values), bounds)


def _grouped(sequences: _Sequences) -> Iterator[list[int]]:
    """Divide features into groups, each for one call: positions in `sequences`, sorted."""
    rows, dims = sequences.bounds[:, -1].tolist(), sequences.dims.tolist()
    group: list[int] = []
    width = most_rows = 0
    for feature in sorted(range(len(rows)), key=rows.__getitem__, reverse=True):
        width += dims[feature]
        if group and most_rows * width > _MOST_NUMBERS:
            yield sorted(group)
            group, width = [], dims[feature]
        if not group:
            most_rows = rows[feature]
        group.append(feature)
    yield sorted(group)
