"""The forms in which our clients take the ids of a feature, and dense inputs with a row for each id, in one table.

A new form is an entry of `INPUT_FORMS`, its type in `FeatureInput`, and its row in docs/protocol.md, which a test
compares with the table.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bags = Sequence[Sequence[int]]
OneHot = Sequence[int] | npt.NDArray[np.integer[Any]]
Jagged = tuple[npt.ArrayLike, npt.ArrayLike]
WeightedJagged = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]
NamedJagged = Mapping[str, npt.ArrayLike]
FeatureInput = Bags | OneHot | Jagged | WeightedJagged | NamedJagged

_ARRAYS = ("values", "lengths", "weights")
# Types that can be iterated over, but have no order, hold no ids, or have a mask.
_NO_LISTS = (str, bytes, bytearray, Mapping, Set, np.ma.MaskedArray)
_NUMBERS = (int, float, np.generic)


class JaggedInput(NamedTuple):
    """An input in any form, as arrays or lists that are not checked.

    Attributes:
        values: ids [n], or rows [n, *shape].
        lengths: bag sizes [B]. None: the form does not say.
        weights: a weight for each id [n], or None.
    """

    values: Any
    lengths: Any = None
    weights: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InputForm:
    """A form of inputs. The first form in the table that recognises an input converts it.

    Attributes:
        name: what docs/protocol.md calls it.
        written: how it is written, for error messages.
        recognise: whether ids are in this form.
        convert: the ids as `JaggedInput`. Raises ValueError if they are not right.
        recognise_rows: whether rows of a dense input, of the given number of dimensions each, are in this form. None:
            dense inputs do not have this form.
        convert_rows: the rows as `JaggedInput`. Raises TypeError if they are not right.
    """

    name: str
    written: str
    recognise: Callable[[Any], bool]
    convert: Callable[[Any], JaggedInput]
    recognise_rows: Callable[[Any, int], bool] | None = None
    convert_rows: Callable[[Any], JaggedInput] = JaggedInput


def convert_ids(ids: Any) -> JaggedInput:
    """The ids of a feature, in any form.

    Raises:
        ValueError: they are in no form. The message says what was expected.
    """
    form = next(form for form in INPUT_FORMS if form.recognise(ids))
    try:
        return form.convert(ids)
    except ValueError as error:
        raise ValueError(f"{_EXPECTED}; got {error}") from error


def convert_rows(rows: Any, ndim: int) -> JaggedInput:
    """A dense input with a row for each id, in any form.

    Args:
        rows: the input.
        ndim: dimensions of a row.

    Raises:
        TypeError: it is in no form.
    """
    form = next(form for form in INPUT_FORMS if form.recognise_rows is not None and form.recognise_rows(rows, ndim))
    return form.convert_rows(rows)


def is_list_of_ids(ids: Any) -> bool:
    """Whether `ids` is a list or array of ids, not of bags. An empty one is both."""
    if hasattr(ids, "ndim"):
        return bool(ids.ndim == 1 and np.asarray(ids).dtype != np.object_)
    if not isinstance(ids, Sequence) or isinstance(ids, _NO_LISTS):
        return False
    return all(isinstance(id_, _NUMBERS) for id_ in ids)


def _is_list_of_rows(rows: Any, ndim: int) -> bool:
    if isinstance(rows, Sequence):
        return bool(rows) and not any(np.ndim(row) > ndim or not np.size(row) for row in rows)
    return bool(array_of(rows).ndim != 2 + ndim)


def array_of(numbers: Any) -> npt.NDArray[Any]:
    """`numbers` as an array.

    Raises:
        TypeError: it is a masked array, whose masked items numpy would include; or it is no array.
        ValueError: its rows have different lengths.
    """
    if isinstance(numbers, np.ma.MaskedArray):
        raise TypeError("a masked array: a request has no mask; fill it, or leave out what is masked")
    return np.asarray(numbers)


def _from_tuple(arrays: tuple[Any, ...]) -> JaggedInput:
    if len(arrays) not in (2, 3) or any(isinstance(array, _NUMBERS) for array in arrays):
        raise ValueError(f"a tuple of {len(arrays)}")
    if any(array is None for array in arrays):
        raise ValueError("None for an array")
    return JaggedInput(*arrays)


def _from_mapping(arrays: Mapping[str, Any]) -> JaggedInput:
    if not {"values", "lengths"} <= arrays.keys() <= set(_ARRAYS):
        raise ValueError(f"{list(arrays)}")
    if any(array is None for array in arrays.values()):
        raise ValueError("None for an array")
    return JaggedInput(**arrays)


def _from_bags(bags: Any) -> JaggedInput:
    if isinstance(bags, _NO_LISTS):
        raise ValueError(f"{type(bags).__name__} for a list")
    try:
        kinds = {*map(type, bags)}
        if any(issubclass(kind, _NUMBERS) for kind in kinds):
            raise ValueError("a list that mixes ids and bags")
        lengths = np.fromiter((len(bag) for bag in bags), np.int32, len(bags))
        ids = [*chain.from_iterable(bags)]
    except TypeError as error:
        raise ValueError(f"{type(bags).__name__}: {error}") from error
    for kind in kinds:
        if issubclass(kind, _NO_LISTS):
            raise ValueError(f"{kind.__name__} for a list")
    return JaggedInput(ids, lengths)


def _rows_from_bags(bags: Any) -> JaggedInput:
    bags = bags if isinstance(bags, Sequence) else array_of(bags)
    return JaggedInput([row for bag in bags for row in bag], [len(bag) for bag in bags])


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
        name="a list of ids",
        written="a list of ids, [id, …], one for each sample",
        recognise=is_list_of_ids,
        convert=JaggedInput,
        recognise_rows=_is_list_of_rows,
    ),
    InputForm(
        name="a list of bags",
        written="a list of bags, [[id, …], …]",
        recognise=lambda _: True,
        convert=_from_bags,
        recognise_rows=lambda _, __: True,
        convert_rows=_rows_from_bags,
    ),
)
_EXPECTED = f"expected {', '.join(form.written for form in INPUT_FORMS[:0:-1])}, or {INPUT_FORMS[0].written}"
