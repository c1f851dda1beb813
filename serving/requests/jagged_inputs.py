"""The jagged inputs of a request's scores: the inputs of the dense part that are made of ids, beside embeddings.

These are lengths, ids and weights as they were sent, before maps and id policies change them; looked-up rows; and
dense inputs with a row for each id. Shared inputs are repeated for each sample only when the scores are computed.
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
        schema: the schema of a model with scores.
        request: the request, with all features in the schema's order. It is changed.
        dense: its checked dense inputs by name.

    Raises:
        InvalidRequest: a length is wrong, or differs from the one that the model requires.
    """
    part, names = schema.dense_part, request.feature_set.names
    if not part.jagged and not part.fixed_lengths and not part.together:
        return request
    # Lists, because single numbers of an array are slow.
    bags = bag_bounds(len(names), request.samples, request.shared).tolist()
    ids = id_bounds(names, request).tolist()

    def lengths_of(key: str) -> Lengths:
        feature = schema.first_of(key)
        return request.lengths[bags[feature] : bags[feature + 1]]

    for key, length in part.fixed_lengths.items():
        _expect_length(key, length, lengths_of(key))
    for first_key, *other_keys in part.together:
        for other_key in other_keys:
            _expect_as_many((first_key, other_key), lengths_of(first_key), lengths_of(other_key))
    arrays: list[Array | None] = []
    size_bytes = 0
    for jagged, feature in zip(part.jagged, schema.jagged, strict=True):
        id_range, bag_range = slice(ids[feature], ids[feature + 1]), slice(bags[feature], bags[feature + 1])
        if jagged.kind is JaggedKind.ROWS:
            arrays.append(None)
            dim = request.feature_set.dims.item(feature)
            array_bytes = (id_range.stop - id_range.start) * dim * _ROW_ITEM_BYTES
        else:
            is_dense = jagged.kind is JaggedKind.NUMBERS
            array = dense[jagged.name] if is_dense else _sent(jagged.kind, request, bag_range, id_range)
            arrays.append(array)
            array_bytes = array.nbytes
        is_repeated = _is_shared(request, feature) and not request.is_user_side
        size_bytes += array_bytes * (request.samples if is_repeated else 1)
    request.jagged, request.jagged_bytes = arrays, size_bytes
    return request


def jagged_inputs(
    schema: ScoringSchema, request: KjtRequest, rows: RowsOfAll, number: int, *, repeated: bool = True
) -> list[Array]:
    """The jagged inputs of a request's scores.

    Args:
        schema: the schema of a model with scores.
        request: a request that `accept_jagged` returned.
        rows: the looked-up rows.
        number: the number of the request in `rows`.
        repeated: whether shared inputs are repeated for each sample.
    """
    arrays = []
    for sent, feature in zip(request.jagged, schema.jagged, strict=True):
        array = rows[number, feature] if sent is None else sent
        if repeated and _is_shared(request, feature):
            array = np.tile(array, (request.samples, *(1 for _ in array.shape[1:])))
        arrays.append(array)
    return arrays


def sample_bounds(
    manifest: Manifest, part: DensePart
) -> Callable[[Sequence[Array], Sequence[int]], list[Sequence[int]]] | None:
    """A function that finds the starts of samples in jagged inputs.

    Args:
        manifest: the manifest of a bundle.
        part: its dense part.

    Returns:
        A function of jagged inputs and some sample numbers, which returns the start of each sample in each input; or
        None if the dense part has no jagged inputs, or takes one without its lengths.
    """
    keys = manifest.key_of_feature
    lengths = {jagged.name: index for index, jagged in enumerate(part.jagged) if jagged.kind is JaggedKind.LENGTHS}
    # For each input, the rows of a sample if their number is fixed, or else the index of the input with the lengths.
    rows: list[tuple[int | None, int]] = []
    for jagged in part.jagged:
        key = part.key_of(jagged, keys)
        fixed = 1 if jagged.kind is JaggedKind.LENGTHS else part.fixed_lengths.get(key)
        if fixed is None and key not in lengths:
            return None
        rows.append((fixed, lengths.get(key, 0)))

    def bounds(arrays: Sequence[Array], samples: Sequence[int]) -> list[Sequence[int]]:
        ends = {index: bag_offsets(cast(Lengths, arrays[index])) for fixed, index in rows if fixed is None}
        numbers = np.asarray(samples)
        return [
            ends[index][numbers].tolist() if fixed is None else (fixed * numbers).tolist() for fixed, index in rows
        ]

    return bounds if rows else None


def zero_jagged(manifest: Manifest, part: DensePart, samples: int, ids: int) -> list[Array]:
    """Jagged inputs for a call that warms up a dense part: zeros, with matching lengths.

    Args:
        manifest: the manifest of a bundle.
        part: its dense part.
        samples: B.
        ids: the ids in each bag, except for keys that require a fixed number of ids.
    """
    dims = {
        feature.name: table.dim for feature, table in zip(manifest.features, manifest.feature_tables, strict=True)
    }
    keys = manifest.key_of_feature
    dense_inputs = {dense_input.name: dense_input for dense_input in part.inputs}
    arrays: list[Array] = []
    for jagged in part.jagged:
        length = part.fixed_lengths.get(part.key_of(jagged, keys), ids)
        if jagged.kind is JaggedKind.ROWS:
            arrays.append(np.zeros((samples * length, dims[jagged.name]), manifest.output_dtype.numpy))
        elif jagged.kind is JaggedKind.NUMBERS:
            dense_input = dense_inputs[jagged.name]
            arrays.append(np.zeros((samples * length, *dense_input.shape), dense_input.dtype.numpy))
        elif jagged.kind is JaggedKind.LENGTHS:
            arrays.append(np.full(samples, length, np.int32))
        else:
            arrays.append(np.zeros(samples * length, np.int64 if jagged.kind is JaggedKind.IDS else np.float32))
    return arrays


def _sent(kind: JaggedKind, request: KjtRequest, bags: slice, ids: slice) -> Array:
    if kind is JaggedKind.LENGTHS:
        return request.lengths[bags]
    if kind is JaggedKind.IDS:
        return request.values[ids]
    assert request.weights is not None  # noqa: S101  the ids of this key have weights
    return request.weights[ids]


def _is_shared(request: KjtRequest, feature: int) -> bool:
    return request.shared is not None and bool(request.shared[feature])


def _expect_as_many(keys: tuple[str, str], first: Lengths, second: Lengths) -> None:
    """Refuse two keys with different numbers of ids in a sample. A shared key has the same number in all samples."""
    different = np.flatnonzero(first != second)
    if different.size:
        sample = int(different[0])
        counts = [int(lengths[min(sample, lengths.size - 1)]) for lengths in (first, second)]
        raise InvalidRequest(
            f"feature {keys[1]!r}: expected as many ids as {keys[0]!r} has in each sample, the model puts their rows "
            f"side by side, got {counts[1]} and {counts[0]} in sample {sample}",
            Reason.LENGTHS,
        )


def _expect_length(key: str, expected: int, lengths: Lengths) -> None:
    wrong = np.flatnonzero(lengths != expected)
    if wrong.size:
        sample = int(wrong[0])
        raise InvalidRequest(
            f"feature {key!r}: expected {expected} ids for each sample, the model takes so many, got "
            f"{lengths[sample]} in sample {sample}",
            Reason.LENGTHS,
        )
