"""KeyedJaggedTensor requests as arrays: check, merge, split. numpy only: no Triton, no torch.

A KJT is feature-major: all bags of the first feature, then all bags of the second, and so on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.bundle import IdPolicy, Manifest
from serving.errors import InvalidRequest

Ids = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]
Embeddings = npt.NDArray[np.float32] | npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Schema:
    """What a request is checked against. Arrays have one entry for each feature, in the manifest's order."""

    names: tuple[str, ...]
    tables: tuple[str, ...]
    rows: npt.NDArray[np.uint64]
    dims: npt.NDArray[np.int64]
    zero: npt.NDArray[np.bool_]
    feature_weighted: npt.NDArray[np.bool_]
    weighted: bool
    positions: dict[str, int]

    @classmethod
    def of(cls, manifest: Manifest) -> "Schema":
        """The schema of a bundle."""
        names = tuple(feature.name for feature in manifest.features)
        tables = manifest.feature_tables
        return cls(
            names=names,
            tables=tuple(table.name for table in tables),
            rows=np.array([table.rows for table in tables], np.uint64),
            dims=np.array([table.dim for table in tables], np.int64),
            zero=np.array([table.id_policy is IdPolicy.ZERO for table in tables]),
            feature_weighted=np.array([table.weighted for table in tables]),
            weighted=manifest.weighted,
            positions={name: position for position, name in enumerate(names)},
        )

    def select(self, names: Sequence[str] | None) -> tuple[int, ...]:
        """The positions of `names`; of all features where it is None.

        Raises:
            InvalidRequest: a name is unknown or comes twice, or there is none.
        """
        if names is None:
            return tuple(range(len(self.names)))
        for name in names:
            if name not in self.positions:
                raise InvalidRequest(f"feature {_shortened(name)!r}: expected one of {_listed(self.names)}")
        if not names:
            raise InvalidRequest(f"features: expected at least one of {_listed(self.names)}, got none")
        selected = tuple(self.positions[name] for name in names)
        if len(set(selected)) < len(selected):
            twice = next(name for name in names if list(names).count(name) > 1)
            raise InvalidRequest(f"feature {twice!r}: expected each feature once, got it twice")
        return selected


@dataclass(frozen=True, slots=True)
class KjtRequest:
    """A checked request over F features and B samples.

    Attributes:
        features: positions in the schema, in the order of the answer [F].
        values: int64 ids, each in [0, rows) of its table [N].
        lengths: int32 bag sizes [F, B].
        offsets: int64, where each bag starts in `values`; ends with N [F·B + 1].
        weights: float32 [N], or None where the model takes none.
        dropped: how many ids of each feature were out of range and left out, int64 [F]; None where none was.
    """

    features: tuple[int, ...]
    values: Ids
    lengths: Lengths
    offsets: Ids
    weights: Weights | None
    dropped: Ids | None = None

    @property
    def samples(self) -> int:
        """B."""
        return self.lengths.shape[1]

    @property
    def bounds(self) -> Ids:
        """Where the ids of each feature start in `values`, int64; ends with N [F + 1]."""
        return _bounds(self.offsets, self.lengths)


def check(
    schema: Schema,
    values: npt.NDArray[np.generic],
    lengths: npt.NDArray[np.generic],
    weights: npt.NDArray[np.generic] | None = None,
    features: Sequence[str] | None = None,
) -> KjtRequest:
    """Check the tensors of one request; nothing that fails here reaches FBGEMM.

    Args:
        schema: what the model holds.
        values: int64 [N], feature-major.
        lengths: int32 [F·B], feature-major.
        weights: float32 [N]; for weighted models, and only for them.
        features: the features asked for, in the order of the answer; all of the schema's where None.

    Returns:
        The request. It shares memory with the arguments, except where ids were left out by a table's `zero`
        policy or an unweighted table sits in a weighted model.

    Raises:
        InvalidRequest: naming the feature, what was expected and what came.
    """
    selected = schema.select(features)
    _expect_vector("values", values, np.int64)
    _expect_vector("lengths", lengths, np.int32)
    if lengths.size % len(selected):
        names = _listed([schema.names[position] for position in selected])
        raise InvalidRequest(
            f"lengths: expected a multiple of {len(selected)}, one length for each sample of each feature "
            f"({names}), got {lengths.size}"
        )
    bags: Lengths = lengths.reshape(len(selected), -1)  # type: ignore[assignment]
    if bags.size and bags.min() < 0:
        row, sample = np.argwhere(bags < 0)[0]
        raise InvalidRequest(
            f"feature {schema.names[selected[row]]!r}: expected lengths >= 0, "
            f"got {bags[row, sample]} for sample {sample}"
        )
    offsets = _offsets(bags)
    bounds = _bounds(offsets, bags)
    if bounds[-1] != values.size:
        _refuse_sum(schema, selected, bounds, values.size)
    checked = _checked_weights(schema, selected, bounds, weights)
    request = KjtRequest(selected, values, bags, offsets, checked)  # type: ignore[arg-type]
    return _in_range(schema, request, bounds)


def merge(requests: Sequence[KjtRequest]) -> KjtRequest:
    """Join requests so that one TBE call answers them all.

    KJT is feature-major, so this interleaves per feature; it is not a concatenation. Requests may ask for
    different features in different orders: the result has each feature that anyone asked for, and empty bags
    where a request did not ask.

    Args:
        requests: R requests, all with weights or all without.

    Returns:
        Samples side by side in the order of `requests`. With R = 1 the request itself: nothing is copied.
    """
    if len(requests) == 1:
        return requests[0]
    features = _merged_features(requests)
    row_of = np.empty(max(features) + 1, np.intp)
    row_of[list(features)] = np.arange(len(features))
    ends = np.cumsum([request.samples for request in requests])

    lengths = np.zeros((len(features), ends[-1]), np.int32)
    for request, end in zip(requests, ends, strict=True):
        lengths[row_of[list(request.features)], end - request.samples : end] = request.lengths

    # One segment for each feature of each request, now by request; a stable sort puts them by feature.
    rows = row_of[np.concatenate([request.features for request in requests])]
    sizes = np.concatenate([np.diff(request.bounds) for request in requests])
    starts = np.cumsum(sizes) - sizes
    order = np.argsort(rows, kind="stable")
    moved = sizes[order]
    source = np.repeat(starts[order] - (np.cumsum(moved) - moved), moved)
    source += np.arange(source.size)

    values = np.concatenate([request.values for request in requests])[source]
    weights = None
    if requests[0].weights is not None:
        weights = np.concatenate([request.weights for request in requests if request.weights is not None])[source]
    return KjtRequest(features, values, lengths, _offsets(lengths), weights)


def split(
    embeddings: Embeddings, merged: KjtRequest, requests: Sequence[KjtRequest], schema: Schema
) -> list[Embeddings]:
    """Cut the answer to `merged` into the answers to `requests`.

    Args:
        embeddings: [B, D] for `merged`, which is `merge(requests)`.
        merged: the request that `embeddings` answers.
        requests: the requests that were merged.
        schema: what the model holds.

    Returns:
        One array [B_r, D_r] for each request: a view of `embeddings`, or a copy where the request's features
        or their order differ from the merged ones.
    """
    answers: list[Embeddings] = []
    ends = np.cumsum([request.samples for request in requests])
    columns = _columns(merged.features, schema)
    for request, end in zip(requests, ends, strict=True):
        answer = embeddings[end - request.samples : end]
        if request.features != merged.features:
            answer = np.concatenate([answer[:, columns[feature]] for feature in request.features], axis=1)
        answers.append(answer)
    return answers


def _merged_features(requests: Sequence[KjtRequest]) -> tuple[int, ...]:
    orders = {request.features for request in requests}
    if len(orders) == 1:
        return orders.pop()
    return tuple(sorted(set().union(*orders)))


def _columns(features: tuple[int, ...], schema: Schema) -> dict[int, slice]:
    ends = np.cumsum(schema.dims[list(features)])
    return {feature: slice(end - schema.dims[feature], end) for feature, end in zip(features, ends, strict=True)}


def _offsets(lengths: Lengths) -> Ids:
    """Where each bag starts, and N behind them."""
    offsets = np.empty(lengths.size + 1, np.int64)
    offsets[0] = 0
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _bounds(offsets: Ids, lengths: Lengths) -> Ids:
    """Where each feature starts, and N behind them."""
    features, samples = lengths.shape
    return offsets[::samples] if samples else np.zeros(features + 1, np.int64)


def _expect_vector(name: str, array: npt.NDArray[np.generic], dtype: type[np.generic]) -> None:
    if array.dtype != dtype:
        raise InvalidRequest(f"{name}: expected dtype {np.dtype(dtype)}, got {array.dtype}")
    if array.ndim != 1:
        raise InvalidRequest(f"{name}: expected 1 dimension, got shape {list(array.shape)}")


def _checked_weights(
    schema: Schema, selected: tuple[int, ...], bounds: Ids, weights: npt.NDArray[np.generic] | None
) -> Weights | None:
    if weights is None:
        if schema.weighted:
            raise InvalidRequest("weights: expected one for each id, got none: this model is weighted")
        return None
    if not schema.weighted:
        raise InvalidRequest("weights: expected none, got some: this model is not weighted")
    _expect_vector("weights", weights, np.float32)
    if weights.size != bounds[-1]:
        raise InvalidRequest(f"weights: expected {bounds[-1]}, one for each id, got {weights.size}")
    counted = schema.feature_weighted[list(selected)]
    if not counted.all():
        weights = np.where(np.repeat(counted, np.diff(bounds)), weights, np.float32(1))
    return weights  # type: ignore[return-value]


def _refuse_sum(schema: Schema, selected: tuple[int, ...], bounds: Ids, found: int) -> None:
    """Name the feature whose bags run past the ids, or the last one where ids are left over."""
    total = bounds[-1]
    row = int(np.searchsorted(bounds[1:], found, side="right")) if total > found else len(selected) - 1
    raise InvalidRequest(
        f"feature {schema.names[selected[row]]!r}: expected its bags to take ids "
        f"[{bounds[row]}, {bounds[row + 1]}) of `values`, got {found} ids for lengths that sum to {total}"
    )


def _in_range(schema: Schema, request: KjtRequest, bounds: Ids) -> KjtRequest:
    """Compare the largest id of each feature with its table's rows, as unsigned: a negative id is huge."""
    starts = bounds[:-1]
    filled = starts < bounds[1:]
    rows = schema.rows[list(request.features)]
    unsigned = request.values.view(np.uint64)
    # reduceat would give an empty feature the id behind it.
    if (np.maximum.reduceat(unsigned, starts[filled]) < rows[filled]).all():
        return request

    ids = np.diff(bounds)
    outside = unsigned >= np.repeat(rows, ids)
    feature_of = np.repeat(np.arange(len(ids)), ids)
    refused = outside & ~schema.zero[list(request.features)][feature_of]
    bag_of = np.repeat(np.arange(request.lengths.size), request.lengths.ravel())
    if refused.any():
        at = int(np.argmax(refused))
        row, sample = divmod(int(bag_of[at]), request.samples)
        raise InvalidRequest(
            f"feature {schema.names[request.features[row]]!r}: expected an id in [0, {rows[row]}), "
            f"got {request.values[at]} for sample {sample} (values[{at}])"
        )
    kept = ~outside
    lost = np.bincount(bag_of[outside], minlength=request.lengths.size).astype(np.int32)
    lengths = request.lengths - lost.reshape(request.lengths.shape)
    return KjtRequest(
        features=request.features,
        values=request.values[kept],
        lengths=lengths,
        offsets=_offsets(lengths),
        weights=None if request.weights is None else request.weights[kept],
        dropped=np.bincount(feature_of[outside], minlength=len(ids)).astype(np.int64),
    )


def _shortened(name: str) -> str:
    """A name that a caller sent: gRPC carries messages as metadata, and drops the stream at 16 KiB of it."""
    return name if len(name) <= 64 else name[:64] + "…"


def _listed(names: Sequence[str]) -> str:
    """Names for a message; the first eight of many."""
    shown = ", ".join(repr(name) for name in names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
