"""Merge the pooled features of requests into batches.

Features with a bag for each sample are in one batch. Shared features are in another batch with one bag for each
request, so that they are looked up once and no embedding is copied. Scores need all features side by side, so a
shared feature has its bag in the first sample of the request then, and its embedding is repeated after the lookup.
`serving.requests.merge_sequences` merges sequences.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from serving.bundle.tensor_names import EMBEDDINGS, SHARED
from serving.requests.batches import Batch, Member, Part, PooledBatch, SharedBatch
from serving.requests.layout import are_alike, features_first
from serving.requests.merge_sequences import merge_combined, merge_sequences
from serving.requests.offsets import bag_offsets, concatenate, index_of_ranges, ranges
from serving.requests.schema import FeatureSet, LookupSchema
from serving.requests.types import Ids, KjtRequest, Mask, ValidatedRequests, Weights


def merge_all(schema: LookupSchema, validated: ValidatedRequests) -> list[Batch]:
    """Merge requests into batches. Features that only unrequested outputs need are left out.

    If a batch of pooled features is needed, it is the first one. Scores are computed from it.
    """
    requests = validated.requests
    if all(map(_is_one_batch, requests)):
        return [merge(schema, validated)] if requests else []
    if len(requests) == 1 and (combined := merge_combined(schema, validated)) is not None:
        return [combined]
    batches: list[Batch] = []
    pooled = [_pooled_features(request) for request in requests]
    if any(mask.any() for mask in pooled):
        batches.append(PooledBatch(*_merge_parts(schema, validated, pooled, lambda request: request.samples)))
    shared = [_shared_features(request) for request in requests]
    if any(mask.any() for mask in shared):
        batches.append(SharedBatch(*_merge_parts(schema, validated, shared, lambda _: 1)))
    return [*batches, *merge_sequences(schema, validated)]


def merge(schema: LookupSchema, validated: ValidatedRequests) -> PooledBatch:
    """Merge requests, with all of their features, so that one TBE call answers them.

    KJT is feature-major, so this interleaves the requests per feature; it is not a concatenation. Requests may have
    different features in different orders. The batch has every feature that a request has. A request without the
    feature has empty bags there.

    Returns:
        values int64 [N], offsets int64 [F·B + 1], weights float32 [N] or None; B is the sum of all B_r. With R = 1
        they are the request's own arrays: nothing is copied.
    """
    requests = validated.requests
    features = requests[0].feature_set
    if len(requests) == 1 and requests[0].shared is None:
        return PooledBatch(features, validated.values, validated.offsets, validated.weights, requests)
    if are_alike(requests):
        shape = len(requests), len(features.names)
        order = features_first(*shape)
        lengths = validated.lengths.reshape(*shape, requests[0].samples).swapaxes(0, 1).ravel()
        starts, ends = validated.id_bounds[:-1][order], validated.id_bounds[1:][order]
        index = ranges(starts, ends - starts)
        weights = None if validated.weights is None else validated.weights.take(index)
        return PooledBatch(features, validated.values.take(index), bag_offsets(lengths), weights, requests)
    return PooledBatch(*_interleave(schema, validated, requests, np.arange(validated.id_bounds.size - 1)))


def _merge_parts(
    schema: LookupSchema,
    validated: ValidatedRequests,
    masks: Sequence[Mask],
    samples_of: Callable[[KjtRequest], int],
) -> tuple[FeatureSet, Ids, Ids, Weights | None, Sequence[Member]]:
    """Merge some features of requests: the arguments of a `PooledBatch`.

    Args:
        schema: the features of the model.
        validated: the requests [R].
        masks: the features of each request; bool [F]. A request without features has no bags in the batch.
        samples_of: the number of bags of such features in a request.
    """
    parts = []
    for request, mask in zip(validated.requests, masks, strict=True):
        features = schema.subset(request.feature_set.positions[mask].tolist())
        samples = samples_of(request) if features.names else 0
        shared = None if request.shared is None or request.dense is None else request.shared[mask]
        parts.append(Part(features, samples, shared, samples if shared is None else max(samples, 1)))
    return _interleave(schema, validated, parts, np.flatnonzero(concatenate(masks)))


def _interleave(
    schema: LookupSchema, validated: ValidatedRequests, members: Sequence[Member], segments: Ids
) -> tuple[FeatureSet, Ids, Ids, Weights | None, Sequence[Member]]:
    """Interleave segments per feature: the arguments of a `PooledBatch`.

    Args:
        schema: the features of the model.
        validated: the requests [R].
        members: the part of each request in the batch [R].
        segments: the segments of all members, in order; int64 [S]. A segment is a feature of a request.
    """
    id_starts, bag_starts = validated.id_bounds[segments], validated.bag_bounds[segments]
    id_counts, bag_counts = (
        validated.id_bounds[segments + 1] - id_starts,
        validated.bag_bounds[segments + 1] - bag_starts,
    )
    lengths = validated.lengths[index_of_ranges(bag_starts, bag_counts)]
    features = members[0].feature_set
    if len(members) == 1 and members[0].shared is None:
        index = index_of_ranges(id_starts, id_counts)
    else:
        if any(member.feature_set is not features for member in members):
            features = schema.all_features.subset(
                np.unique(concatenate([member.feature_set.positions for member in members]))
            )
        # The feature of each segment, as a position in the batch: int64 [S].
        positions = concatenate([features.positions_of(member.feature_set) for member in members])
        # Segments are in the order of requests. A stable sort puts them in the order of features.
        order = positions.argsort(kind="stable")
        rows = [member.bag_count for member in members]
        total = sum(rows)
        first_rows = np.array([*accumulate(rows, initial=0)][:-1]).repeat(
            [len(member.feature_set.names) for member in members]
        )
        lengths_of_segments = lengths
        lengths = np.zeros(len(features.names) * total, np.int32)
        lengths[ranges(positions * total + first_rows, bag_counts)] = lengths_of_segments
        index = index_of_ranges(id_starts[order], id_counts[order])
    weights = None if validated.weights is None else validated.weights[index]
    return features, validated.values[index], bag_offsets(lengths), weights, members


def _is_one_batch(request: KjtRequest) -> bool:
    """Whether all features of a request are looked up in one batch."""
    if request.dense is not None:
        return not request.has_sequences
    return EMBEDDINGS in request.outputs and request.shared is None and not request.has_sequences


def _pooled_features(request: KjtRequest) -> Mask:
    """The features of a request that a `PooledBatch` has: bool [F]."""
    pooled: Mask = ~request.feature_set.sequence
    if request.dense is not None:
        return pooled
    pooled &= EMBEDDINGS in request.outputs
    return pooled if request.shared is None else pooled & ~request.shared


def _shared_features(request: KjtRequest) -> Mask:
    """The features of a request that a `SharedBatch` has: bool [F]."""
    if request.shared is None or request.dense is not None or SHARED not in request.outputs:
        return np.zeros(len(request.feature_set.names), np.bool_)
    return request.shared & ~request.feature_set.sequence
