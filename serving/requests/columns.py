"""Columns of DataFrames as the arrays of an input: pandas Series, and columns with Arrow's PyCapsule protocol."""

import sys
from collections.abc import Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from serving.requests.arrow_columns import ArrowChunk, read_chunks
from serving.requests.types import Array, Mask

# The types of integers, without bool.
INTEGERS = {int, *(np.dtype(code).type for code in np.typecodes["AllInteger"])}
_WEIGHTED_ID = ("id", "weight")


class JaggedInput(NamedTuple):
    """An input in any form, as arrays or lists that are not checked.

    Attributes:
        values: ids [n], or rows [n, *shape]. Nulls are left out.
        lengths: bag sizes [B]; a null bag is empty. None: the form does not say.
        weights: a weight for each id [n], or None.
        null_sample: the first sample that is null or has a null; None: there is no null.
        lacks_ids: whether null ids are left out of bags.
    """

    values: Any
    lengths: Any = None
    weights: Any = None
    null_sample: int | None = None
    lacks_ids: bool = False


def is_pandas_series(column: Any) -> bool:
    """Whether a column is a pandas Series. pandas is not imported."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(column, pandas.Series)


def arrow_of_series(series: Any) -> Any:
    """The pyarrow column that a pandas Series is stored as. None: it is stored otherwise."""
    return series.array.__arrow_array__() if hasattr(series.dtype, "pyarrow_dtype") else None


def array_of_series(series: Any) -> tuple[Array, Mask | None]:
    """The items of a pandas Series that is not stored in Arrow, and which of them are null; each [B].

    Where items are objects, a null is None. Where they are numpy's floats, NaN is a number. None: no item is null.
    """
    null, dtype = series.isna().to_numpy(), series.dtype
    if hasattr(dtype, "categories"):
        codes, categories = series.cat.codes.to_numpy(), series.cat.categories.to_numpy()
        values: Any = categories[codes] if len(categories) else np.zeros(len(codes), np.int64)
    elif hasattr(dtype, "numpy_dtype"):  # nullable
        values = series.to_numpy(dtype.numpy_dtype, na_value=dtype.numpy_dtype.type(0))
    else:
        values = series.to_numpy()
    if not null.any() or (values.dtype.kind == "f" and values.dtype == dtype):
        return values, None
    if values.dtype == np.object_:
        values = values.copy()
        values[null] = None
    return values, null


def ids_of_array(values: Array, null: Mask | None) -> JaggedInput:
    """Ids of a column with one id for each sample.

    Args:
        values: of any dtype but object, [B].
        null: which of them are null, bool [B]; None: no id is.
    """
    numbers = values.view(np.uint8) if values.dtype == np.bool_ else values
    if null is None:
        return JaggedInput(numbers)
    return JaggedInput(numbers[~null], (~null).astype(np.int32), None, int(np.argmax(null)))


def flattened(bags: Sequence[Any]) -> Any:
    """The items of bags, bag after bag: an array if the bags are arrays of one dtype or all items are integers, or a
    list.
    """
    if {*map(type, bags)} == {np.ndarray}:
        filled = [*compress(bags, map(len, bags))]
        if len({*map(attrgetter("dtype", "ndim"), filled)}) == 1 and filled[0].dtype != np.object_:
            return np.concatenate(filled)
    items = [*chain.from_iterable(bags)]
    return np.asarray(items) if {*map(type, items)} <= INTEGERS else items


def ids_of_arrow(column: Any) -> JaggedInput:
    """Ids of a column: integers, lists of them, or lists of structs of an id and its weight.

    Raises:
        ValueError: it is of another type.
    """
    chunks = [_ids_of_chunk(chunk, column) for chunk in read_chunks(column)]
    return _concatenated(chunks) if chunks else JaggedInput(np.zeros(0, np.int64), np.zeros(0, np.int32))


def numbers_of_arrow(column: Any) -> Array:
    """A column of numbers, or of lists of equally many, as an array [B, *shape].

    Raises:
        ValueError: it is of another type, its lists differ in length, or a sample is null.
    """
    numbers, sample = [], 0
    for chunk in read_chunks(column):
        values, null = _numbers_of_chunk(chunk, column)
        if null is not None:
            raise ValueError(null_in(sample + int(np.argmax(null))))
        numbers.append(values)
        sample += chunk.length
    filled = [values for values in numbers if len(values)] or numbers[:1] or [np.zeros(0)]
    return np.concatenate(filled) if len(filled) > 1 else filled[0]


def rows_of_arrow(column: Any, ndim: int) -> JaggedInput:
    """A column with rows of `ndim` dimensions: a row for each id, or a list of rows for each sample.

    Raises:
        ValueError: as `numbers_of_arrow`; a null list of rows is left out.
    """
    chunks = read_chunks(column)
    if not chunks or _list_levels(chunks[0]) <= ndim:
        return JaggedInput(numbers_of_arrow(column))
    return _concatenated([_rows_of_chunk(chunk, column) for chunk in chunks])


def null_in(sample: int) -> str:
    """What is wrong with a dense input that has a null."""
    return f"got a null in sample {sample}: fill it, or leave the sample out"


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
    return JaggedInput(
        np.concatenate([chunk.values for chunk in chunks]),
        np.concatenate(all_lengths) if has_lengths else None,
        None if chunks[0].weights is None else np.concatenate([chunk.weights for chunk in chunks]),
        nulls[0] if nulls else None,
        any(chunk.lacks_ids for chunk in chunks),
    )


def _ids_of_chunk(chunk: ArrowChunk, column: Any) -> JaggedInput:
    is_list = chunk.lengths is not None
    sizes = np.ones(chunk.length, np.int32) if chunk.lengths is None else chunk.lengths
    items = chunk.children[0] if is_list else chunk
    values, weights, valid = _weighted_ids(items, column)
    if values.dtype == np.bool_:
        values = values.view(np.uint8)
    of_valid = None if chunk.valid is None or not is_list else np.repeat(chunk.valid, sizes)
    if valid is None and of_valid is None:
        return JaggedInput(values, chunk.lengths, weights)
    samples = np.repeat(np.arange(chunk.length), sizes)
    # A null list may have items, which do not count.
    within = np.ones(len(values), np.bool_) if of_valid is None else of_valid
    taken = within if valid is None else within & valid
    nulls = samples[within & ~taken]
    null_samples = nulls[:1].tolist()
    if chunk.valid is not None:
        null_samples.append(int(np.argmin(chunk.valid)))
    return JaggedInput(
        values[taken],
        np.bincount(samples[taken], minlength=chunk.length).astype(np.int32),
        None if weights is None else weights[taken],
        min(null_samples, default=None),
        lacks_ids=is_list and nulls.size > 0,
    )


def _weighted_ids(chunk: ArrowChunk, column: Any) -> tuple[Array, Array | None, Mask | None]:
    """The ids of a chunk, perhaps a weight for each, and which are not null; each [n], or None."""
    if not chunk.children or chunk.lengths is not None:
        values, valid = _items(chunk, column)
        return values, None, valid
    fields = {field.name: field for field in chunk.children}
    if fields.keys() != set(_WEIGHTED_ID):
        raise ValueError(f"a struct of {[*fields]}, where a weighted id has the fields {[*_WEIGHTED_ID]}")
    ids, id_valid = _items(fields["id"], column)
    weights, weight_valid = _items(fields["weight"], column)
    valid = id_valid if chunk.valid is None else chunk.valid & (True if id_valid is None else id_valid)
    if weight_valid is not None and not (weight_valid | (False if valid is None else ~valid)).all():
        raise ValueError("a null for the weight of an id")
    return ids, weights, valid


def _items(chunk: ArrowChunk, column: Any) -> tuple[Array, Mask | None]:
    """The numbers of a chunk, and which are not null; each [n]. Of a dictionary, those that its indices name."""
    if chunk.values is None:
        kind = getattr(column, "type", getattr(column, "dtype", "another type"))
        raise ValueError(f"{type(column).__name__} of {kind}")
    if chunk.dictionary is None:
        return chunk.values, chunk.valid
    words, valid_words = _items(chunk.dictionary, column)
    if not len(words):
        return np.zeros(chunk.length, np.int64), chunk.valid
    indices = chunk.values if chunk.valid is None else np.where(chunk.valid, chunk.values, 0)
    if valid_words is None:
        return words[indices], chunk.valid
    valid = valid_words[indices]
    return words[indices], valid if chunk.valid is None else valid & chunk.valid


def _numbers_of_chunk(chunk: ArrowChunk, column: Any) -> tuple[Array, Mask | None]:
    """Numbers [length, *shape], and which rows have a null; bool [length], or None."""
    if chunk.lengths is None:
        values, valid = _items(chunk, column)
        return values, None if valid is None else ~valid
    items, null_items = _numbers_of_chunk(chunk.children[0], column)
    width = int(chunk.lengths[0]) if chunk.length else 0
    differs = chunk.lengths != width
    if differs.any():
        if chunk.valid is not None:
            raise ValueError(null_in(int(np.argmin(chunk.valid))))
        sample = int(np.argmax(differs))
        raise ValueError(
            f"expected lists of one length, got {width} numbers in sample 0 and {chunk.lengths[sample]} in {sample}"
        )
    null = None if chunk.valid is None else ~chunk.valid
    if null_items is not None:
        null_rows: Any = null_items.reshape(chunk.length, width).any(axis=1)
        null = null_rows if null is None else null | null_rows
    return items.reshape(chunk.length, width, *items.shape[1:]), null


def _rows_of_chunk(chunk: ArrowChunk, column: Any) -> JaggedInput:
    rows, null = _numbers_of_chunk(chunk.children[0], column)
    lengths: Any = chunk.lengths
    sample = None
    if chunk.valid is not None:
        taken = np.repeat(chunk.valid, lengths)
        rows, null = rows[taken], None if null is None else null[taken]
        lengths, sample = np.where(chunk.valid, lengths, 0), int(np.argmin(chunk.valid))
    if null is not None and null.any():
        raise ValueError(null_in(int(np.repeat(np.arange(chunk.length), lengths)[np.argmax(null)])))
    return JaggedInput(rows, lengths, None, sample)


def _list_levels(chunk: ArrowChunk) -> int:
    return 0 if chunk.lengths is None else 1 + _list_levels(chunk.children[0])
