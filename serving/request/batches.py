"""What is looked up for some requests, batch by batch, and what the answers come to.

Features with a bag for each sample share a batch. Those that come once have one of their own, in which a request has
one sample: so nothing is looked up for the others, and no embedding is copied. But scores are made of all features
side by side: for them, what comes once is in the first sample of the request, until it is spread.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from serving.request.jagged import bounds_of, joined, offsets_of, ranges
from serving.request.kjt import merge, split
from serving.request.once import divided
from serving.request.schema import Schema
from serving.request.sequences import row_batches, rows_of
from serving.request.tensors import EMBEDDINGS, ONCE, SEQUENCES, Batch, Checked, Embeddings, KjtRequest, Mask, Outputs


def batches_of(schema: Schema, checked: Checked) -> list[Batch]:
    """What is looked up for some requests. What nobody wants is left out. Scores are made of the first batch."""
    requests = checked.requests
    if all(map(_is_whole, requests)):
        return [merge(schema, checked)]
    batches = []
    for parts, is_once in (([_each(request) for request in requests], False), ([_once(r) for r in requests], True)):
        if any(part.any() for part in parts):
            batches.append(replace(merge(schema, _part(schema, checked, parts, is_once)), is_once=is_once))
    return [*batches, *row_batches(schema, checked)]


def outputs_of(checked: Checked, batches: Sequence[Batch], answers: Sequence[Embeddings]) -> list[Outputs]:
    """The outputs of each request, from the answers to the batches of all.

    Returns:
        For each request `embeddings`, float32 or float16 [B, D], and `once` [1, D], if it wants some; and `sequences`
        [M] likewise: for each feature [n, dim], one behind the other.
    """
    outputs: list[dict[str, Embeddings]] = [{} for _ in checked.requests]
    for batch, answer in zip(batches, answers, strict=True):
        if batch.row_bounds is None:
            for found, request, embeddings in zip(outputs, batch.requests, split(answer, batch), strict=True):
                if request.selection.names:
                    found |= {ONCE: embeddings} if batch.is_once else divided(embeddings, request)
    if len(batches) == 1 and batches[0].row_bounds is None:
        return outputs  # type: ignore[return-value]
    by_feature = rows_of(batches, answers)
    for number, (found, request) in enumerate(zip(outputs, checked.requests, strict=True)):
        if SEQUENCES in request.outputs and _has_sequences(request):
            positions = request.selection.positions[request.selection.sequence].tolist()
            found[SEQUENCES] = joined([by_feature[number, position].reshape(-1) for position in positions])
    return outputs  # type: ignore[return-value]


def _is_whole(request: KjtRequest) -> bool:
    """Whether all of its features are looked up in one batch."""
    if request.dense is not None:
        return not _has_sequences(request)
    return EMBEDDINGS in request.outputs and request.once is None and not _has_sequences(request)


def _has_sequences(request: KjtRequest) -> bool:
    return request.selection.pooled is not request.selection


def _each(request: KjtRequest) -> Mask:
    """The features that are looked up for each sample, or for scores: bool [F]."""
    pooled: Mask = ~request.selection.sequence
    if request.dense is not None:
        return pooled
    pooled &= EMBEDDINGS in request.outputs
    return pooled if request.once is None else pooled & ~request.once


def _once(request: KjtRequest) -> Mask:
    """The features that are looked up once: bool [F]."""
    if request.once is None or request.dense is not None or ONCE not in request.outputs:
        return np.zeros(len(request.selection.names), np.bool_)
    return request.once & ~request.selection.sequence


def _part(schema: Schema, checked: Checked, parts: Sequence[Mask], is_once: bool) -> Checked:
    """The requests with these features alone; without samples, where it has none of them."""
    requests = checked.requests
    keep = np.concatenate(parts)
    ids, bags = np.diff(checked.id_bounds), np.diff(checked.bag_bounds)
    source = ranges(checked.id_bounds[:-1][keep], ids[keep])
    lengths = checked.lengths.take(ranges(checked.bag_bounds[:-1][keep], bags[keep]))
    values = checked.values.take(source)
    id_bounds, bag_bounds = bounds_of(ids[keep]), bounds_of(bags[keep])
    left, segment = [], 0
    for request, part in zip(requests, parts, strict=True):
        first, segment = segment, segment + int(np.count_nonzero(part))
        samples = 1 if is_once else request.samples
        left.append(
            replace(
                request,
                selection=schema.at(request.selection.positions[part].tolist()),
                values=values[id_bounds[first] : id_bounds[segment]],
                lengths=lengths[bag_bounds[first] : bag_bounds[segment]],
                samples=samples if segment > first else 0,
                once=None if request.once is None or request.dense is None else request.once[part],
            )
        )
    weights = None if checked.weights is None else checked.weights.take(source)
    return Checked(left, values, weights, lengths, offsets_of(lengths), bag_bounds, id_bounds)
