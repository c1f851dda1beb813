"""A refusal of rows or ids names the sample that is wrong, in whatever form and chunks they are."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serving.bundle.scores import DenseInput
from serving.errors import InvalidRequest
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode


def objects(items: list[Any]) -> Any:
    array = np.empty(len(items), object)
    array[:] = items
    return array


def arrow_type(depth: int, make: Callable[[Any], Any]) -> Any:
    return pa.int32() if depth == 0 else make(arrow_type(depth - 1, make))


def in_chunks(items: list[Any], kind: Any, bounds: list[int]) -> Any:
    """Slices of longer arrays, so that each chunk begins at an offset."""
    edges = [0, *bounds, len(items)]
    chunks = [pa.array([None, *items[first:last]], kind)[1:] for first, last in pairwise(edges)]
    return pa.chunked_array(chunks, kind)


def polars_in_chunks(items: list[Any], depth: int, bounds: list[int]) -> Any:
    kind: Any = pl.Int32
    for _ in range(depth):
        kind = pl.List(kind)
    edges = [0, *bounds, len(items)]
    series = pl.Series([], dtype=kind)
    for first, last in pairwise(edges):
        series.append(pl.Series([None, *items[first:last]], dtype=kind)[1:])
    return series


# A column of items, which are numbers or lists of so many dimensions, and bounds of chunks.
FORMS: dict[str, Callable[[list[Any], int, list[int]], Any]] = {
    "a list": lambda items, *_: items,
    "numpy of objects": lambda items, *_: objects(items),
    "pandas of objects": lambda items, *_: pd.Series(objects(items), dtype=object),
    "pyarrow list": lambda items, depth, bounds: in_chunks(items, arrow_type(depth, pa.list_), bounds),
    "pyarrow large_list": lambda items, depth, bounds: in_chunks(items, arrow_type(depth, pa.large_list), bounds),
    "pyarrow list_view": lambda items, depth, bounds: in_chunks(items, arrow_type(depth, pa.list_view), bounds),
    "pandas of Arrow": lambda items, depth, bounds: pd.Series(
        in_chunks(items, arrow_type(depth, pa.list_), bounds).to_pandas(types_mapper=pd.ArrowDtype)
        if depth == 0
        else pd.arrays.ArrowExtensionArray(in_chunks(items, arrow_type(depth, pa.list_), bounds))
    ),
    "polars": polars_in_chunks,
}


@st.composite
def bounds_of_chunks(draw: Any, items: int) -> list[int]:
    return sorted(draw(st.lists(st.integers(0, items), max_size=3)))


def expect_sample(sample: int, dense_input: DenseInput, column: Any, lengths: list[int], nulls: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^dense input 'x': expected numbers: ") as refused:
        encode_dense([dense_input], {"x": column}, {"key": np.array(lengths, np.int32)}, nulls=nulls)
    assert f" in sample {sample}" in str(refused.value)
    assert str(refused.value).count("sample") == 1 + str(refused.value).count("leave the sample out")


def wrong(row: Any, kind: str) -> Any:
    """A row that is wrong, in place of a row."""
    if kind == "null" or not isinstance(row, list):
        return None
    return [*row[:-1], None] if kind == "has a null" else [*row, 7]


@pytest.mark.parametrize("kind", ["null", "has a null", "another shape"])
@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_wrong_rows_in_bags_and_flat_name_their_sample(form: str, kind: str, data: Any) -> None:
    shape = data.draw(st.sampled_from([(), (2,)] if kind == "null" else [(2,)]))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    assume(sum(lengths) > 1)
    row = data.draw(st.integers(1, sum(lengths) - 1))
    rows: list[Any] = [[number, 5] if shape else number for number in range(sum(lengths))]
    rows[row] = wrong(rows[row], kind)
    ends = np.cumsum(lengths)
    sample = int(np.searchsorted(ends, row, "right"))
    dense_input = DenseInput("x", shape, key="key")
    column = FORMS[form](rows, len(shape), data.draw(bounds_of_chunks(len(rows))))
    expect_sample(sample, dense_input, column, lengths, "refuse")
    bags: list[Any] = [rows[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    # A null list beside it, which is an empty one.
    empty = [number for number, length in enumerate(lengths) if not length]
    if nulls := data.draw(st.booleans()) and empty != []:
        bags[empty[0]] = None
    column = FORMS[form](bags, 1 + len(shape), data.draw(bounds_of_chunks(len(bags))))
    expect_sample(sample, dense_input, column, lengths, "empty" if nulls else "refuse")


@pytest.mark.parametrize("kind", ["null", "has a null", "another shape"])
@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_wrong_rows_of_samples_name_their_sample(form: str, kind: str, data: Any) -> None:
    shape = data.draw(st.sampled_from([(), (2,), (1, 2)] if kind == "null" else [(2,), (1, 2)]))
    samples = data.draw(st.integers(2, 6))
    sample = data.draw(st.integers(1, samples - 1))
    rows: list[Any] = [[number, 5] if shape else number for number in range(samples)]
    rows[sample] = wrong(rows[sample], kind)
    if len(shape) == 2:
        rows = [[row] for row in rows]
    column = FORMS[form](rows, len(shape), data.draw(bounds_of_chunks(len(rows))))
    expect_sample(sample, DenseInput("x", shape), column, [1] * samples, "refuse")


@pytest.mark.parametrize("is_in_bags", [False, True])
@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_null_ids_name_their_sample(form: str, is_in_bags: bool, data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(0, 3) if is_in_bags else st.just(1), min_size=1, max_size=6))
    ids: list[Any] = [[*range(length)] if is_in_bags else 3 for length in lengths]
    assume(any(item not in (None, []) for item in ids))  # of nulls alone, no form is known
    sample = data.draw(st.integers(0, len(ids) - 1))
    if is_in_bags and data.draw(st.booleans()):
        ids[sample] = [*ids[sample], None]
    else:
        ids[sample] = None
    column = FORMS[form](ids, int(is_in_bags), data.draw(bounds_of_chunks(len(ids))))
    with pytest.raises(InvalidRequest, match=f"feature 'a': expected no nulls, got one in sample {sample}: "):
        encode({"a": column})


@pytest.mark.parametrize(
    ("shape", "column", "wrong"),
    [
        ((), [[7], 8, [9]], "int for a list of rows in sample 1"),
        ((), [[7], ["a"]], "str in sample 1"),
        ((2,), [[[1, 2]], [[3, [4]]]], "lists of different lengths in sample 1"),
        ((2,), [[[1, 2]], [[3, 4, 5]]], r"the shape \[3\] in sample 1, where the first row has \[2\]"),
        ((), pd.Series([7, None], dtype="Int64"), "a null in sample 1: fill it, or leave the sample out"),
    ],
)
def test_other_wrong_rows_name_their_sample(shape: tuple[int, ...], column: Any, wrong: str) -> None:
    dense_input = DenseInput("x", shape, key="key")
    with pytest.raises(InvalidRequest, match=f"dense input 'x': expected numbers: got {wrong}"):
        encode_dense([dense_input], {"x": column}, {"key": np.ones(2, np.int32)}, nulls="empty")


def test_rows_beyond_the_bags_of_their_ids_are_named() -> None:
    rows: Any = [7, None]
    for lengths in ({}, {"key": np.array([1], np.int32)}):
        with pytest.raises(InvalidRequest, match="got a null in row 1: fill it"):
            encode_dense([DenseInput("x", (), key="key")], {"x": rows}, lengths)
