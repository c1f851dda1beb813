"""The forms in which clients and engines accept the ids of a feature, and dense inputs, in one table.

A new form is an entry of `INPUT_FORMS`, its type in `FeatureInput`, and its row in docs/input-forms.md, which a test
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

from serving.requests.arrow_columns import ArrowArray, ArrowStream, DamagedColumn, is_arrow_column
from serving.requests.columns import (
    JaggedInput,
    WrongItem,
    WrongWeights,
    arrow_of_series,
    flattened,
    ids_of_array,
    ids_of_arrow,
    ids_of_dicts,
    is_pandas_series,
    items_of_series,
    numbers_of_arrow,
    rows_of_arrow,
    sizes_of_bags,
    without_null_ids,
)
from serving.requests.objects import array_of, leaves, plain
from serving.requests.types import Array, Mask


class PandasSeries(Protocol):
    """The part of a pandas Series that is used here. pandas is not imported."""

    def isna(self) -> Any:
        """Which items are null."""

    def to_numpy(self) -> Any:
        """The items, [B]."""


# How nulls are treated: "refuse", or "empty": null ids are left out, and a null bag is an empty one.
Nulls = Literal["refuse", "empty"]
Bags = Sequence[Sequence[int] | None]
OneHot = Sequence[int] | npt.NDArray[np.integer[Any]]
Jagged = tuple[npt.ArrayLike, npt.ArrayLike]
WeightedJagged = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]
NamedJagged = Mapping[str, Any]
Column = PandasSeries | ArrowStream | ArrowArray
FeatureInput = Bags | OneHot | Jagged | WeightedJagged | NamedJagged | Column

_ARRAYS = ("values", "lengths", "weights")
# Types that are iterable, but have no order, do not hold ids, or have a mask.
_NO_LISTS = (str, bytes, bytearray, Mapping, Set, np.ma.MaskedArray)
_NUMBERS = (int, float, np.generic)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputForm:
    """A form of inputs. The first form in the table that recognises an input converts it.

    Attributes:
        name: its name in docs/input-forms.md.
        written: an example for error messages.
        recognise: whether ids have this form.
        convert: converts ids to a `JaggedInput`. Raises ValueError if they are wrong.
        convert_numbers: converts a dense input with a row for each sample to an array [B, *shape]. Raises ValueError
            or TypeError if it is wrong. None: such inputs cannot have this form.
        recognise_rows: whether rows of a dense input with a row for each id, with a number of dimensions each, have
            this form. None: such inputs cannot have this form.
        convert_rows: converts such rows to a `JaggedInput`. Raises ValueError or TypeError if they are wrong.
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
        ValueError: the ids have no valid form, or a null that is refused. The message says what was expected.
    """
    ids = plain(ids, 1)  # the items of bags are checked after flattening
    form = next(form for form in INPUT_FORMS if form.recognise(ids))
    try:
        jagged = form.convert(ids)
    except WrongWeights as error:
        raise ValueError(f"expected a weight for each id, got {error}") from error
    except DamagedColumn as error:
        raise ValueError(f"expected a valid column, got {error}") from error
    except ValueError as error:
        raise ValueError(f"{_EXPECTED}; got {error}") from error
    return _without_nulls(jagged, nulls, "which leaves null ids out, and reads a null list as an empty one")


def convert_numbers(numbers: Any) -> Array:
    """A dense input with a row for each sample, in any form, as an array.

    Raises:
        TypeError: it is in no form.
        ValueError: `WrongItem` where rows have different lengths, or one is null.
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
        TypeError: the input has no valid form.
        ValueError: `WrongItem` if rows have different lengths, or a row is null.
    """
    form = next(form for form in INPUT_FORMS if form.recognise_rows is not None and form.recognise_rows(rows, ndim))
    return _without_nulls(form.convert_rows(rows, ndim), nulls, "which reads a null list as an empty one")


def _without_nulls(jagged: JaggedInput, nulls: Nulls, effect: str) -> JaggedInput:
    if jagged.null_sample is not None and nulls == "refuse":
        raise ValueError(
            f'expected no nulls, got one in sample {jagged.null_sample}: fill it, or pass nulls="empty" '
            f"(--nulls empty), {effect}"
        )
    return jagged


def _is_list_of_ids(ids: Any) -> bool:
    """Whether `ids` is a list or array of ids instead of bags. An empty list is both."""
    if hasattr(ids, "ndim"):
        return np.asarray(ids).ndim == 1
    if not isinstance(ids, Sequence) or isinstance(ids, _NO_LISTS):
        return False
    kinds = {*map(type, ids)}
    return all(issubclass(kind, (*_NUMBERS, NoneType)) for kind in kinds) and kinds != {NoneType}


def _numbers_of_array(numbers: Any) -> Array:
    """Rows of numbers, in an array or in nested lists."""
    numbers = plain(numbers)
    try:
        array = array_of(numbers)
    except ValueError as error:
        raise _wrong_row(numbers) or error from error
    if array.dtype.kind not in "fiub" and (wrong := _wrong_row(numbers)) is not None:
        raise wrong
    return array


def _wrong_row(rows: Any) -> WrongItem | None:
    """The first row that is null or has a null; or else the first one that is not made of numbers; or else the first
    one whose shape differs from the first row.
    """
    if not isinstance(rows, (list, tuple)):
        return None
    kinds_of_rows = [{*map(type, leaves([row]))} for row in rows]
    for row, kinds in enumerate(kinds_of_rows):
        if NoneType in kinds:
            return WrongItem.null(row)
    for row, kinds in enumerate(kinds_of_rows):
        for kind in kinds:
            if not issubclass(kind, (*_NUMBERS, np.ndarray)):
                return WrongItem(row, kind.__name__)
    shapes: list[Sequence[int]] = []
    for row, numbers in enumerate(rows):
        try:
            shapes.append(np.shape(numbers))
        except ValueError:
            return WrongItem(row, "lists of different lengths")
        if shapes[row] != shapes[0]:
            return WrongItem.shape(row, shapes[row], shapes[0])
    return None


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
        raise WrongWeights("a column of weights beside ids that have weights: leave one out")
    lengths, weight_lengths = sizes_of_bags(ids), sizes_of_bags(of_ids)
    if len(lengths) != len(weight_lengths):
        raise WrongWeights(f"weights of {len(weight_lengths)} samples for ids of {len(lengths)}")
    if (differs := lengths != weight_lengths).any():
        sample = int(np.argmax(differs))
        raise WrongWeights(f"{weight_lengths[sample]} weights for the {lengths[sample]} ids of sample {sample}")
    if ids.present is None and of_ids.present is None:
        return JaggedInput(ids.values, lengths, of_ids.values, ids.null_sample)
    is_id, is_weight = ids.present, of_ids.present
    is_id = np.ones_like(is_weight) if is_id is None else is_id
    is_weight = np.ones_like(is_id) if is_weight is None else is_weight
    if (lacks_weight := is_id & ~is_weight).any():
        sample = int(np.repeat(np.arange(len(lengths)), lengths)[np.argmax(lacks_weight)])
        raise WrongWeights(f"a null for the weight of an id in sample {sample}")
    # The weight of a null id is left out with it.
    return ids._replace(weights=[*compress(of_ids.values, is_id[is_weight])])


def _from_objects(ids: Any) -> JaggedInput:
    return _from_list_of_ids(ids) if _is_list_of_ids(ids) else _from_bags(ids)


def _from_list_of_ids(ids: Any) -> JaggedInput:
    if hasattr(ids, "ndim") or NoneType not in {*map(type, ids)}:
        return JaggedInput(ids)
    present = _is_present(ids)
    return without_null_ids([*compress(ids, present)], np.ones(len(ids), np.int32), present)


def _from_bags(bags: Any) -> JaggedInput:
    if isinstance(bags, _NO_LISTS):
        raise ValueError(f"{type(bags).__name__} for a list")
    if getattr(bags, "ndim", 1) == 2:
        array = np.asarray(bags)
        return JaggedInput(array.ravel(), np.full(len(array), array.shape[1], np.int32))
    try:
        kinds = {*map(type, bags)}
        if any(hasattr(kind, "to_pylist") for kind in kinds):  # pyarrow's arrays, whose items are no Python numbers
            bags = [bag.to_pylist() if hasattr(bag, "to_pylist") else bag for bag in bags]
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
    weights = None
    if isinstance(ids, list) and any(issubclass(kind, Mapping) for kind in {*map(type, ids)}):
        ids, weights = ids_of_dicts(ids)
    if not isinstance(ids, list) or NoneType not in {*map(type, ids)}:
        return JaggedInput(ids, lengths, weights, null_sample)
    id_present = _is_present(ids)
    jagged = without_null_ids([*compress(ids, id_present)], lengths, id_present, null_sample)
    return jagged if weights is None else jagged._replace(weights=[*compress(weights, id_present)])


def _from_series(series: Any) -> JaggedInput:
    if (arrow := arrow_of_series(series)) is not None:
        return ids_of_arrow(arrow)
    items, null = items_of_series(series)
    if not isinstance(items, list):
        return ids_of_array(items, null)
    jagged = _from_objects(items)
    return jagged._replace(values=np.asarray(jagged.values, np.uint8)) if _are_booleans(jagged.values) else jagged


def _are_booleans(values: Any) -> bool:
    booleans = {bool, np.bool_}
    return len(values) > 0 and type(values[0]) in booleans and {*map(type, values)} <= booleans


def _numbers_of_series(series: Any) -> Array:
    if (arrow := arrow_of_series(series)) is not None:
        return numbers_of_arrow(arrow)
    items, null = items_of_series(series)
    if null is not None:
        raise WrongItem.null(int(np.argmax(null)))
    return _numbers_of_array(items)


def _rows_of_series(series: Any, ndim: int) -> JaggedInput:
    if (arrow := arrow_of_series(series)) is not None:
        return rows_of_arrow(arrow, ndim)
    items, null = items_of_series(series)
    if null is not None:
        raise WrongItem.null(int(np.argmax(null)))
    items = plain(items)
    return JaggedInput(items) if _is_list_of_rows(items, ndim) else _rows_from_bags(items, ndim)


def _is_list_of_rows(rows: Any, ndim: int) -> bool:
    """Whether no row is in a bag. Rows have `ndim` dimensions."""
    if hasattr(rows, "ndim"):
        return np.ndim(rows) != 2 + ndim
    return (
        isinstance(rows, Sequence)
        and any(row is not None for row in rows)
        and not any(_is_bag(row, ndim) for row in rows)
    )


def _is_bag(rows: Any, ndim: int) -> bool:
    """Whether `rows` has more dimensions than a row, or is empty. A null is not a bag."""
    while isinstance(rows, (list, tuple)) and rows:
        rows = next((row for row in rows if row is not None), 0)
        ndim -= 1
    return rows is not None and (np.ndim(rows) > ndim or not np.size(rows))


def _rows_from_bags(bags: Any, _: int) -> JaggedInput:
    if isinstance(bags, _NO_LISTS) or not hasattr(bags, "__len__"):
        raise TypeError(f"got {type(bags).__name__}")
    present = _is_present(bags)
    filled = [*compress(bags, present)]
    lengths = np.zeros(len(present), np.int32)
    try:
        lengths[present] = [*map(len, filled)]
    except TypeError as error:
        sample = next(sample for sample, bag in enumerate(bags) if bag is not None and not hasattr(bag, "__len__"))
        raise WrongItem(sample, f"{type(bags[sample]).__name__} for a list of rows", unit="sample") from error
    return JaggedInput(flattened(filled), lengths, None, None if present.all() else int(np.argmin(present)))


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
