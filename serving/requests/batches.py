"""Requests → groups of limited size → batches to look up; and the answers to the batches → outputs of the requests.

A request is never refused because of others: requests that are too large together take several TBE calls.

Features with a bag for each sample share a batch. Features that are sent once have a batch of their own, in which a
request has one sample. So one bag is looked up for them, and no embedding is copied. Scores need all features side by
side. For these, a feature that is sent once is in the first sample of the request, until it is spread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from serving.errors import InvalidRequest, Reason
from serving.requests.kjt import merge, split
from serving.requests.offsets import bag_bounds, bounds_of, joined, offsets_of, place
from serving.requests.schema import LookupSchema
from serving.requests.sequences import one_batch, row_batches, rows_of
from serving.requests.types import (
    EMBEDDINGS,
    SEQUENCES,
    SHARED,
    Batch,
    Embeddings,
    Ids,
    KjtRequest,
    Mask,
    Outputs,
    ValidatedRequests,
)


class Limits(Protocol):
    """The settings that limit requests, TBE calls and the backlog. Defaults are in `serving.model.settings` only."""

    @property
    def max_request_ids(self) -> int:
        """Most ids in a request. A larger one is refused."""

    @property
    def max_request_samples(self) -> int:
        """Most samples in a request. A larger one is refused."""

    @property
    def merged_requests(self) -> int:
        """Most requests that one TBE call answers."""

    @property
    def max_call_ids(self) -> int:
        """Most ids in a TBE call."""

    @property
    def max_call_samples(self) -> int:
        """Most samples in a TBE call."""

    @property
    def max_sequence_bytes(self) -> int:
        """Most bytes of unpooled rows, as FP32, and of jagged inputs of scores: of a request, and of one group."""

    @property
    def max_busy_ms(self) -> int:
        """Load shedding: a request that has waited longer than this, in milliseconds, is refused."""


def check_size(ids: int, samples: int, limits: Limits) -> None:
    """Refuse a request that has more ids or samples than `limits` allow.

    Raises:
        InvalidRequest: naming the limit, the number in the request, and what to do.
    """
    _expect_at_most("ids", ids, limits.max_request_ids, "max-request-ids")
    _expect_at_most("samples", samples, limits.max_request_samples, "max-request-samples")


def check_sequences(request: KjtRequest, limits: Limits) -> None:
    """Refuse a request whose sequences would take more bytes than `limits` allow. Its lengths may be wrong.

    Raises:
        InvalidRequest: naming the limit, the bytes that it asks for, and what to do.
    """
    _expect_at_most("bytes of sequences", sequence_bytes(request), limits.max_sequence_bytes, "max-sequence-bytes")


def sequence_bytes(request: KjtRequest) -> int:
    """Bytes of the unpooled rows that a request asks for, as FP32, and of the jagged inputs of its scores."""
    feature_set = request.feature_set
    if feature_set.pooled is feature_set or SEQUENCES not in request.outputs:
        return request.jagged_bytes
    bags = bag_bounds(len(feature_set.names), request.samples, request.shared)
    ids = np.diff(bounds_of(request.lengths.astype(np.int64))[bags])
    answered = int(ids[feature_set.sequence] @ feature_set.dims[feature_set.sequence]) * np.dtype(np.float32).itemsize
    return answered + request.jagged_bytes


def grouped(requests: Sequence[KjtRequest], limits: Limits) -> Iterator[list[int]]:
    """Divide requests into groups, each for one TBE call.

    Yields:
        The positions of a group's requests, in order. A request that is too large for a call is a group of its own.
    """
    group: list[int] = []
    ids = samples = row_bytes = 0
    for position, request in enumerate(requests):
        ids += request.values.size
        samples += request.samples
        row_bytes += (own_row_bytes := sequence_bytes(request))
        too_large = samples > limits.max_call_samples or row_bytes > limits.max_sequence_bytes
        if group and (ids > limits.max_call_ids or too_large):
            yield group
            group, ids, samples, row_bytes = [], request.values.size, request.samples, own_row_bytes
        group.append(position)
    if group:
        yield group


def _expect_at_most(what: str, found: int, limit: int, setting: str) -> None:
    if found > limit:
        raise InvalidRequest(
            f"{what}: expected at most {limit} in a request, got {found}: send several requests, or have the "
            f"server's limit raised (`tbe-serve configure --{setting}`)",
            Reason.SIZE,
        )


def batches_of(schema: LookupSchema, checked: ValidatedRequests) -> list[Batch]:
    """The batches to look up for some requests, without outputs that none wants.

    Where features are pooled, scores are made of the first one; and of rows, where the dense part takes some.
    """
    requests = checked.requests
    if all(map(_is_whole, requests)):
        return [merge(schema, checked)] if requests else []
    if len(requests) == 1 and (batch := one_batch(schema, checked)) is not None:
        return [batch]
    batches = []
    for parts, is_shared in (([_each(request) for request in requests], False), ([_once(r) for r in requests], True)):
        if (kept := np.flatnonzero(joined(parts))).size:
            batches.append(
                replace(merge(schema, _part(schema, checked, parts, kept, is_shared)), is_shared=is_shared)
            )
    return [*batches, *row_batches(schema, checked)]


def outputs_of(checked: ValidatedRequests, batches: Sequence[Batch], answers: Sequence[Embeddings]) -> list[Outputs]:
    """The outputs of each request, from the answers to all batches.

    Returns:
        For each request, those that it asks for of `embeddings` [B, D], `once` [1, D] and `sequences` [M]; float32 or
        float16. `sequences` has the rows [n, dim] of each feature, one feature after the other.
    """
    outputs: list[dict[str, Embeddings]] = [{} for _ in checked.requests]
    for batch, answer in zip(batches, answers, strict=True):
        if batch.row_bounds is None:
            for found, request, embeddings in zip(outputs, batch.requests, split(answer, batch), strict=True):
                if request.feature_set.names:
                    found |= {SHARED: embeddings} if batch.is_shared else _divided(embeddings, request)
    if len(batches) == 1 and batches[0].row_bounds is None:
        return outputs  # type: ignore[return-value]
    wanting = [SEQUENCES in each.outputs and _has_sequences(each) for each in checked.requests]
    by_feature = rows_of(batches, answers) if any(wanting) else {}
    for number, (found, request) in enumerate(zip(outputs, checked.requests, strict=True)):
        if wanting[number]:
            positions = request.feature_set.positions[request.feature_set.sequence].tolist()
            found[SEQUENCES] = joined([by_feature[number, position].reshape(-1) for position in positions])
    return outputs  # type: ignore[return-value]


def _divided(embeddings: Embeddings, request: KjtRequest) -> Outputs:
    """The outputs of a request: `embeddings` [B, D_1] of features with a bag for each sample, and `once` [1, D_2] of
    those that come once. Each is there if it is asked for and there are such features.

    Args:
        embeddings: its part of the answer to a batch, [height, D_1 + D_2].
        request: the request.
    """
    if request.shared is None:
        return {EMBEDDINGS: embeddings} if EMBEDDINGS in request.outputs else {}
    here = np.repeat(request.shared, request.feature_set.dims)
    found = {}
    if EMBEDDINGS in request.outputs and not request.shared.all():
        found[EMBEDDINGS] = embeddings[: request.samples, ~here]
    if SHARED in request.outputs and request.shared.any():
        found[SHARED] = embeddings[:1, here]
    return found


def _is_whole(request: KjtRequest) -> bool:
    """Whether all of its features are looked up in one batch."""
    if request.dense is not None:
        return not _has_sequences(request)
    return EMBEDDINGS in request.outputs and request.shared is None and not _has_sequences(request)


def _has_sequences(request: KjtRequest) -> bool:
    return request.feature_set.pooled is not request.feature_set


def _each(request: KjtRequest) -> Mask:
    """The features that are looked up for each sample, or for scores: bool [F]."""
    pooled: Mask = ~request.feature_set.sequence
    if request.dense is not None:
        return pooled
    pooled &= EMBEDDINGS in request.outputs
    return pooled if request.shared is None else pooled & ~request.shared


def _once(request: KjtRequest) -> Mask:
    """The features that are looked up once: bool [F]."""
    if request.shared is None or request.dense is not None or SHARED not in request.outputs:
        return np.zeros(len(request.feature_set.names), np.bool_)
    return request.shared & ~request.feature_set.sequence


def _part(
    schema: LookupSchema, checked: ValidatedRequests, parts: Sequence[Mask], kept: Ids, is_shared: bool
) -> ValidatedRequests:
    """The requests with only the features of `parts`: bool [F] each. One that has none of them has no samples.

    `kept`: which segments these are, int64.
    """
    requests = checked.requests
    starts, bag_starts = checked.id_bounds[kept], checked.bag_bounds[kept]
    ids, bags = checked.id_bounds[kept + 1] - starts, checked.bag_bounds[kept + 1] - bag_starts
    source = place(starts, ids)
    values, lengths = checked.values[source], checked.lengths[place(bag_starts, bags)]
    id_bounds, bag_bounds = bounds_of(ids), bounds_of(bags)
    # Lists: single numbers of an array are slow.
    first_ids, first_bags = id_bounds.tolist(), bag_bounds.tolist()
    left, segment = [], 0
    for request, part in zip(requests, parts, strict=True):
        feature_set = schema.at(request.feature_set.positions[part].tolist())
        first, segment = segment, segment + len(feature_set.names)
        samples = 1 if is_shared else request.samples
        left.append(
            KjtRequest(
                feature_set,
                values[first_ids[first] : first_ids[segment]],
                lengths[first_bags[first] : first_bags[segment]],
                None,
                samples if segment > first else 0,
                shared=None if request.shared is None or request.dense is None else request.shared[part],
                outputs=request.outputs,
            )
        )
    weights = None if checked.weights is None else checked.weights[source]
    return ValidatedRequests(left, values, weights, lengths, offsets_of(lengths), bag_bounds, id_bounds)
