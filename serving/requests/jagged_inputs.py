"""The jagged inputs of a request's scores: what the dense part takes of its ids, beside embeddings.

Lengths, ids and weights are taken as they were sent, before maps and id policies change them; rows as they were
looked up; and dense inputs that have a row for each id. What comes once is repeated for each sample when the scores
are made, and not before.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import numpy as np

from serving.bundle.manifest import Manifest
from serving.bundle.scores import DensePart, JaggedKind
from serving.errors import InvalidRequest, Reason
from serving.requests.layout import bag_bounds, id_bounds
from serving.requests.offsets import bag_offsets
from serving.requests.schema import ScoringSchema
from serving.requests.types import Array, Embeddings, KjtRequest, Lengths

# [n, dim] by number of the request, and position of the feature in the schema.
RowsOfAll = Mapping[tuple[int, int], Embeddings]
_ROW_ITEM_BYTES = np.dtype(np.float32).itemsize
_NONE: Mapping[str, Array] = MappingProxyType({})


def accept_jagged(schema: ScoringSchema, request: KjtRequest, dense: Mapping[str, Array] = _NONE) -> KjtRequest:
    """A request for scores with its jagged inputs, as they were sent: views of its arrays.

    Args:
        schema: of a model with scores.
        request: it has all features, in the schema's order; changed.
        dense: its dense inputs by name, where some have a row for each id. They are right.

    Raises:
        InvalidRequest: a length is wrong, or not the one that the model takes.
    """
    part, names = schema.dense_part, request.feature_set.names
    if not part.jagged and not part.fixed_lengths and not part.together:
        return request
    # Lists: single numbers of an array are slow.
    bags = bag_bounds(len(names), request.samples, request.shared).tolist()
    ids = id_bounds(names, request).tolist()
    for key, length in part.fixed_lengths.items():
        at = schema.first_of(key)
        _expect_length(key, length, request.lengths[bags[at] : bags[at + 1]])
    for key, *others in part.together:
        for other in others:
            first, second = (request.lengths[bags[at] : bags[at + 1]] for at in map(schema.first_of, (key, other)))
            _expect_as_many((key, other), first, second)
    jagged: list[Array | None] = []
    size_bytes = 0
    for each, at in zip(part.jagged, schema.jagged, strict=True):
        of_ids = slice(ids[at], ids[at + 1])
        if each.kind is JaggedKind.ROWS:
            found = None
            own_bytes = (ids[at + 1] - ids[at]) * request.feature_set.dims.item(at) * _ROW_ITEM_BYTES
        else:
            is_dense = each.kind is JaggedKind.NUMBERS
            found = dense[each.name] if is_dense else _sent(each.kind, request, slice(bags[at], bags[at + 1]), of_ids)
            own_bytes = found.nbytes
        jagged.append(found)
        size_bytes += own_bytes * (request.samples if _is_shared(request, at) else 1)
    request.jagged, request.jagged_bytes = jagged, size_bytes
    return request


def jagged_inputs(schema: ScoringSchema, request: KjtRequest, rows: RowsOfAll, number: int) -> list[Array]:
    """The jagged inputs of a request's scores.

    Args:
        schema: of a model with scores.
        request: as `accept_jagged` gave it.
        rows: what was looked up.
        number: of the request there.
    """
    found = []
    for array, at in zip(request.jagged, schema.jagged, strict=True):
        each = rows[number, at] if array is None else array
        if _is_shared(request, at):
            each = np.tile(each, (request.samples, *(1 for _ in each.shape[1:])))
        found.append(each)
    return found


def sample_bounds(
    manifest: Manifest, part: DensePart
) -> Callable[[Sequence[Array], Sequence[int]], list[Sequence[int]]] | None:
    """Where samples begin in jagged inputs, as a function of these and of some samples.

    Args:
        manifest: of a bundle.
        part: its dense part.

    Returns:
        It answers a bound in each input for each sample. None: there are no jagged inputs, or one whose lengths are
        not among them.
    """
    keys = {each.name: each.key for each in manifest.features}
    lengths = {each.name: at for at, each in enumerate(part.jagged) if each.kind is JaggedKind.LENGTHS}
    # Of each input: how many rows a sample has, and which input says it where that is none.
    rows: list[tuple[int | None, int]] = []
    for each in part.jagged:
        key = part.key_of(each, keys)
        fixed = 1 if each.kind is JaggedKind.LENGTHS else part.fixed_lengths.get(key)
        if fixed is None and key not in lengths:
            return None
        rows.append((fixed, lengths.get(key, 0)))

    def bounds(jagged: Sequence[Array], samples: Sequence[int]) -> list[Sequence[int]]:
        ends = {at: bag_offsets(cast(Lengths, jagged[at])) for fixed, at in rows if fixed is None}
        at_samples = np.asarray(samples)
        return [
            ends[at][at_samples].tolist() if fixed is None else (fixed * at_samples).tolist() for fixed, at in rows
        ]

    return bounds if rows else None


def zero_jagged(manifest: Manifest, part: DensePart, samples: int, ids: int) -> list[Array]:
    """Jagged inputs for a call that warms a dense part up: zeros, with lengths that fit.

    Args:
        manifest: of a bundle.
        part: its dense part.
        samples: B.
        ids: in each bag of each key, unless the model takes a fixed number of them.
    """
    dims = {each.name: table.dim for each, table in zip(manifest.features, manifest.feature_tables, strict=True)}
    keys, dense = {each.name: each.key for each in manifest.features}, {each.name: each for each in part.inputs}
    found: list[Array] = []
    for each in part.jagged:
        length = part.fixed_lengths.get(part.key_of(each, keys), ids)
        if each.kind is JaggedKind.ROWS:
            found.append(np.zeros((samples * length, dims[each.name]), manifest.output_dtype.numpy))
        elif each.kind is JaggedKind.NUMBERS:
            own = dense[each.name]
            found.append(np.zeros((samples * length, *own.shape), own.dtype.numpy))
        elif each.kind is JaggedKind.LENGTHS:
            found.append(np.full(samples, length, np.int32))
        else:
            found.append(np.zeros(samples * length, np.int64 if each.kind is JaggedKind.IDS else np.float32))
    return found


def _sent(kind: JaggedKind, request: KjtRequest, bags: slice, ids: slice) -> Array:
    if kind is JaggedKind.LENGTHS:
        return request.lengths[bags]
    if kind is JaggedKind.IDS:
        return request.values[ids]
    assert request.weights is not None  # noqa: S101  the ids of this key have weights
    return request.weights[ids]


def _is_shared(request: KjtRequest, feature: int) -> bool:
    return request.shared is not None and bool(request.shared[feature])


def _expect_as_many(keys: tuple[str, str], one: Lengths, other: Lengths) -> None:
    """Refuse two keys that have not as many ids in each sample. What comes once has so many in all of them."""
    differ = np.flatnonzero(one != other)
    if differ.size:
        sample = int(differ[0])
        counts = [int(each[min(sample, each.size - 1)]) for each in (one, other)]
        raise InvalidRequest(
            f"feature {keys[1]!r}: expected as many ids as {keys[0]!r} has in each sample, the model puts their rows "
            f"side by side, got {counts[1]} and {counts[0]} in sample {sample}",
            Reason.LENGTHS,
        )


def _expect_length(key: str, expected: int, lengths: Lengths) -> None:
    others = np.flatnonzero(lengths != expected)
    if others.size:
        sample = int(others[0])
        raise InvalidRequest(
            f"feature {key!r}: expected {expected} ids for each sample, the model takes so many, got "
            f"{lengths[sample]} in sample {sample}",
            Reason.LENGTHS,
        )
