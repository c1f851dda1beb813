"""The forms in which our clients take the ids of a feature, and dense inputs, in one table.

A new form is an entry of `INPUT_FORMS`, its type in `FeatureInput`, and its row in docs/protocol.md, which a test
compares with the table.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import compress, repeat
from operator import is_not
from types import NoneType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from serving.requests.arrow_columns import ArrowArray, ArrowStream, is_arrow_column
from serving.requests.columns import (
    JaggedInput,
    array_of_series,
    arrow_of_series,
    flattened,
    ids_of_array,
    ids_of_arrow,
    is_pandas_series,
    null_in,
    numbers_of_arrow,
    rows_of_arrow,
)
from serving.requests.types import Array, Mask


class PandasSeries(Protocol):
    """The part of a pandas Series that is used here. pandas is not imported."""

    def isna(self) -> Any:
        """Which items are null."""

    def to_numpy(self) -> Any:
        """The items, [B]."""


# What a null is: an error, or no id. A null bag is then an empty one.
Nulls = Literal["refuse", "empty"]
Bags = Sequence[Sequence[int] | None]
OneHot = Sequence[int] | npt.NDArray[np.integer[Any]]
Jagged = tuple[npt.ArrayLike, npt.ArrayLike]
WeightedJagged = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]
NamedJagged = Mapping[str, Any]
Column = PandasSeries | ArrowStream | ArrowArray
FeatureInput = Bags | OneHot | Jagged | WeightedJagged | NamedJagged | Column

_ARRAYS = ("values", "lengths", "weights")
# Types that can be iterated over, but have no order, hold no ids, or have a mask.
_NO_LISTS = (str, bytes, bytearray, Mapping, Set, np.ma.MaskedArray)
_NUMBERS = (int, float, np.generic)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputForm:
    """A form of inputs. The first form in the table that recognises an input converts it.

    Attributes:
        name: what docs/protocol.md calls it.
        written: how it is written, for error messages.
        recognise: whether ids are in this form.
        convert: the ids as `JaggedInput`. Raises ValueError if they are not right.
        convert_numbers: a dense input with a row for each sample, as an array [B, *shape]. Raises ValueError or
            TypeError if it is not right. None: such inputs do not have this form.
        recognise_rows: whether rows of a dense input with a row for each id, of the given number of dimensions each,
            are in this form. None: such inputs do not have this form.
        convert_rows: the rows, of the given number of dimensions each, as `JaggedInput`. Raises ValueError or
            TypeError if they are not right.
    """

    name: str
    written: str
    recognise: Callable[[Any], bool]
    convert: Callable[[Any], JaggedInput]
    convert_numbers: Callable[[Any], Array] | None = None
    recognise_rows: Callable[[Any, int], bool] | None = None
    convert_rows: Callable[[Any, int], JaggedInput] = lambda rows, _: JaggedInput(rows)


def convert_ids(ids: Any, nulls: Nulls) -> JaggedInput:
    """The ids of a feature, in any form, without nulls.

    Raises:
        ValueError: they are in no form, or have a null that is to be refused. The message says what was expected.
    """
    form = next(form for form in INPUT_FORMS if form.recognise(ids))
    try:
        jagged = form.convert(ids)
    except ValueError as error:
        raise ValueError(f"{_EXPECTED}; got {error}") from error
    return _without_nulls(jagged, nulls)


def convert_numbers(numbers: Any) -> Array:
    """A dense input with a row for each sample, in any form, as an array.

    Raises:
        TypeError: it is in no form.
        ValueError: its rows have different lengths, or one is null.
    """
    convert = next(form.convert_numbers for form in INPUT_FORMS if form.convert_numbers and form.recognise(numbers))
    return convert(numbers)


def convert_rows(rows: Any, ndim: int, nulls: Nulls) -> JaggedInput:
    """A dense input with a row for each id, in any form.

    Args:
        rows: the input.
        ndim: dimensions of a row.
        nulls: what null bags of rows are.

    Raises:
        TypeError: it is in no form.
        ValueError: its rows have different lengths, or one is null.
    """
    form = next(form for form in INPUT_FORMS if form.recognise_rows is not None and form.recognise_rows(rows, ndim))
    return _without_nulls(form.convert_rows(rows, ndim), nulls)


def _without_nulls(jagged: JaggedInput, nulls: Nulls) -> JaggedInput:
    if jagged.null_sample is not None and nulls == "refuse":
        raise ValueError(
            f"expected no nulls, got one in sample {jagged.null_sample}: fill it, or pass "
            'nulls="empty", which leaves null ids out, and reads a null list as an empty one'
        )
    return jagged


def _is_list_of_ids(ids: Any) -> bool:
    """Whether `ids` is a list or array of ids, not of bags. An empty one is both."""
    if hasattr(ids, "ndim"):
        array = np.asarray(ids)
        if array.ndim != 1 or array.dtype != np.object_:
            return array.ndim == 1
    elif not isinstance(ids, Sequence) or isinstance(ids, _NO_LISTS):
        return False
    kinds = {*map(type, ids)}
    return all(issubclass(kind, (*_NUMBERS, NoneType)) for kind in kinds) and kinds != {NoneType}


def array_of(numbers: Any) -> npt.NDArray[Any]:
    """`numbers` as an array. Numbers that an array holds as objects get the dtype that numpy has for them.

    Raises:
        TypeError: it is a masked array, whose masked items numpy would include; or it is no array.
        ValueError: its rows have different lengths.
    """
    if isinstance(numbers, np.ma.MaskedArray):
        raise TypeError("a masked array: a request has no mask; fill it, or leave out what is masked")
    array = np.asarray(numbers)
    return np.asarray(array.tolist()) if array.dtype == np.object_ else array


def _numbers_of_array(numbers: Any) -> Array:
    array = array_of(numbers)
    if array.dtype == np.object_ and array.ndim and not (present := _is_present(array)).all():
        raise ValueError(null_in(int(np.argmin(present))))
    return array


def _is_present(items: Any) -> Mask:
    """Which items are not None, bool [n]."""
    return np.fromiter(map(is_not, items, repeat(None)), np.bool_, len(items))


def _from_tuple(arrays: tuple[Any, ...]) -> JaggedInput:
    if len(arrays) not in (2, 3) or any(isinstance(array, _NUMBERS) for array in arrays):
        raise ValueError(f"a tuple of {len(arrays)}")
    if any(array is None for array in arrays):
        raise ValueError("None for an array")
    return JaggedInput(*arrays)


def _from_mapping(arrays: Mapping[str, Any]) -> JaggedInput:
    if any(array is None for array in arrays.values()):
        raise ValueError("None for an array")
    if arrays.keys() == {"values", "weights"}:
        return _from_two_columns(**arrays)
    if not {"values", "lengths"} <= arrays.keys() <= set(_ARRAYS):
        raise ValueError(f"{list(arrays)}")
    return JaggedInput(**arrays)


def _from_two_columns(values: Any, weights: Any) -> JaggedInput:
    """Bags of ids, and bags of their weights."""
    ids, of_ids = (
        next(form for form in INPUT_FORMS if form.recognise(column)).convert(column) for column in (values, weights)
    )
    if ids.weights is not None or of_ids.weights is not None:
        raise ValueError("weights in one of two columns")
    if ids.lacks_ids or of_ids.lacks_ids:
        raise ValueError("a null in a bag of one of two columns: leave the id and its weight out, or use structs")
    lengths, weight_lengths = (
        np.ones(len(bags.values), np.int32) if bags.lengths is None else np.asarray(bags.lengths)
        for bags in (ids, of_ids)
    )
    if len(lengths) != len(weight_lengths):
        raise ValueError(f"weights of {len(weight_lengths)} samples for ids of {len(lengths)}")
    if (differs := lengths != weight_lengths).any():
        sample = int(np.argmax(differs))
        raise ValueError(f"{weight_lengths[sample]} weights for the {lengths[sample]} ids of sample {sample}")
    return JaggedInput(ids.values, lengths, of_ids.values, ids.null_sample)


def _from_objects(ids: Any) -> JaggedInput:
    return _from_list_of_ids(ids) if _is_list_of_ids(ids) else _from_bags(ids)


def _from_list_of_ids(ids: Any) -> JaggedInput:
    if hasattr(ids, "ndim"):
        if np.asarray(ids).dtype != np.object_:
            return JaggedInput(ids)
        ids = ids.tolist()
    if NoneType not in {*map(type, ids)}:
        return JaggedInput(ids)
    present = _is_present(ids)
    return JaggedInput([*compress(ids, present)], present.astype(np.int32), None, int(np.argmin(present)))


def _from_bags(bags: Any) -> JaggedInput:
    if isinstance(bags, _NO_LISTS):
        raise ValueError(f"{type(bags).__name__} for a list")
    if getattr(bags, "ndim", 1) == 2:
        array = np.asarray(bags)
        return JaggedInput(array.ravel(), np.full(len(array), array.shape[1], np.int32))
    try:
        kinds = {*map(type, bags)}
        if any(issubclass(kind, _NUMBERS) for kind in kinds):
            raise ValueError("a list that mixes ids and bags")
        null_sample = None
        if NoneType in kinds:
            present = _is_present(bags)
            null_sample, filled = int(np.argmin(present)), [*compress(bags, present)]
            lengths = np.zeros(len(present), np.int32)
            lengths[present] = [*map(len, filled)]
        else:
            filled, lengths = bags, np.fromiter(map(len, bags), np.int32, len(bags))
        ids = flattened(filled)
    except TypeError as error:
        raise ValueError(f"{type(bags).__name__}: {error}") from error
    for kind in kinds:
        if issubclass(kind, _NO_LISTS):
            raise ValueError(f"{kind.__name__} for a list")
    if not isinstance(ids, list) or NoneType not in {*map(type, ids)}:
        return JaggedInput(ids, lengths, None, null_sample)
    id_present, samples = _is_present(ids), np.repeat(np.arange(len(lengths)), lengths)
    first = int(samples[np.argmin(id_present)])
    return JaggedInput(
        [*compress(ids, id_present)],
        np.bincount(samples[id_present], minlength=len(lengths)).astype(np.int32),
        None,
        first if null_sample is None else min(first, null_sample),
        lacks_ids=True,
    )


def _from_series(series: Any) -> JaggedInput:
    if (arrow := arrow_of_series(series)) is not None:
        return ids_of_arrow(arrow)
    values, null = array_of_series(series)
    return _from_objects(values) if values.dtype == np.object_ else ids_of_array(values, null)


def _numbers_of_series(series: Any) -> Array:
    if (arrow := arrow_of_series(series)) is not None:
        return numbers_of_arrow(arrow)
    values, null = array_of_series(series)
    if null is not None:
        raise ValueError(null_in(int(np.argmax(null))))
    return array_of(values)


def _rows_of_series(series: Any, ndim: int) -> JaggedInput:
    if (arrow := arrow_of_series(series)) is not None:
        return rows_of_arrow(arrow, ndim)
    rows = array_of_series(series)[0].tolist()
    return JaggedInput(rows) if _is_list_of_rows(rows, ndim) else _rows_from_bags(rows, ndim)


def _is_list_of_rows(rows: Any, ndim: int) -> bool:
    if not isinstance(rows, Sequence) and (array := np.asarray(rows)).dtype != np.object_:
        return array.ndim != 2 + ndim
    return len(rows) > 0 and not any(row is None or np.ndim(row) > ndim or not np.size(row) for row in rows)


def _rows_from_bags(bags: Any, _: int) -> JaggedInput:
    bags = bags if isinstance(bags, Sequence) else array_of(bags)
    present = _is_present(bags)
    lengths = np.zeros(len(present), np.int32)
    lengths[present] = [*map(len, compress(bags, present))]
    null_sample = None if present.all() else int(np.argmin(present))
    return JaggedInput(flattened([*compress(bags, present)]), lengths, None, null_sample)


INPUT_FORMS = (
    InputForm(
        name="a tuple of arrays",
        written="a tuple of arrays, (values, lengths) or (values, lengths, weights)",
        recognise=lambda ids: isinstance(ids, tuple),
        convert=_from_tuple,
    ),
    InputForm(
        name="a dict of arrays",
        written='a dict of arrays, {"values": …, "lengths": …, "weights": …}',
        recognise=lambda ids: isinstance(ids, Mapping),
        convert=_from_mapping,
    ),
    InputForm(
        name="a pandas Series",
        written="a pandas Series of ids or of lists of ids",
        recognise=is_pandas_series,
        convert=_from_series,
        convert_numbers=_numbers_of_series,
        recognise_rows=lambda rows, _: is_pandas_series(rows),
        convert_rows=_rows_of_series,
    ),
    InputForm(
        name="an Arrow column",
        written="a column of polars or pyarrow, of ids or of lists of ids",
        recognise=is_arrow_column,
        convert=ids_of_arrow,
        convert_numbers=numbers_of_arrow,
        recognise_rows=lambda rows, _: is_arrow_column(rows),
        convert_rows=rows_of_arrow,
    ),
    InputForm(
        name="a list of ids",
        written="a list of ids, [id, …], one for each sample",
        recognise=_is_list_of_ids,
        convert=_from_list_of_ids,
        recognise_rows=_is_list_of_rows,
    ),
    InputForm(
        name="a list of bags",
        written="a list of bags, [[id, …], …]",
        recognise=lambda _: True,
        convert=_from_bags,
        convert_numbers=_numbers_of_array,
        recognise_rows=lambda _, __: True,
        convert_rows=_rows_from_bags,
    ),
)
_EXPECTED = f"expected {', '.join(form.written for form in INPUT_FORMS[:0:-1])}, or {INPUT_FORMS[0].written}"
