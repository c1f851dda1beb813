"""From lists, arrays or a KeyedJaggedTensor to the tensors of a request; from an answer to its features."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from serving.errors import InvalidRequest
from serving.requests.types import SEQUENCES, Ids, Lengths, Tensors, Weights


@runtime_checkable
class Kjt(Protocol):
    """The part of `torchrec.KeyedJaggedTensor` that is used here. No client needs torchrec."""

    def keys(self) -> list[str]:
        """Names of the features, in order."""

    def values(self) -> Any:
        """Ids, feature-major; integers [N]."""

    def lengths(self) -> Any:
        """Bag sizes, feature-major; integers [F·B]."""

    def weights_or_none(self) -> Any:
        """A weight for each id; floats [N], or None."""


Bags = Sequence[Sequence[int]]
OneHot = Sequence[int] | npt.NDArray[np.integer[Any]]
Jagged = tuple[npt.ArrayLike, npt.ArrayLike]
WeightedJagged = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]
NamedJagged = Mapping[str, npt.ArrayLike]
Features = Mapping[str, Bags | OneHot | Jagged | WeightedJagged | NamedJagged] | Kjt

_FORMS = (
    "expected a list of bags, [[id, …], …], a list of ids, [id, …], one for each sample, or arrays: the tuple "
    '(values, lengths) or (values, lengths, weights), or {"values": …, "lengths": …, "weights": …}'
)
_ARRAYS = ("values", "lengths", "weights")
# What has a length and can be gone through, but has no order of its own, is no list of ids, or has a mask.
_NO_LISTS = (str, bytes, bytearray, Mapping, Set, np.ma.MaskedArray)
_NUMBERS = (int, float, np.generic)
_INTEGERS = {int, *(np.dtype(code).type for code in np.typecodes["AllInteger"])}


def encode(
    features: Features, weighted: Collection[str] = (), shared: Collection[str] = (), **options: Any
) -> Tensors:
    """Lay the bags of some features out as one feature-major request.

    Args:
        features: a torchrec KeyedJaggedTensor, or by feature name one bag of ids for each of B samples, as
            a list of B bags, each a list or array of ids. Any sequence but a tuple is such a list;
            a list of B ids, or an array [B], where each bag has one: [3, 5] for [[3], [5]];
            a tuple of arrays (values [N_f], lengths [B]), or (values [N_f], lengths [B], weights [N_f]) for features
            whose ids carry weights;
            or a mapping of these arrays, {"values": …, "lengths": …} and perhaps "weights".
            Values and lengths may be of any integer dtype, weights of any number's.
        weighted: the model's features whose ids carry weights. If it has some, the ids of its other features are
            sent with a weight of 1.
        shared: names of features that have one bag, which counts for all samples. Other names in it are let be: dense
            inputs may come once, too.
        options: other fields of `Tensors`.

    Returns:
        values int64 [N], lengths int32 [F·B], weights float32 [N] or None.

    Raises:
        InvalidRequest: naming the feature whose ids, lengths, weights or number of samples are wrong.
    """
    shared = _names(shared)
    if isinstance(features, Kjt) and not isinstance(features, Mapping):
        _expect_as_in_requests(features, shared)
        return replace(_of_kjt(features, weighted), shared=shared, **options)
    if not isinstance(features, Mapping):
        raise InvalidRequest(
            f"features: expected ids by feature, {{name: ids}}, or a KeyedJaggedTensor, got {type(features).__name__}"
        )
    if not features:
        raise InvalidRequest("features: expected at least one, got none")
    columns = {name: _column(name, bags) for name, bags in features.items()}
    samples = {name: len(lengths) for name, (_, lengths, _) in columns.items()}
    _expect_samples(samples, shared, {name for name, bags in features.items() if _is_flat(bags)})
    weights = [
        np.ones(values.size, np.float32) if column_weights is None else column_weights
        for name, (values, _, column_weights) in columns.items()
        if _sends_weights(name, column_weights is not None, weighted)
    ]
    return Tensors(
        features=tuple(features),
        values=np.concatenate([values for values, _, _ in columns.values()]),
        lengths=np.concatenate([lengths for _, lengths, _ in columns.values()]),
        weights=np.concatenate(weights) if weights else None,
        shared=shared,
        **options,
    )


def encode_rows(table: str, ids: npt.ArrayLike, *, weighted: bool) -> Tensors:
    """A request for rows of a table.

    Args:
        table: its name.
        ids: integers [n].
        weighted: whether requests to the model carry weights. Those of rows do not count.

    Raises:
        InvalidRequest: the ids are no integers in one dimension.
    """
    if not isinstance(table, str):
        raise InvalidRequest(f"table {table!r}: expected the name of a table, got {type(table).__name__}")
    values = _integers(table, ids, np.int64, "table")
    weights = np.ones(values.size, np.float32) if weighted else None
    return Tensors(None, values, np.array([values.size], np.int32), weights, outputs=(SEQUENCES,), tables=(table,))


def array_of(given: Any) -> npt.NDArray[Any]:
    """`given` as an array.

    Raises:
        TypeError: it is a masked array, of which numpy would give what is masked; or it is no array.
        ValueError: its rows have different lengths.
    """
    if isinstance(given, np.ma.MaskedArray):
        raise TypeError("a masked array: a request has no mask; fill it, or leave out what is masked")
    return np.asarray(given)


def has_boolean(numbers: Sequence[Any]) -> bool:
    """Whether one of them is a boolean of Python, numpy or torch. Among integers, numpy makes 1 of it."""
    if {*map(type, numbers)} <= _INTEGERS:
        return False
    return any(isinstance(each, bool) or str(getattr(each, "dtype", "")).endswith("bool") for each in numbers)


def _of_kjt(kjt: Kjt, weighted: Collection[str]) -> Tensors:
    names = tuple(kjt.keys())
    values = _integers("values", kjt.values(), np.int64, "KeyedJaggedTensor")
    lengths = _integers("lengths", kjt.lengths(), np.int32, "KeyedJaggedTensor")
    given = kjt.weights_or_none()
    weights = None if given is None else _floats("weights", given, "KeyedJaggedTensor")
    if all(_sends_weights(name, weights is not None, weighted) for name in names) and weights is None:
        weights = np.ones(values.size, np.float32)
    return Tensors(names, values, lengths, weights)


def _names(shared: Any) -> tuple[str, ...]:
    if (
        isinstance(shared, str)
        or not isinstance(shared, Collection)
        or not all(isinstance(each, str) for each in shared)
    ):
        raise InvalidRequest(f"shared: expected names of features, [name, …], got {shared!r:.80}")
    return tuple(shared)


def _expect_as_in_requests(kjt: Any, shared: Collection[str]) -> None:
    """Refuse a KeyedJaggedTensor whose keys have other numbers of bags than those of a request, as far as it says."""
    if hasattr(kjt, "stride_per_key"):
        _expect_samples(dict(zip(kjt.keys(), kjt.stride_per_key(), strict=True)), shared)
    if hasattr(kjt, "inverse_indices_or_none") and kjt.inverse_indices_or_none() is not None:
        raise InvalidRequest("features: expected a KeyedJaggedTensor without inverse indices: name keys in `shared`")


def _expect_samples(samples: Mapping[str, int], shared: Collection[str], flat: Collection[str] = ()) -> None:
    """Refuse features with other numbers of samples than the first, or than one for what comes once.

    Args:
        samples: of each feature.
        shared: those that come once.
        flat: those that were given as a list of ids.
    """
    for name in shared:
        if samples.get(name, 1) != 1:
            raise InvalidRequest(f"feature {name!r}: expected one bag, because it comes once, got {samples[name]}")
    many = [name for name in samples if name not in shared]
    for name in many:
        first, found, expected = many[0], samples[name], samples[many[0]]
        if found == expected:
            continue
        hint = ": what comes once and counts for all samples is named in `shared`" if 1 in (found, expected) else ""
        if one := next((each for each in (name, first) if each in flat), None):
            hint = f": {one!r} is a list of ids, one for each sample; a sample with several is [[id, …]]"
        raise InvalidRequest(
            f"feature {name!r}: expected as many samples as {first!r} has, {expected}, got {found}{hint}"
        )


def _sends_weights(name: str, given: bool, weighted: Collection[str]) -> bool:
    """Whether the ids of a feature are sent with weights. In a model with a weighted feature, all ids are.

    Raises:
        InvalidRequest: weights were `given` and are not expected, or the other way round.
    """
    if given and not weighted:
        raise InvalidRequest(f"feature {name!r}: expected no weights: this model is not weighted")
    if name in weighted and not given:
        raise InvalidRequest(f"feature {name!r}: expected a weight for each id: give (values, lengths, weights)")
    return bool(weighted)


def _column(name: str, given: Any) -> tuple[Ids, Lengths, Weights | None]:
    """The ids int64 [N_f], lengths int32 [B] and weights float32 [N_f] of one feature, in any form."""
    if not isinstance(name, str):
        raise InvalidRequest(f"feature {name!r}: expected the name of a feature, got {type(name).__name__}")
    if isinstance(given, tuple):
        if len(given) not in (2, 3) or any(isinstance(each, _NUMBERS) for each in given):
            raise InvalidRequest(f"feature {name!r}: {_FORMS}; got a tuple of {len(given)}")
        return _of_arrays(name, *given)
    if isinstance(given, Mapping):
        if not {"values", "lengths"} <= given.keys() <= set(_ARRAYS):
            raise InvalidRequest(f"feature {name!r}: {_FORMS}; got {list(given)}")
        return _of_arrays(name, *(given[key] for key in _ARRAYS if key in given))
    if _is_flat(given):
        ids = _integers(name, given, np.int64)
        return ids, np.ones(ids.size, np.int32), None
    return *_of_bags(name, given), None


def _is_flat(given: Any) -> bool:
    """Whether `given` is a list or array of ids, not of bags. One without items is both."""
    if hasattr(given, "ndim"):
        return bool(given.ndim == 1 and np.asarray(given).dtype != np.object_)
    if not isinstance(given, Sequence) or isinstance(given, _NO_LISTS):
        return False
    return all(isinstance(each, _NUMBERS) for each in given)


def _of_bags(name: str, bags: Any) -> tuple[Ids, Lengths]:
    if isinstance(bags, _NO_LISTS):
        raise InvalidRequest(f"feature {name!r}: {_FORMS}; got {type(bags).__name__} for a list")
    try:
        kinds = {*map(type, bags)}
        if any(issubclass(kind, _NUMBERS) for kind in kinds):
            raise InvalidRequest(f"feature {name!r}: {_FORMS}; got a list that mixes ids and bags")
        lengths = np.fromiter((len(bag) for bag in bags), np.int32, len(bags))
        ids = list(chain.from_iterable(bags))
    except TypeError as error:
        raise InvalidRequest(f"feature {name!r}: {_FORMS}; got {type(bags).__name__}: {error}") from error
    for kind in kinds:
        if issubclass(kind, _NO_LISTS):
            raise InvalidRequest(f"feature {name!r}: {_FORMS}; got {kind.__name__} for a list")
    return _integers(name, ids, np.int64), lengths


def _of_arrays(name: str, values: Any, lengths: Any, *weights: Any) -> tuple[Ids, Lengths, Weights | None]:
    ids, sizes = _integers(name, values, np.int64), _integers(name, lengths, np.int32)
    if (total := sizes.sum(dtype=np.int64)) != ids.size:
        raise InvalidRequest(
            f"feature {name!r}: expected {total} ids, the sum of its lengths, got {ids.size}: a tuple is (values, "
            "lengths); a list of bags is a list"
        )
    numbers = _floats(name, *weights) if weights else None
    if numbers is not None and numbers.shape != ids.shape:
        raise InvalidRequest(f"feature {name!r}: expected {ids.size} weights, got shape {list(numbers.shape)}")
    return ids, sizes, numbers


def _floats(name: str, given: Any, what: str = "feature") -> Weights:
    """`given` as float32, of the same shape, without gaps. `what` has the `name`, for errors."""
    try:
        array = array_of(given)
        if array.dtype.kind == "b" or (isinstance(given, (list, tuple)) and has_boolean(given)):
            raise TypeError("got booleans")
        return np.asarray(array, np.float32, order="C")
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{what} {name!r}: expected numbers as weights: {error}") from error


def _integers(name: str, given: Any, dtype: type[np.signedinteger[Any]], what: str = "feature") -> Any:
    """`given` as `dtype` [n], without gaps: FBGEMM reads on from the first. `what` has the `name`, for errors.

    Raises:
        InvalidRequest: the cast would change a number, because it is a fraction or does not fit.
    """
    try:
        array = array_of(given)
    except (TypeError, ValueError, np.ma.MAError) as error:
        raise InvalidRequest(f"{what} {name!r}: expected integers: {error}") from error
    if array.size == 0:
        return np.zeros(0, dtype)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(
            f"{what} {name!r}: expected integers in 1 dimension, got {array.dtype} {list(array.shape)}"
        )
    if isinstance(given, (list, tuple)) and has_boolean(given):
        raise InvalidRequest(f"{what} {name!r}: expected integers, got a boolean among them")
    limits = np.iinfo(dtype)
    if array.dtype != dtype and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise InvalidRequest(f"{what} {name!r}: expected numbers that fit {np.dtype(dtype)}")
    return np.asarray(array, dtype, order="C")
