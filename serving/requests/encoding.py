"""Encode lists, arrays, columns or a KeyedJaggedTensor as the tensors of a request."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt

from serving.bundle.tensor_names import SEQUENCES
from serving.errors import ConfigurationError, InvalidRequest, quoted
from serving.requests.arrow_columns import ArrowStream
from serving.requests.frames import columns_of, is_frame
from serving.requests.input_forms import FeatureInput, Nulls, convert_ids
from serving.requests.limits import RequestLimits, check_size
from serving.requests.objects import INTEGERS, array_of, leaves
from serving.requests.types import Ids, Lengths, Tensors, Weights


@runtime_checkable
class Kjt(Protocol):
    """The part of `torchrec.KeyedJaggedTensor` that is used here, so that clients do not need torchrec."""

    def keys(self) -> list[str]:
        """Names of the features, in order."""

    def values(self) -> Any:
        """Ids, feature-major; integers [N]."""

    def lengths(self) -> Any:
        """Bag sizes, feature-major; integers [F·B]."""

    def weights_or_none(self) -> Any:
        """A weight for each id; floats [N], or None."""


# A DataFrame has columns of ids by the names of features.
Features = Mapping[str, FeatureInput] | Kjt | ArrowStream

_WHAT_TO_DO = {
    "f": ': convert whole numbers with .astype("int64"); pandas makes floats of integers with nulls, unless their '
    'dtype is "Int64"',
}


def encode(
    features: Features,
    weighted: Collection[str] = (),
    shared: Collection[str] = (),
    *,
    keys: Collection[str] | None = None,
    nulls: Nulls = "refuse",
    limits: RequestLimits | None = None,
    **options: Any,
) -> Tensors:
    """Encode the bags of some features as one feature-major request.

    Args:
        features: for each feature name a bag of ids for each of B samples; or a DataFrame of pandas or polars, or a
            Table or RecordBatch of pyarrow, with a column for each feature; or a torchrec KeyedJaggedTensor. Bags are
            a list of B bags, each a list or array of ids. Any sequence but a tuple is such a list;
            a list of B ids, or an array [B], where each bag has one: [3, 5] for [[3], [5]];
            a column of B ids or B lists of ids: a pandas or polars Series, a pyarrow Array or ChunkedArray. Lists of
            structs with the fields `id` and `weight` are weighted;
            a tuple of arrays (values [N_f], lengths [B]), or (values [N_f], lengths [B], weights [N_f]) for features
            whose ids carry weights;
            a mapping of these arrays, {"values": …, "lengths": …} and perhaps "weights"; or of a column of bags and
            one of their weights, {"values": …, "weights": …}.
            Values and lengths may be of any integer dtype, weights of any number's. Columns of booleans are ids 0
            and 1.
        weighted: the model's features whose ids carry weights. If it is not empty, the ids of other features are sent
            with a weight of 1.
        shared: the names of features with one bag for all samples. Other names are ignored, because dense inputs may
            also be shared.
        keys: the columns of a DataFrame that may be ids. Other columns are left out. None: all columns.
        nulls: "refuse" nulls of columns and None in lists; or "empty": a null list is an empty one, and null ids are
            left out of their bags.
        limits: the limits of the request's size, or None.
        options: other fields of `Tensors`.

    Returns:
        values int64 [N], lengths int32 [F·B], weights float32 [N] or None.

    Raises:
        InvalidRequest: ids, lengths, weights or the number of samples of a feature are wrong, or the request is
            larger than a limit. The message names the feature or the limit.
        ConfigurationError: `nulls` has another value.
    """
    if nulls not in get_args(Nulls):
        raise ConfigurationError(f"nulls: expected one of {quoted(get_args(Nulls))}, got {nulls!r:.80}")
    shared = _names(shared)
    if is_frame(features):
        features = _of_frame(features, weighted, keys)
    elif isinstance(features, Kjt) and not isinstance(features, Mapping):
        _expect_as_in_requests(features, shared)
        return replace(_of_kjt(features, weighted), shared=shared, **options)
    if not isinstance(features, Mapping):
        raise InvalidRequest(
            "features: expected ids by feature, {name: ids}, a KeyedJaggedTensor or a DataFrame, got "
            f"{type(features).__name__}{': collect it first, .collect()' if hasattr(features, 'collect') else ''}"
        )
    if not features:
        raise InvalidRequest("features: expected at least one, got none")
    columns = {name: _column(name, ids, nulls) for name, ids in features.items()}
    samples = {name: column.lengths.size for name, column in columns.items()}
    _expect_samples(samples, shared, {name for name, column in columns.items() if column.is_list_of_ids})
    if limits is not None:
        check_size(sum(column.values.size for column in columns.values()), max(samples.values()), limits)
    weights = [
        np.ones(column.values.size, np.float32) if column.weights is None else column.weights
        for name, column in columns.items()
        if _sends_weights(name, column.weights is not None or (name in weighted and not column.values.size), weighted)
    ]
    return Tensors(
        features=tuple(features),
        values=np.concatenate([column.values for column in columns.values()]),
        lengths=np.concatenate([column.lengths for column in columns.values()]),
        weights=np.concatenate(weights) if weights else None,
        shared=shared,
        **options,
    )


def encode_rows(table: str, ids: npt.ArrayLike, *, weighted: bool) -> Tensors:
    """A request for rows of a table.

    Args:
        table: the name of the table.
        ids: integers [n].
        weighted: whether requests to the model carry weights, which have no effect on rows.

    Raises:
        InvalidRequest: the ids are not integers in one dimension.
    """
    if not isinstance(table, str):
        raise InvalidRequest(f"table {table!r}: expected the name of a table, got {type(table).__name__}")
    values = _integers(table, ids, np.int64, "table")
    weights = np.ones(values.size, np.float32) if weighted else None
    return Tensors(None, values, np.array([values.size], np.int32), weights, outputs=(SEQUENCES,), tables=(table,))


def has_boolean(numbers: Sequence[Any]) -> bool:
    """Whether a number is a boolean of Python or numpy, which numpy would convert to an integer among integers."""
    if {*map(type, numbers)} <= INTEGERS:
        return False
    return any(isinstance(number, bool) or str(getattr(number, "dtype", "")).endswith("bool") for number in numbers)


def _of_kjt(kjt: Kjt, weighted: Collection[str]) -> Tensors:
    names = tuple(kjt.keys())
    values = _integers("values", kjt.values(), np.int64, "KeyedJaggedTensor")
    lengths = _integers("lengths", kjt.lengths(), np.int32, "KeyedJaggedTensor")
    per_id_weights = kjt.weights_or_none()
    weights = None if per_id_weights is None else _floats("weights", per_id_weights, "KeyedJaggedTensor")
    if all(_sends_weights(name, weights is not None, weighted) for name in names) and weights is None:
        weights = np.ones(values.size, np.float32)
    return Tensors(names, values, lengths, weights)


def _names(shared: Any) -> tuple[str, ...]:
    if (
        isinstance(shared, str)
        or not isinstance(shared, Collection)
        or not all(isinstance(name, str) for name in shared)
    ):
        raise InvalidRequest(f"shared: expected names of features, [name, …], got {shared!r:.80}")
    return tuple(shared)


def _expect_as_in_requests(kjt: Any, shared: Collection[str]) -> None:
    """Refuse a KeyedJaggedTensor whose keys have other numbers of bags than a request may have, if it states them."""
    if hasattr(kjt, "stride_per_key"):
        _expect_samples(dict(zip(kjt.keys(), kjt.stride_per_key(), strict=True)), shared)
    if hasattr(kjt, "inverse_indices_or_none") and kjt.inverse_indices_or_none() is not None:
        raise InvalidRequest("features: expected a KeyedJaggedTensor without inverse indices: name keys in `shared`")


def _expect_samples(samples: Mapping[str, int], shared: Collection[str], flat: Collection[str] = ()) -> None:
    """Refuse features with another number of samples than the first one, and shared features with several bags.

    Args:
        samples: the number of samples of each feature.
        shared: the features that are shared.
        flat: the features whose ids are a list with one id for each sample.
    """
    for name in shared:
        if samples.get(name, 1) != 1:
            raise InvalidRequest(f"feature {name!r}: expected one bag, because it comes once, got {samples[name]}")
    unshared = [name for name in samples if name not in shared]
    for name in unshared:
        first, count, expected = unshared[0], samples[name], samples[unshared[0]]
        if count == expected:
            continue
        hint = ": if all samples share one of them, name it in `shared`" if 1 in (count, expected) else ""
        if one := next((feature for feature in (name, first) if feature in flat), None):
            hint = f": {one!r} is a list of ids, one for each sample; a sample with several is [[id, …]]"
        raise InvalidRequest(
            f"feature {name!r}: expected as many samples as {first!r} has, {expected}, got {count}{hint}"
        )


def _sends_weights(name: str, has_weights: bool, weighted: Collection[str]) -> bool:
    """Whether the ids of a feature are sent with weights. In a model with a weighted feature, all ids are.

    Raises:
        InvalidRequest: weights are missing, or are not expected.
    """
    if has_weights and not weighted:
        raise InvalidRequest(f"feature {name!r}: expected no weights: this model is not weighted")
    if name in weighted and not has_weights:
        raise InvalidRequest(f"feature {name!r}: expected a weight for each id: give (values, lengths, weights)")
    return bool(weighted)


class _Column(NamedTuple):
    """The bags of one feature.

    Attributes:
        values: ids; int64 [N_f].
        lengths: bag sizes; int32 [B].
        weights: the weight of each id; float32 [N_f], or None.
        is_list_of_ids: whether the input was a list with one id for each sample.
    """

    values: Ids
    lengths: Lengths
    weights: Weights | None
    is_list_of_ids: bool


def _of_frame(frame: Any, weighted: Collection[str], keys: Collection[str] | None) -> dict[str, Any]:
    columns = columns_of(frame, keys, weighted)
    if not columns and keys is not None:
        raise InvalidRequest(f"features: expected a column for at least one of {quoted(keys)}, got none")
    return columns


def _column(name: str, ids: Any, nulls: Nulls) -> _Column:
    """The bags of one feature, from any form."""
    if not isinstance(name, str):
        raise InvalidRequest(f"feature {name!r}: expected the name of a feature, got {type(name).__name__}")
    try:
        jagged = convert_ids(ids, nulls)
    except ValueError as error:
        raise InvalidRequest(f"feature {name!r}: {error}") from error
    values = _integers(name, jagged.values, np.int64)
    is_list_of_ids = jagged.lengths is None
    lengths = np.ones(values.size, np.int32) if is_list_of_ids else _integers(name, jagged.lengths, np.int32)
    if (total := lengths.sum(dtype=np.int64)) != values.size:
        raise InvalidRequest(
            f"feature {name!r}: expected {total} ids, the sum of its lengths, got {values.size}: a tuple is (values, "
            "lengths); a list of bags is a list"
        )
    weights = None if jagged.weights is None else _floats(name, jagged.weights)
    if weights is not None and weights.shape != values.shape:
        raise InvalidRequest(f"feature {name!r}: expected {values.size} weights, got shape {list(weights.shape)}")
    return _Column(values, lengths, weights, is_list_of_ids)


def _floats(name: str, numbers: Any, what: str = "feature") -> Weights:
    """`numbers` as contiguous float32 of the same shape. For errors: `what` the `name` has."""
    try:
        array = array_of(numbers)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{what} {name!r}: expected numbers as weights: {error}") from error
    if not array.size:
        return np.zeros(array.shape, np.float32)
    if array.dtype.kind == "b" or (isinstance(numbers, (list, tuple)) and has_boolean(numbers)):
        raise InvalidRequest(f"{what} {name!r}: expected numbers as weights, got booleans")
    if array.dtype.kind not in "fiu":
        got = "a null" if array.dtype == np.object_ and any(leaf is None for leaf in leaves(array)) else array.dtype
        raise InvalidRequest(f"{what} {name!r}: expected numbers as weights, got {got}")
    with np.errstate(over="ignore"):
        floats = np.asarray(array, np.float32, order="C")
    if floats.dtype != array.dtype and (is_too_large := np.isinf(floats) & ~np.isinf(array)).any():
        raise InvalidRequest(f"{what} {name!r}: expected numbers of FP32 as weights, got {array[is_too_large][0]:g}")
    return floats


def _integers(name: str, numbers: Any, dtype: type[np.signedinteger[Any]], what: str = "feature") -> Any:
    """`numbers` as contiguous `dtype` [n], which FBGEMM needs. For errors: `what` the `name` has.

    Raises:
        InvalidRequest: the cast would change a number, because it is a fraction or does not fit.
    """
    try:
        array = array_of(numbers)
    except (TypeError, ValueError, np.ma.MAError) as error:
        raise InvalidRequest(f"{what} {name!r}: expected integers: {error}") from error
    if array.size == 0:
        return np.zeros(0, dtype)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(
            f"{what} {name!r}: expected integers in 1 dimension, got {array.dtype} {list(array.shape)}"
            f"{_WHAT_TO_DO.get(array.dtype.kind, '')}"
        )
    if isinstance(numbers, (list, tuple)) and has_boolean(numbers):
        raise InvalidRequest(f"{what} {name!r}: expected integers, got a boolean among them")
    limits = np.iinfo(dtype)
    if array.dtype != dtype and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        outside = array.max() if int(array.max()) > limits.max else array.min()
        raise InvalidRequest(f"{what} {name!r}: expected numbers that fit {np.dtype(dtype)}, got {outside}")
    return np.asarray(array, dtype, order="C")
