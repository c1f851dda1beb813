"""Accept the tensors of a request if they have the right dtypes, shapes and sizes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.bundle.load import Bundle
from serving.bundle.tensor_names import EMBEDDINGS, SEQUENCES, SHARED
from serving.errors import InvalidRequest, ModelNotFound, Reason
from serving.requests.dense_inputs import accept_dense, expect_all_keys
from serving.requests.jagged_inputs import accept_jagged
from serving.requests.layout import bag_bounds, id_bounds, samples_of, shared_mask
from serving.requests.limits import Limits, check_accepted, check_size
from serving.requests.offsets import ranges
from serving.requests.schema import FeatureSet, LookupSchema, ScoringSchema
from serving.requests.types import Array, KjtRequest, Mask, Tensors

_INT64, _INT32, _FLOAT32 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)


def accept(schema: LookupSchema, tensors: Tensors, limits: Limits | None = None) -> KjtRequest:
    """Accept the tensors of a request if they have the right dtypes, shapes and sizes.

    Tensors are copied only if several features read one key, because each of them needs the ids, or if ids are not
    contiguous.

    Args:
        schema: the features of the model.
        tensors: the request, which is not trusted.
        limits: the limits of its size, or None.

    Raises:
        InvalidRequest: a tensor is wrong. The message names the feature or tensor, and what was expected.
    """
    values, lengths, weights = tensors.values, tensors.lengths, tensors.weights
    if tensors.tables is None:
        feature_set = schema.select(tensors.features)
    else:
        _expect_rows(tensors)
        feature_set = schema.select_rows(tensors.tables)
    if values.dtype == _INT32:  # as hosts are sent row numbers
        values = values.astype(np.int64)
    _expect_vector("values", values, _INT64)
    values = np.ascontiguousarray(values)  # FBGEMM takes ids to lie side by side
    _expect_vector("lengths", lengths, _INT32)
    shared = None
    if tensors.shared:
        shared = shared_mask(feature_set.keys, [dense.name for dense in schema.dense_inputs], tensors.shared)
    samples = samples_of(tensors, feature_set.keys, shared, schema.by_id)
    if limits is not None:
        check_size(values.size, samples, limits)
    _expect_weights(schema.weighted, weights, values.size)
    request = KjtRequest(feature_set, values, lengths, weights, samples, shared=shared, outputs=tensors.outputs)  # type: ignore[arg-type]
    if feature_set.reads is not None:
        request = _reordered(request, feature_set.keys, feature_set.reads, feature_set)
    is_scored = tensors.tables is None and not schema.scores.isdisjoint(tensors.outputs)
    if is_scored and isinstance(schema, ScoringSchema):
        request = _with_dense(schema, request, tensors)
    if limits is not None:
        check_accepted(request, limits)
    if request.shared is not None:
        _expect_output(request, request.shared)
    return request


def _expect_rows(tensors: Tensors) -> None:
    if tensors.features is not None:
        raise InvalidRequest("expected the parameter features or tables, got both", Reason.FEATURES)
    if tensors.shared:
        raise InvalidRequest("expected the parameter once or tables, got both", Reason.FEATURES)
    if SEQUENCES not in tensors.outputs:
        raise InvalidRequest(
            f"tables: rows are answered in the output {SEQUENCES!r}: ask for it; models of earlier exports, and of "
            "hosts, do not have it",
            Reason.FEATURES,
        )


def _expect_output(request: KjtRequest, shared: Mask) -> None:
    """Refuse a request with shared pooled features that does not request the output for them."""
    pooled = shared & ~request.feature_set.sequence
    if EMBEDDINGS in request.outputs and SHARED not in request.outputs and pooled.any():
        raise InvalidRequest(
            f"once: pooled features that come once are answered in the output {SHARED!r}: ask for it; models of "
            "earlier exports, and of hosts, do not have it",
            Reason.FEATURES,
        )


def _expect_vector(name: str, array: Array, dtype: np.dtype[Any]) -> None:
    if array.dtype is not dtype and array.dtype != dtype:
        raise InvalidRequest(f"{name}: expected dtype {dtype}, got {array.dtype}", Reason.SHAPE)
    if array.ndim != 1:
        raise InvalidRequest(f"{name}: expected 1 dimension, got shape {list(array.shape)}", Reason.SHAPE)


def _expect_weights(weighted: bool, weights: Array | None, ids: int) -> None:
    if (weights is not None) != weighted:
        expected = "one for each id, got none: this" if weighted else "none, got some: this"
        kind = "weighted" if weighted else "not weighted"
        raise InvalidRequest(f"weights: expected {expected} model is {kind}", Reason.WEIGHTS)
    if weights is not None:
        _expect_vector("weights", weights, _FLOAT32)
        if weights.size != ids:
            raise InvalidRequest(f"weights: expected {ids}, one for each id, got {weights.size}", Reason.WEIGHTS)


def _with_dense(schema: ScoringSchema, request: KjtRequest, tensors: Tensors) -> KjtRequest:
    """A request for scores, with all features in the schema's order, and its dense and jagged inputs.

    Raises:
        InvalidRequest: a feature or a dense input is missing or wrong.
    """
    feature_set = request.feature_set
    if len(feature_set.names) < len(schema.all_features.names):
        expect_all_keys(schema.all_features.keys, feature_set.keys)
    if not feature_set.default:
        request = _reordered(request, feature_set.names, feature_set.positions.argsort(), schema.all_features)
    part = schema.dense_part
    side = part.user_side
    request.is_user_side = side is not None and side.scores(request.samples) and {*tensors.shared} == {*side.names}
    if not schema.by_id:
        request.dense = accept_dense(part.inputs, tensors.dense, request.samples, tensors.shared)
        return accept_jagged(schema, request)
    bounds = id_bounds(request.feature_set.names, request)
    features = {key: schema.first_of(key) for key in schema.by_id.values()}
    ids = {key: int(bounds[feature + 1] - bounds[feature]) for key, feature in features.items()}
    arrays = accept_dense(part.inputs, tensors.dense, request.samples, tensors.shared, ids)
    dense = {dense_input.name: array for dense_input, array in zip(part.inputs, arrays, strict=True)}
    request.dense = [array for name, array in dense.items() if name not in schema.by_id]
    return accept_jagged(schema, request, dense)


def _reordered(
    request: KjtRequest, names: Sequence[str], chosen: npt.NDArray[np.int64], feature_set: FeatureSet
) -> KjtRequest:
    """Select the bags and ids of some names, in another order.

    A name may be selected several times, for features that read the same key.

    Args:
        request: a request whose arrays are ordered by name.
        names: the names.
        chosen: positions among them; int64 [F].
        selection: of the request that is made.

    Raises:
        InvalidRequest: the lengths are wrong, so the ids cannot be assigned to bags.
    """
    ids, bags = id_bounds(names, request), bag_bounds(len(names), request.samples, request.shared)
    index = ranges(ids[chosen], np.diff(ids)[chosen])
    return replace(
        request,
        feature_set=feature_set,
        values=request.values[index],
        lengths=request.lengths[ranges(bags[chosen], np.diff(bags)[chosen])],
        weights=None if request.weights is None else request.weights[index],
        shared=None if request.shared is None else request.shared[chosen],
    )


def check_bundle(bundle: Bundle, tensors: Tensors) -> None:
    """Refuse a request that requires another bundle.

    Raises:
        ModelNotFound: the request requires another bundle, which the message names.
    """
    if tensors.bundle is not None and tensors.bundle != bundle.digest:
        raise ModelNotFound(
            f"expected the bundle with SHA-256 {tensors.bundle[:64]} of its manifest, this is {bundle.digest}: "
            f"{_shown(bundle)}"
        )
    part = bundle.manifest.part_of
    if tensors.part_of is not None and (part is None or tensors.part_of != part.text):
        what = "no part of a plan" if part is None else f"part {part.text}"
        raise ModelNotFound(f"expected part {tensors.part_of[:100]} (plan/host), this is {what}: {_shown(bundle)}")


def _shown(bundle: Bundle) -> str:
    return f"{bundle.path.parent.name} version {bundle.path.name}"
