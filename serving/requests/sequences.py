"""Sequences: features that are answered by a row for each id, and are not pooled.

A sequence of n ids is n bags of one id: their sums are the rows, bit for bit. So the program that pools looks rows
up, too, however its tables are sharded. Features have different numbers of bags then, so that they take calls of
their own: one for each feature, or for several whose answers are small. Bags that a call has too many are empty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from serving.requests.offsets import bounds_of, joined, offsets_of, place
from serving.requests.schema import LookupSchema, ScoringSchema
from serving.requests.types import (
    SEQUENCES,
    Batch,
    Embeddings,
    Ids,
    KjtRequest,
    Lengths,
    Mask,
    ValidatedRequests,
    Weights,
)


@dataclass(frozen=True, eq=False)
class JaggedRows:
    """A row for each id of a feature, as TorchRec's JaggedTensor.

    Attributes:
        values: the rows, in the order of the ids; float32 or float16 [n, dim].
        lengths: how many each sample has, as the request said; int32 [B].
    """

    values: Embeddings
    lengths: Lengths

    def __len__(self) -> int:
        """The number of samples, B."""
        return len(self.lengths)

    def rows(self, sample: int) -> Embeddings:
        """The rows of a sample, [n of the sample, dim]: a view.

        Raises:
            IndexError: there is no such sample.
        """
        at = range(len(self.lengths))[sample]
        return self.values[self._bounds[at] : self._bounds[at + 1]]

    @cached_property
    def _bounds(self) -> Ids:
        """Where the rows of each sample begin, then n: int64 [B + 1]."""
        return bounds_of(self.lengths.astype(np.int64))


# Features share a call as long as its answer has no more numbers: 256 KiB of FP32. A larger one leaves the
# processor's cache, and copying its columns takes longer than a call of its own.
_SHARED_NUMBERS = 64 << 10
# Most rows of a call. Hosts take them for samples, of which they take 65,536 by default.
_MOST_ROWS = 32 << 10


def row_batches(schema: LookupSchema, checked: ValidatedRequests) -> Iterator[Batch]:
    """The sequences that requests ask for, and those that their scores are made of, as bags of one id."""
    asked = _asked(schema, checked)
    if asked is None:
        return
    for group in _grouped(asked):
        if len(group) > 1:
            yield _of_several(schema, checked, asked, group)
            continue
        (feature,) = group
        start, end = int(asked.first[feature]), int(asked.first[feature + 1])
        for first in range(start, max(end, start + 1), _MOST_ROWS):
            last = min(first + _MOST_ROWS, end)
            bounds = asked.bounds[[feature]]
            if last - first < end - start:
                bounds = (bounds - (first - start)).clip(0, last - first)
            yield _of_one(schema, checked, asked, feature, slice(first, last), bounds)


def one_batch(schema: LookupSchema, checked: ValidatedRequests) -> Batch | None:
    """All that the scores of one request are made of, in one batch: pooled features, and sequences as bags of one id.

    Features that have fewer bags than others get empty ones behind theirs. None: the answer would be large, or
    there is more to it than that.
    """
    (request,) = checked.requests
    feature_set, samples = request.feature_set, request.samples
    is_plain = request.shared is None and request.rowless is None and checked.weights is None
    if not isinstance(schema, ScoringSchema) or not schema.scores_all_rows:
        return None
    is_for_scores = request.dense is not None and schema.scores.issuperset(request.outputs)
    if not samples or not is_plain or not is_for_scores:
        return None
    bags = np.where(feature_set.sequence, checked.id_bounds[1:] - checked.id_bounds[:-1], samples)
    most = max(samples, int(bags.max()))
    if most * feature_set.ends.item(-1) > _SHARED_NUMBERS:
        return None
    lengths = (np.arange(most) < bags[:, np.newaxis]).astype(np.int32)
    pooled = feature_set.pooled.positions
    lengths[pooled, :samples] = checked.lengths.reshape(-1, samples)[pooled]
    bounds = np.zeros((bags.size, 2), np.int64)
    bounds[:, 1] = bags
    return Batch(
        checked.requests, feature_set, checked.values, offsets_of(lengths.ravel()), None, bounds, has_pooled=True
    )


def rows_of(batches: Sequence[Batch], answers: Sequence[Embeddings]) -> dict[tuple[int, int], Embeddings]:
    """The rows of each sequence, [n, dim]: by number of the request, and position of the feature in the schema.

    They are views of `answers`; copies, where they are in several.
    """
    found: dict[tuple[int, int], list[Embeddings]] = {}
    for batch, answer in zip(batches, answers, strict=True):
        if batch.row_bounds is None:
            continue
        feature_set, ends = batch.feature_set, batch.feature_set.ends.tolist()
        rows = np.flatnonzero(feature_set.sequence).tolist() if batch.has_pooled else range(len(ends))
        for feature in rows:
            dim, end, position = feature_set.dims.item(feature), ends[feature], feature_set.positions.item(feature)
            for number, (first, last) in enumerate(pairwise(batch.row_bounds[feature].tolist())):
                found.setdefault((number, position), []).append(answer[first:last, end - dim : end])
    return {key: joined(parts) for key, parts in found.items()}


@dataclass(frozen=True, eq=False, slots=True)
class _Asked:
    """The sequences that R requests ask for: A features, in the schema's order, each with the ids of all requests.

    Attributes:
        positions: of the features in the schema; int64 [A].
        dims: of the features; int64 [A].
        ids: feature-major; int64 [N].
        has_row: which of the ids read a row; bool [N]. None: all of them.
        first: where the ids of each feature begin, then N; int64 [A + 1].
        bounds: where those of each request begin among the feature's, then their end; int64 [A, R + 1].
    """

    positions: Ids
    dims: Ids
    ids: Ids
    has_row: npt.NDArray[np.bool_] | None
    first: Ids
    bounds: Ids


def _asked(schema: LookupSchema, checked: ValidatedRequests) -> _Asked | None:
    """What is asked for; None where nothing is."""
    requests = checked.requests
    wanted = [_wanted(schema, request) for request in requests]
    segments = np.flatnonzero(joined(wanted))
    if not segments.size:
        return None
    features = joined([request.feature_set.positions for request in requests])[segments]
    # Segments are in the order of requests. A stable sort puts them in the order of features.
    order = features.argsort(kind="stable")
    segments, features = segments[order], features[order]
    starts = checked.id_bounds[segments]
    sizes = checked.id_bounds[segments + 1] - starts
    is_first = np.ones(features.size, np.bool_)
    np.not_equal(features[1:], features[:-1], out=is_first[1:])
    positions = features[is_first]
    bounds = np.zeros((positions.size, len(requests) + 1), np.int64)
    request_of = np.arange(len(requests)).repeat([each.size for each in wanted])[segments]
    bounds[is_first.cumsum() - 1, request_of + 1] = sizes
    np.add.accumulate(bounds, axis=1, out=bounds)
    here = place(starts, sizes)
    return _Asked(
        positions,
        schema.every.dims[positions],
        checked.values[here],
        _has_row(requests, here),
        bounds_of(bounds[:, -1]),
        bounds,
    )


def _wanted(schema: LookupSchema, request: KjtRequest) -> Mask:
    """The sequences whose rows a request is answered with, or its scores are made of: bool [F]."""
    if isinstance(schema, ScoringSchema) and request.dense is not None and SEQUENCES not in request.outputs:
        return schema.scored_rows  # it has all features, in the schema's order
    return request.feature_set.sequence & (SEQUENCES in request.outputs)


def _has_row(requests: Sequence[KjtRequest], here: slice | Ids) -> npt.NDArray[np.bool_] | None:
    """Which ids read a row: bool, of those that are `here`. None: all of them."""
    if all(request.rowless is None for request in requests):
        return None
    every = [np.zeros(r.values.size, np.bool_) if r.rowless is None else r.rowless for r in requests]
    found: npt.NDArray[np.bool_] = ~joined(every)[here]
    return found


def _of_one(
    schema: LookupSchema, checked: ValidatedRequests, asked: _Asked, feature: int, here: slice, bounds: Ids
) -> Batch:
    """Rows of one feature, those of the ids that are `here`. `bounds`: int64 [1, R + 1]."""
    values = asked.ids[here]
    offsets = np.arange(values.size + 1)
    if asked.has_row is not None:
        has_row = asked.has_row[here]
        values, offsets = values[has_row], bounds_of(has_row.astype(np.int64))
    feature_set = schema.at((int(asked.positions[feature]),))
    return Batch(checked.requests, feature_set, values, offsets, _ones(checked, values), bounds)


def _of_several(schema: LookupSchema, checked: ValidatedRequests, asked: _Asked, group: Sequence[int]) -> Batch:
    """Rows of several features. Those with fewer ids than others get empty bags behind theirs."""
    bounds = asked.bounds[group]
    here = place(asked.first[group], bounds[:, -1])
    values = asked.ids[here]
    has_bag = np.arange(bounds[:, -1].max()) < bounds[:, -1:]
    lengths = has_bag.astype(np.int32)
    if asked.has_row is not None:
        lengths[has_bag] = has_row = asked.has_row[here]
        values = values[has_row]
    feature_set = schema.at(tuple(asked.positions[group].tolist()))
    return Batch(checked.requests, feature_set, values, offsets_of(lengths.ravel()), _ones(checked, values), bounds)


def _ones(checked: ValidatedRequests, values: Ids) -> Weights | None:
    """Weights of 1 for `values`, if the model takes weights."""
    return None if checked.weights is None else np.ones(values.size, np.float32)


def _grouped(asked: _Asked) -> Iterator[list[int]]:
    """Divide features into groups, each for one call: positions in `asked`, sorted."""
    rows, dims = asked.bounds[:, -1].tolist(), asked.dims.tolist()
    group: list[int] = []
    width = most = 0
    for feature in sorted(range(len(rows)), key=rows.__getitem__, reverse=True):
        width += dims[feature]
        if group and most * width > _SHARED_NUMBERS:
            yield sorted(group)
            group, width = [], dims[feature]
        if not group:
            most = rows[feature]
        group.append(feature)
    yield sorted(group)
