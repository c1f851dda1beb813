"""Columns of DataFrames as the arrays of an input: pandas Series, and columns with Arrow's PyCapsule protocol."""

import sys
from collections.abc import Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from serving.requests.arrow_columns import ArrowChunk, DamagedColumn, read_chunks
from serving.requests.objects import INTEGERS, plain
from serving.requests.types import Array, Lengths, Mask

# The fields of a struct that is an id with its weight.
WEIGHTED_ID = ("id", "weight")


class JaggedInput(NamedTuple):
    """An input in any form, as arrays or lists that are not checked.

    Attributes:
        values: ids [n], or rows [n, *shape], without nulls.
        lengths: bag sizes [B], 0 for a null bag. None: the form has no bag sizes.
        weights: a weight for each id [n], or None.
        null_sample: the first sample that is null or has a null, or None.
        sizes: bag sizes with null ids [B], or None if no id is null.
        present: which ids of the bags are not null, bool [sum of sizes], or None if no id is null.
    """

    values: Any
    lengths: Any = None
    weights: Any = None
    null_sample: int | None = None
    sizes: Any = None
    present: Mask | None = None


class WrongItem(ValueError):
    """A row of a dense input, or a sample, is null, is not made of numbers, or differs in shape from the first one.

    Attributes:
        item: the number of the row or sample.
        problem: what is wrong with it.
        hint: advice for the message.
        unit: "row" or "sample".
    """

    def __init__(self, item: int, problem: str, hint: str = "", unit: Literal["row", "sample"] = "row") -> None:
        super().__init__(f"got {problem} in {unit} {item}{hint}")
        self.item, self.problem, self.hint, self.unit = item, problem, hint, unit

    @classmethod
    def null(cls, item: int) -> Self:
        """The error for a null, or a row with a null."""
        return cls(item, "a null", ": fill it, or leave the sample out")

    @classmethod
    def shape(cls, item: int, shape: Sequence[int], expected: Sequence[int]) -> Self:
        """The error for a row with another shape than the first one."""
        return cls(item, f"the shape {[*shape]}", f", where the first row has {[*expected]}")

    def moved(self, item: int, unit: Literal["row", "sample"] = "row") -> "WrongItem":
        """The same error with another number and unit."""
        return WrongItem(item, self.problem, self.hint, unit)

    def in_bags(self, lengths: Lengths) -> "WrongItem":
        """The same error for the sample whose bag has the row, if a bag has it."""
        sample = int(np.searchsorted(np.cumsum(lengths), self.item, "right"))
        return self.moved(sample, "sample") if self.unit == "row" and sample < len(lengths) else self


class WrongType(ValueError):
    """A column has neither numbers nor lists of numbers."""


class WrongWeights(ValueError):
    """The weights do not match the ids, although both have a valid form."""


def is_pandas_series(column: Any) -> bool:
    """Whether a column is a pandas Series. pandas is not imported."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(column, pandas.Series)


def arrow_of_series(series: Any) -> Any:
    """The pyarrow column of a pandas Series that is stored in Arrow, or None."""
    return series.array.__arrow_array__() if hasattr(series.dtype, "pyarrow_dtype") else None


def items_of_series(series: Any) -> tuple[Any, Mask | None]:
    """The items of a pandas Series that is not stored in Arrow, and which of them are null; each [B].

    Objects are a list with None for nulls, as `plain` returns it for one level. In a Series of numpy floats, NaN is a
    number. The second result is None if no item is null.
    """
    null, dtype = series.isna().to_numpy(), series.dtype
    if hasattr(dtype, "categories"):
        codes, categories = series.cat.codes.to_numpy(), series.cat.categories.to_numpy()
        values: Any = categories[codes] if len(categories) else np.zeros(len(codes), np.int64)
    elif hasattr(dtype, "numpy_dtype"):  # nullable
        values = series.to_numpy(dtype.numpy_dtype, na_value=dtype.numpy_dtype.type(0))
    else:
        values = series.to_numpy()
    if values.dtype == np.object_:
        if null.any():
            values = values.copy()
            values[null] = None
        return plain(values, 1), None
    return values, None if not null.any() or (values.dtype.kind == "f" and values.dtype == dtype) else null


def ids_of_array(values: Array, null: Mask | None) -> JaggedInput:
    """Ids of a column with one id for each sample.

    Args:
        values: ids of any dtype but object, [B].
        null: which of them are null, bool [B], or None if no id is null.
    """
    numbers = values.view(np.uint8) if values.dtype == np.bool_ else values
    if null is None:
        return JaggedInput(numbers)
    return without_null_ids(numbers[~null], np.ones(len(null), np.int32), ~null)


def ids_of_dicts(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Ids and weights from dicts of both, which pandas makes of lists of structs. None is a null.

    Raises:
        ValueError: an item is not such a dict, or an id has no weight.
    """
    for item in items:
        if item is not None and (not isinstance(item, Mapping) or item.keys() != {*WEIGHTED_ID}):
            got = f"a dict of {[*item]}" if isinstance(item, Mapping) else f"{type(item).__name__} beside dicts"
            raise ValueError(f"{got}, where a weighted id has the keys {[*WEIGHTED_ID]}")
    ids, weights = ([None if item is None else item[key] for item in items] for key in WEIGHTED_ID)
    if any(weight is None and id_ is not None for id_, weight in zip(ids, weights, strict=True)):
        raise WrongWeights("a null for the weight of an id")
    return ids, weights


def sizes_of_bags(bags: JaggedInput) -> Any:
    """Bag sizes with null ids [B]."""
    sizes = bags.lengths if bags.sizes is None else bags.sizes
    return np.ones(len(bags.values), np.int32) if sizes is None else np.asarray(sizes)


def without_null_ids(values: Any, sizes: Lengths, present: Mask, null_bag: int | None = None) -> JaggedInput:
    """Bags without their null ids.

    Args:
        values: the ids that are not null.
        sizes: bag sizes with null ids [B].
        present: which ids are not null, bool [sum of sizes].
        null_bag: the first bag that is null.
    """
    samples = np.repeat(np.arange(len(sizes)), sizes)
    null_samples = [*samples[~present][:1].tolist(), *([] if null_bag is None else [null_bag])]
    lengths = np.bincount(samples[present], minlength=len(sizes)).astype(np.int32)
    return JaggedInput(values, lengths, None, min(null_samples, default=None), sizes, present)


def flattened(bags: Sequence[Any]) -> Any:
    """The items of bags, bag after bag.

    They are an array if the bags are arrays of one dtype or all items are integers, or else a list.
    """
    if {*map(type, bags)} == {np.ndarray}:
        filled = [*compress(bags, map(len, bags))]
        if len({*map(attrgetter("dtype", "ndim"), filled)}) == 1 and filled[0].dtype != np.object_:
            return np.concatenate(filled)
    items = [*chain.from_iterable(bags)]
    if not {*map(type, items)} <= INTEGERS:
        return plain(items)
    array = np.asarray(items)
    return array if array.dtype.kind in "iu" else items  # numpy has no dtype for an int64 beside a uint64


def ids_of_arrow(column: Any) -> JaggedInput:
    """Ids of a column: integers, lists of them, or lists of structs of an id and its weight.

    Raises:
        ValueError: the column has another type.
    """
    chunks = [_ids_of_chunk(chunk, column) for chunk in read_chunks(column)]
    return _concatenated(chunks) if chunks else JaggedInput(np.zeros(0, np.int64), np.zeros(0, np.int32))


def numbers_of_arrow(column: Any) -> Array:
    """A column of numbers, or of lists of equally many, as an array [B, *shape].

    Raises:
        ValueError: the column has another type; `WrongItem`: its lists differ in length, or a row is null.
    """
    return _numbers_of_chunks(read_chunks(column), column)


def rows_of_arrow(column: Any, ndim: int) -> JaggedInput:
    """A column with rows of `ndim` dimensions: a row for each id, or a list of rows for each sample.

    Raises:
        ValueError: as for `numbers_of_arrow`, but null lists of rows are left out.
    """
    chunks = read_chunks(column)
    if not chunks or _list_levels(chunks[0]) <= ndim:
        return JaggedInput(_numbers_of_chunks(chunks, column))
    lengths = np.concatenate([chunk.lengths for chunk in chunks if chunk.lengths is not None])
    valid = np.concatenate([_validity(chunk) for chunk in chunks])
    try:
        rows = _numbers_of_chunks([chunk.children[0] for chunk in chunks], column)
    except WrongItem as error:
        raise error.in_bags(lengths) from error
    return JaggedInput(rows, lengths, None, None if valid.all() else int(np.argmin(valid)))


def _concatenated(chunks: Sequence[JaggedInput]) -> JaggedInput:
    if len(chunks) == 1:
        return chunks[0]
    all_lengths = [
        np.ones(len(chunk.values), np.int32) if chunk.lengths is None else chunk.lengths for chunk in chunks
    ]
    samples = np.cumsum([0, *map(len, all_lengths)])
    nulls = [
        int(first) + chunk.null_sample
        for first, chunk in zip(samples[:-1], chunks, strict=True)
        if chunk.null_sample is not None
    ]
    has_lengths = any(chunk.lengths is not None for chunk in chunks)
    has_null_ids = any(chunk.present is not None for chunk in chunks)
    sizes = [
        lengths if chunk.sizes is None else chunk.sizes for chunk, lengths in zip(chunks, all_lengths, strict=True)
    ]
    present = [np.ones(len(chunk.values), np.bool_) if chunk.present is None else chunk.present for chunk in chunks]
    return JaggedInput(
        np.concatenate([chunk.values for chunk in chunks]),
        np.concatenate(all_lengths) if has_lengths else None,
        None if chunks[0].weights is None else np.concatenate([chunk.weights for chunk in chunks]),
        nulls[0] if nulls else None,
        np.concatenate(sizes) if has_null_ids else None,
        np.concatenate(present) if has_null_ids else None,
    )


def _ids_of_chunk(chunk: ArrowChunk, column: Any) -> JaggedInput:
    is_list = chunk.lengths is not None
    values, weights, valid = _weighted_ids(chunk.children[0] if is_list else chunk, column)
    if values.dtype == np.bool_:
        values = values.view(np.uint8)
    null_bag = None if chunk.valid is None or not is_list else int(np.argmin(chunk.valid))
    if valid is None:
        return JaggedInput(values, chunk.lengths, weights, null_bag)
    sizes: Any = chunk.lengths if is_list else np.ones(chunk.length, np.int32)
    jagged = without_null_ids(values[valid], sizes, valid, null_bag)
    return jagged if weights is None else jagged._replace(weights=weights[valid])


def _weighted_ids(chunk: ArrowChunk, column: Any) -> tuple[Array, Array | None, Mask | None]:
    """The ids of a chunk, perhaps a weight for each, and which are not null; each [n], or None."""
    if not chunk.children or chunk.lengths is not None:
        values, valid = _items(chunk, column)
        return values, None, valid
    fields = {field.name: field for field in chunk.children}
    if fields.keys() != set(WEIGHTED_ID):
        if not _validity(chunk).any():
            return np.zeros(chunk.length, np.int64), None, chunk.valid
        raise ValueError(f"a struct of {[*fields]}, where a weighted id has the fields {[*WEIGHTED_ID]}")
    ids, id_valid = _items(fields["id"], column)
    weights, weight_valid = _items(fields["weight"], column)
    valid = id_valid if chunk.valid is None else chunk.valid & (True if id_valid is None else id_valid)
    if weight_valid is not None and not (weight_valid | (False if valid is None else ~valid)).all():
        raise WrongWeights("a null for the weight of an id")
    return ids, weights, valid


def _items(chunk: ArrowChunk, column: Any) -> tuple[Array, Mask | None]:
    """The numbers of a chunk, and which are not null; each [n]. A dictionary is decoded."""
    if chunk.values is None:
        if not _validity(chunk).any():
            return np.zeros(chunk.length, np.int64), chunk.valid
        kind = getattr(column, "type", getattr(column, "dtype", "another type"))
        raise WrongType(f"{type(column).__name__} of {kind}")
    if chunk.dictionary is None:
        return chunk.values, chunk.valid
    words, valid_words = _items(chunk.dictionary, column)
    present = chunk.values if chunk.valid is None else chunk.values[chunk.valid]
    if not len(present):
        return np.zeros(chunk.length, words.dtype), chunk.valid
    if present.min() < 0 or present.max() >= len(words):
        raise DamagedColumn(f"indices that are not within the {len(words)} values of its dictionary")
    indices = chunk.values if chunk.valid is None else np.where(chunk.valid, chunk.values, 0)
    if valid_words is None:
        return words[indices], chunk.valid
    valid = valid_words[indices]
    return words[indices], valid if chunk.valid is None else valid & chunk.valid


def _numbers_of_chunks(chunks: Sequence[ArrowChunk], column: Any) -> Array:
    """Numbers of chunks, without nulls, [rows, *shape].

    Raises:
        WrongItem: a row is null, has a null, or has another shape than the first; counted over all chunks.
    """
    numbers: list[Array] = []
    first = 0
    for chunk in chunks:
        try:
            values = _numbers_of_chunk(chunk, column, numbers[0].shape[1:] if numbers else ())
        except WrongItem as error:
            raise error.moved(first + error.item) from error
        if len(values) or len(chunks) == 1:
            numbers.append(values)
        first += chunk.length
    return np.concatenate(numbers or [np.zeros(0)]) if len(numbers) != 1 else numbers[0]


def _numbers_of_chunk(chunk: ArrowChunk, column: Any, shape: Sequence[int]) -> Array:
    """Numbers [length, *shape]. Without a `shape`, the first row's shape."""
    if chunk.lengths is None:
        values, valid = _items(chunk, column)
        if valid is not None:
            raise WrongItem.null(int(np.argmin(valid)))
        return values
    wrong = [] if chunk.valid is None else [WrongItem.null(int(np.argmin(chunk.valid)))]
    try:
        items = _numbers_of_chunk(chunk.children[0], column, shape[1:])
    except WrongItem as error:
        wrong.append(error.moved(error.in_bags(chunk.lengths).item))
    if wrong:
        raise min(wrong, key=attrgetter("item"))
    width = shape[0] if shape else int(chunk.lengths[0]) if chunk.length else 0
    if (differs := chunk.lengths != width).any():
        row = int(np.argmax(differs))
        raise WrongItem.shape(row, [int(chunk.lengths[row])], [width])
    return items.reshape(chunk.length, width, *items.shape[1:])


def _validity(chunk: ArrowChunk) -> Mask:
    return np.ones(chunk.length, np.bool_) if chunk.valid is None else chunk.valid


def _list_levels(chunk: ArrowChunk) -> int:
    return 0 if chunk.lengths is None else 1 + _list_levels(chunk.children[0])
