"""What people have (lists, arrays, KJTs) to the tensors of a request, and an answer back to features."""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from serving.errors import InvalidRequest
from serving.kjt import Embeddings, Ids, Lengths, Tensors, Weights


@runtime_checkable
class Kjt(Protocol):
    """What we use of a `torchrec.KeyedJaggedTensor`, so that no client needs torchrec."""

    def keys(self) -> list[str]:
        """Feature names, in order."""

    def values(self) -> Any:
        """Ids, feature-major [N]."""

    def lengths(self) -> Any:
        """Bag sizes, feature-major [F·B]."""

    def weights_or_none(self) -> Any:
        """A weight for each id, or None."""


Bags = Sequence[Sequence[int]]
Jagged = tuple[npt.ArrayLike, npt.ArrayLike]
WeightedJagged = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]
Features = Mapping[str, Bags | Jagged | WeightedJagged] | Kjt


def encode(features: Features, weighted: Collection[str] = ()) -> Tensors:
    """Lay the bags of some features out as one feature-major request.

    Args:
        features: by feature name, one bag of ids for each sample: a list of lists, or a pair of arrays
            (values [N_f], lengths [B]), or (values, lengths, weights [N_f]) for weighted models; or a
            torchrec KeyedJaggedTensor.
        weighted: the model's features whose ids carry weights. In a model that has some, ids of the others
            travel with a weight of 1.

    Raises:
        InvalidRequest: naming the feature whose ids, lengths, weights or number of samples are not as above.
    """
    if isinstance(features, Kjt) and not isinstance(features, Mapping):
        names = tuple(features.keys())
        values = _integers("values", features.values(), np.int64)
        lengths = _integers("lengths", features.lengths(), np.int32)
        given = features.weights_or_none()
        weights = None if given is None else _floats("weights", given)
        if all(_expects_weights(name, weights is not None, weighted) for name in names) and weights is None:
            weights = np.ones(values.size, np.float32)
        return Tensors(names, values, lengths, weights)
    if not features:
        raise InvalidRequest("features: expected at least one, got none")
    columns = [_column(name, bags) for name, bags in features.items()]
    first, samples = next(iter(features)), len(columns[0][1])
    for name, (_, lengths, _) in zip(features, columns, strict=True):
        if len(lengths) != samples:
            raise InvalidRequest(
                f"feature {name!r}: expected as many samples as {first!r} has, {samples}, got {len(lengths)}"
            )
    travelling = [
        np.ones(values.size, np.float32) if weights is None else weights
        for name, (values, _, weights) in zip(features, columns, strict=True)
        if _expects_weights(name, weights is not None, weighted)
    ]
    return Tensors(
        features=tuple(features),
        values=np.concatenate([values for values, _, _ in columns]),
        lengths=np.concatenate([lengths for _, lengths, _ in columns]),
        weights=np.concatenate(travelling) if travelling else None,
    )


def decode(embeddings: Embeddings, dims: Mapping[str, int]) -> dict[str, Embeddings]:
    """Cut an answer [B, D] into {feature: [B, dim]}, by the width of each. They are views: nothing is copied."""
    ends = np.cumsum(list(dims.values()))
    return {name: embeddings[:, end - dim : end] for (name, dim), end in zip(dims.items(), ends, strict=True)}


def _expects_weights(name: str, given: bool, weighted: Collection[str]) -> bool:
    """Whether the ids of a feature travel with weights: all do in a model that has any weighted feature."""
    if given and not weighted:
        raise InvalidRequest(f"feature {name!r}: expected no weights: this model is not weighted")
    if name in weighted and not given:
        raise InvalidRequest(f"feature {name!r}: expected a weight for each id: give (values, lengths, weights)")
    return bool(weighted)


def _column(name: str, bags: Bags | Jagged | WeightedJagged) -> tuple[Ids, Lengths, Weights | None]:
    if not isinstance(bags, tuple):
        try:
            lengths = np.fromiter((len(bag) for bag in bags), np.int32, len(bags))
            ids = list(chain.from_iterable(bags))
        except TypeError as error:
            raise InvalidRequest(f"feature {name!r}: expected a list of ids for each sample: {error}") from error
        return _integers(name, ids, np.int64), lengths, None
    if len(bags) not in (2, 3):
        raise InvalidRequest(
            f"feature {name!r}: expected (values, lengths) or (values, lengths, weights), got a tuple of {len(bags)}"
        )
    values = _integers(name, bags[0], np.int64)
    lengths = _integers(name, bags[1], np.int32)
    if (total := lengths.sum(dtype=np.int64)) != values.size:
        raise InvalidRequest(f"feature {name!r}: expected {total} ids, the sum of its lengths, got {values.size}")
    weights = _floats(name, bags[2]) if len(bags) == 3 else None
    if weights is not None and weights.shape != values.shape:
        raise InvalidRequest(f"feature {name!r}: expected {values.size} weights, got shape {list(weights.shape)}")
    return values, lengths, weights


def _floats(name: str, given: Any) -> Weights:
    try:
        return np.asarray(given, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"feature {name!r}: expected numbers as weights: {error}") from error


def _integers(name: str, given: Any, dtype: type[np.signedinteger[Any]]) -> Any:
    """`given` as `dtype` [n], refusing what a cast would change: fractions, and numbers that do not fit."""
    try:
        array = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"feature {name!r}: expected integers: {error}") from error
    if array.size == 0:
        return np.zeros(0, dtype)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidRequest(
            f"feature {name!r}: expected integers in 1 dimension, got {array.dtype} {list(array.shape)}"
        )
    limits = np.iinfo(dtype)
    if array.dtype != dtype and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise InvalidRequest(f"feature {name!r}: expected numbers that fit {np.dtype(dtype)}")
    return array.astype(dtype, copy=False)
