"""Columns of pandas, polars and pyarrow give the request that nested lists give."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.compute import run_end_encode

from serving.bundle.scores import DenseInput, InputDtype
from serving.errors import InvalidRequest
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode
from serving.requests.types import Tensors

INTEGERS = {
    name: (np.iinfo(name).min, min(np.iinfo(name).max, 2**63 - 1))
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}


def arrow_type(name: str) -> Any:
    return pa.type_for_alias(name)


def polars_type(name: str) -> Any:
    return getattr(pl, name.replace("int", "Int").replace("uInt", "UInt"))


def of_dictionary(lists: Any) -> Any:
    items = lists.values.dictionary_encode()
    return pa.ListArray.from_arrays(lists.offsets, items, mask=lists.is_null())


def in_runs(items: Any) -> Any:
    """A run for each item, the first one longer. Its other samples are not shown."""
    ends = np.arange(3, 3 + len(items), dtype=np.int32)
    return pa.RunEndEncodedArray.from_arrays(ends, items).slice(2) if len(items) else items


def in_chunks(column: Any, sizes: list[int]) -> Any:
    """A pyarrow Array in chunks, each a slice of a longer array; perhaps with empty ones among them."""
    bounds = [0, *np.cumsum(sizes).tolist(), len(column)]
    slices = [column.slice(first, last - first) for first, last in pairwise(bounds)]
    return pa.chunked_array(slices, column.type)


# A column of `bags`, which are lists of ids, or None. Each has an Arrow type of ids, or numpy's name for one.
COLUMNS_OF_BAGS: dict[str, Callable[[list[Any], str], Any]] = {
    "pyarrow list": lambda bags, name: pa.array(bags, pa.list_(arrow_type(name))),
    "pyarrow large_list": lambda bags, name: pa.array(bags, pa.large_list(arrow_type(name))),
    "pyarrow list_view": lambda bags, name: pa.array(bags, pa.list_view(arrow_type(name))),
    "pyarrow large_list_view": lambda bags, name: pa.array(bags, pa.large_list_view(arrow_type(name))),
    "pyarrow lists of a dictionary": lambda bags, name: of_dictionary(pa.array(bags, pa.list_(arrow_type(name)))),
    "pyarrow runs of lists": lambda bags, name: in_runs(pa.array(bags, pa.list_(arrow_type(name)))),
    "polars List": lambda bags, name: pl.Series(bags, dtype=pl.List(polars_type(name))),
    "pandas of Arrow": lambda bags, name: pd.Series(bags, dtype=pd.ArrowDtype(pa.list_(arrow_type(name)))),
    "pandas of lists": lambda bags, _: pd.Series([None, *bags], dtype=object).iloc[1:],
    "pandas of arrays": lambda bags, name: pd.Series(
        [None if bag is None else np.array(bag, object if None in bag else name) for bag in bags], dtype=object
    ),
    "numpy of lists": lambda bags, _: pd.Series(bags, dtype=object).to_numpy(),
}
# A column of `ids`, which are ids, or None.
COLUMNS_OF_IDS: dict[str, Callable[[list[Any], str], Any]] = {
    "pyarrow": lambda ids, name: pa.array(ids, arrow_type(name)),
    "pyarrow dictionary": lambda ids, name: pa.array(ids, arrow_type(name)).dictionary_encode(),
    "pyarrow dictionary with nulls": lambda ids, name: pa.array(ids, arrow_type(name)).dictionary_encode("encode"),
    "pyarrow runs": lambda ids, name: run_end_encode(pa.array(ids, arrow_type(name)), run_end_type=pa.int16()),
    "polars": lambda ids, name: pl.Series(ids, dtype=polars_type(name)),
    "pandas of Arrow": lambda ids, name: pd.Series(ids, dtype=pd.ArrowDtype(arrow_type(name))),
    "pandas nullable": lambda ids, name: pd.Series(ids, dtype=name.replace("int", "Int").replace("uInt", "UInt")),
    "pandas categories": lambda ids, name: pd.Series(pd.array(ids, name.title().replace("Uint", "UInt"))).astype("category"),
    "pandas of objects": lambda ids, _: pd.Series(ids, dtype=object),
    "numpy of objects": lambda ids, _: np.array(ids, object),
}  # fmt: skip


def slices_of(draw: Any, column: Any) -> tuple[Any, slice]:
    """A slice of a column, perhaps in chunks, and which samples it has."""
    first = draw(st.integers(0, len(column)))
    last = draw(st.integers(first, len(column)))
    if isinstance(column, pa.Array):
        sizes = draw(st.lists(st.integers(0, 2), max_size=3).filter(lambda sizes: sum(sizes) <= last - first))
        part = column.slice(first, last - first)
        return (in_chunks(part, sizes) if sizes else part), slice(first, last)
    if isinstance(column, pl.Series) and draw(st.booleans()):
        middle = (first + last) // 2  # append makes a chunk
        return column[first:middle].append(column[middle:last]), slice(first, last)
    part = column.iloc[first:last] if isinstance(column, pd.Series) else column[first:last]
    return part, slice(first, last)


def expect_same(column: Any, lists: list[Any]) -> None:
    """As nested lists are answered: the same request, and the same refusal of the first null."""
    expect_equal(encode({"a": column}, nulls="empty"), encode({"a": lists}, nulls="empty"))
    first_null = next((sample for sample, bag in enumerate(lists) if bag is None or None in bag), None)
    if first_null is None:
        expect_equal(encode({"a": column}), encode({"a": lists}))
    else:
        with pytest.raises(InvalidRequest, match=f"expected no nulls, got one in sample {first_null}: fill it"):
            encode({"a": column})


def expect_equal(tensors: Tensors, expected: Tensors) -> None:
    assert tensors.values.dtype == np.int64
    assert tensors.lengths.dtype == np.int32
    assert tensors.values.tolist() == expected.values.tolist()
    assert tensors.lengths.tolist() == expected.lengths.tolist()
    if expected.weights is None:
        assert tensors.weights is None
    else:
        assert tensors.weights is not None
        assert tensors.weights.dtype == np.float32
        assert tensors.weights.tolist() == expected.weights.tolist()


@pytest.mark.parametrize("form", COLUMNS_OF_BAGS)
@given(data=st.data())
def test_a_column_of_bags_is_nested_lists(form: str, data: Any) -> None:
    name = data.draw(st.sampled_from([*INTEGERS]))
    ids = st.integers(*INTEGERS[name])
    nullable = data.draw(st.booleans())
    bags = data.draw(
        st.lists(st.none() | st.lists(st.none() | ids, max_size=4))
        if nullable
        else st.lists(st.lists(ids, max_size=4))
    )
    column, part = slices_of(data.draw, COLUMNS_OF_BAGS[form](bags, name))
    expect_same(column, bags[part])


@pytest.mark.parametrize("form", COLUMNS_OF_IDS)
@given(data=st.data())
def test_a_column_of_ids_is_a_list_of_ids(form: str, data: Any) -> None:
    name = data.draw(st.sampled_from([*INTEGERS]))
    ids = st.integers(*INTEGERS[name])
    numbers = data.draw(st.lists(st.none() | ids if data.draw(st.booleans()) else ids))
    column, part = slices_of(data.draw, COLUMNS_OF_IDS[form](numbers, name))
    expect_same(column, [[None] if number is None else [number] for number in numbers[part]])


@pytest.mark.parametrize("make", [
    pytest.param(lambda rows, width: pa.array(rows, pa.list_(pa.int32(), width)), id="pyarrow"),
    pytest.param(lambda rows, width: pl.Series(rows, dtype=pl.Array(pl.Int32, width)), id="polars"),
    pytest.param(lambda rows, width: pd.Series(rows, dtype=pd.ArrowDtype(pa.list_(pa.int32(), width))), id="pandas"),
])  # fmt: skip
@given(data=st.data())
def test_a_column_of_lists_of_one_size_is_nested_lists(make: Any, data: Any) -> None:
    width = data.draw(st.integers(1, 3))
    row = st.lists(st.none() | st.integers(0, 99), min_size=width, max_size=width)
    rows = data.draw(st.lists(st.none() | row))
    column, part = slices_of(data.draw, make(rows, width))
    expect_same(column, rows[part])


WEIGHTED = pa.struct([("weight", pa.float64()), ("id", pa.int32())])


@pytest.mark.parametrize("make", [
    pytest.param(lambda bags: pa.array(bags, pa.list_(WEIGHTED)), id="pyarrow"),
    pytest.param(lambda bags: pl.Series(bags, dtype=pl.List(pl.Struct({"id": pl.Int32, "weight": pl.Float64}))), id="polars"),
    pytest.param(lambda bags: pd.Series(bags, dtype=pd.ArrowDtype(pa.large_list(WEIGHTED))), id="pandas"),
    pytest.param(lambda bags: pd.Series(bags, dtype=object), id="dicts in pandas"),
    pytest.param(lambda bags: pa.array(bags, pa.list_(WEIGHTED)).to_pandas(), id="arrays of dicts in pandas"),
    pytest.param(lambda bags: bags, id="dicts in lists"),
])  # fmt: skip
@given(data=st.data())
def test_lists_of_structs_are_weighted_bags(make: Any, data: Any) -> None:
    weight = st.floats(-9, 9, width=32)
    bags = data.draw(st.lists(st.none() | st.lists(st.none() | st.tuples(st.integers(0, 99), weight), max_size=3)))
    structs = [bag and [pair and {"id": pair[0], "weight": pair[1]} for pair in bag] for bag in bags]
    column, part = slices_of(data.draw, make(structs))
    tensors = encode({"a": column}, "a", nulls="empty")
    present = [[pair for pair in bag or () if pair is not None] for bag in bags[part]]
    expected = {
        "values": [[id_ for id_, _ in bag] for bag in present],
        "weights": [[weight for _, weight in bag] for bag in present],
    }
    expect_equal(tensors, encode({"a": expected}, "a"))


def test_a_struct_for_each_sample_is_an_id_with_its_weight() -> None:
    tensors = encode({"a": pa.array([{"id": 3, "weight": 0.5}, {"id": 5, "weight": 2.0}], WEIGHTED)}, "a")
    assert (tensors.values.tolist(), tensors.lengths.tolist()) == ([3, 5], [1, 1])
    assert tensors.weights is not None
    assert tensors.weights.tolist() == [0.5, 2.0]


def test_two_columns_are_ids_and_their_weights() -> None:
    for ids, weights in (
        (pl.Series([[3, 5], [], None]), pl.Series([[0.5, 2.0], [], None], dtype=pl.List(pl.Float32))),
        (pa.array([[3, 5], [], None]), pd.Series([[0.5, 2.0], [], None])),
    ):
        tensors = encode({"a": {"values": ids, "weights": weights}}, "a", nulls="empty")
        assert tensors.lengths.tolist() == [2, 0, 0]
        assert tensors.weights is not None
        assert tensors.weights.tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([True, False, True]),
        pa.array([True, None, True, False, True]).slice(2),
        pl.Series([True, False, True]),
        pd.Series([True, False, True]),
        pd.Series([True, False, True], dtype="boolean"),
        pd.Series([True, False, np.True_], dtype=object),
        pd.Series([[True], [False], [True]]),
        pd.Series([np.array([True]), np.array([False, True])[:1], np.array([True])]),
        pd.Series([True, False, True], dtype=pd.ArrowDtype(pa.bool_())),
        pa.array([[True], [False], [True]]),
    ],
    ids=lambda column: f"{type(column).__module__} {getattr(column, 'type', getattr(column, 'dtype', ''))}",
)
def test_booleans_of_a_column_are_the_ids_0_and_1(column: Any) -> None:
    expect_equal(encode({"a": column}), encode({"a": [1, 0, 1]}))


@pytest.mark.parametrize(
    "column",
    [
        pa.chunked_array([], pa.list_(pa.int64())),
        pa.chunked_array([], pa.int64()),
        pa.array([], pa.int8()),
        pa.array([], pa.large_list(pa.int8())),
        pa.array([], pa.null()),
        pa.array([], pa.string()),
        pa.chunked_array([pa.array([], pa.list_(pa.float32()))]),
        pa.array([], pa.struct([("key", pa.int64())])),
        pa.array([], pa.timestamp("s")),
        pl.Series([], dtype=pl.String),
        pd.Series([], dtype="datetime64[s]"),
        pd.Series([], dtype="str"),
        pd.Series([], dtype="float64"),
        pl.Series([], dtype=pl.List(pl.Int64)),
        pl.Series([], dtype=pl.Int8),
        pd.Series([], dtype=object),
        pd.Series([], dtype="Int64"),
        pd.Series([], dtype="category"),
        np.array([], object),
    ],
    ids=lambda column: f"{type(column).__module__} {getattr(column, 'type', getattr(column, 'dtype', ''))}",
)  # fmt: skip
def test_an_empty_column_has_no_samples(column: Any) -> None:
    expect_equal(encode({"a": column}), encode({"a": []}))


def test_values_under_a_null_list_are_ignored() -> None:
    """Arrow lets a null list have items."""
    null = pa.array([False, True, False])
    items = pa.array([3, 5, 7, 9, 11, 13])
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 5, 6], pa.int32()), items, mask=null)
    pairs = pa.FixedSizeListArray.from_arrays(items, 2, mask=null)
    for column, bags in ((lists, [[3, 5], None, [13]]), (pairs, [[3, 5], None, [11, 13]])):
        expect_same(column, bags)
        lengths = {"seen": np.array([len(bag or []) for bag in bags], np.int32)}
        encoded = encode_dense([TIMES], {"times": column}, lengths, nulls="empty")["times"]
        assert encoded.tolist() == [id_ for bag in bags for id_ in bag or []]


def test_list_views_may_overlap_and_be_in_any_order() -> None:
    structs = pa.array([{"id": number, "weight": number / 2} for number in range(6)], WEIGHTED)
    offsets, sizes = pa.array([4, 0, 9, 1], pa.int32()), pa.array([2, 2, 0, 3], pa.int32())
    null = pa.array([False, False, True, False])
    bags: list[list[int] | None] = [[4, 5], [0, 1], None, [1, 2, 3]]
    for items in (structs, structs.field("id")):
        views = pa.ListViewArray.from_arrays(offsets, sizes, items, mask=null)
        tensors = encode({"a": views}, "a" if items is structs else "", nulls="empty")
        assert (tensors.values.tolist(), tensors.lengths.tolist()) == ([4, 5, 0, 1, 1, 2, 3], [2, 2, 0, 3])
        if items is structs:
            assert tensors.weights is not None
            assert tensors.weights.tolist() == [2.0, 2.5, 0.0, 0.5, 0.5, 1.0, 1.5]
        else:
            expect_same(views, bags)
    pairs = pa.array([[number, number + 1] for number in range(6)], pa.list_(pa.int32()))
    views = pa.LargeListViewArray.from_arrays([4, 0, 1], [2, 0, 1], pairs)
    encoded = encode_dense([PLACES], {"times": views}, {"seen": np.array([2, 0, 1], np.int32)})["times"]
    assert encoded.tolist() == [[4, 5], [5, 6], [1, 2]]


def test_a_column_of_nulls_alone_may_have_any_type() -> None:
    for column in (pa.array([None, None], pa.string()), pl.Series([None, None], dtype=pl.String)):
        tensors = encode({"a": column}, nulls="empty")
        assert (tensors.values.tolist(), tensors.lengths.tolist()) == ([], [0, 0])
        with pytest.raises(InvalidRequest, match="expected no nulls, got one in sample 0"):
            encode({"a": column})


def test_an_arrow_column_is_read_without_a_copy() -> None:
    """The request of one column is the only copy; a dense input of the right dtype is none."""
    numbers = np.arange(1000, dtype=np.float32)
    columns = [pa.array(numbers), pl.Series(numbers), pd.Series(numbers)]
    for column in columns:
        encoded = encode_dense([DenseInput("price", ())], {"price": column})["price"]
        assert np.shares_memory(encoded, column.to_numpy())


def test_the_memory_of_a_column_lives_as_long_as_its_arrays() -> None:
    def encoded() -> Any:
        column = pa.chunked_array([pa.array(np.full(100_000, 7.0, np.float32))])
        return encode_dense([DenseInput("price", ())], {"price": column})["price"]

    before = pa.total_allocated_bytes()
    arrays = [encoded() for _ in range(20)]
    columns = [pa.array(np.arange(100_000)) for _ in range(20)]
    assert all((array == 7).all() for array in arrays)
    del arrays, columns
    for _ in range(20):
        encode({"a": pa.array([[1, 2, 3]] * 1000)})
    assert pa.total_allocated_bytes() == before


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1.0, 2.0]), r"expected integers in 1 dimension, got float64 \[2\]: convert whole numbers"),
        (pl.Series([[1.0], [2.5]]), r"expected integers in 1 dimension, got float64 \[2\]: convert whole numbers"),
        (pd.Series([1.0, None]), r"expected integers in 1 dimension, got float64 \[2\]: .*pandas makes floats of integers with nulls"),
        (pd.Series([1.0, None], dtype="Float64"), "expected no nulls, got one in sample 1"),
        (pa.array([2**63], pa.uint64()), "expected numbers that fit int64, got 9223372036854775808"),
        (pl.Series([[1], [2**64 - 1]], dtype=pl.List(pl.UInt64)), "expected numbers that fit int64"),
        (pd.Series([2**63], dtype="uint64"), "expected numbers that fit int64"),
        (pa.array(["a"]), "got StringArray of string"),
        (pl.Series(["a"]), "got Series of String"),
        (pd.Series(["a"], dtype=object), "got str for a list"),
        (pd.Series(["a"], dtype="category"), ""),
        (pl.Series(["a"], dtype=pl.Categorical), ""),
        (pa.array([[[1]]]), "got ListArray of list<item: list<item: int64>>"),
        (pl.Series([[[1]]]), r"got Series of List\(List\(Int64\)\)"),
        (pa.array([{"key": 1, "weight": 2.0}]), r"got a struct of \['key', 'weight'\], where a weighted id has the fields \['id', 'weight'\]"),
        (pa.array([1], pa.timestamp("s")), r"got TimestampArray of timestamp\[s\]"),
        (pd.Series(pd.to_datetime(["2026-01-01"])), "expected integers in 1 dimension, got datetime64"),
        (pa.array([[{"id": 1, "weight": None}]], pa.list_(WEIGHTED)), "got a null for the weight of an id"),
        ([[{"key": 1, "weight": 2.0}]], r"got a dict of \['key', 'weight'\], where a weighted id has the keys \['id', 'weight'\]"),
        ([[{"id": 1, "weight": 2.0}, 3]], r"got int beside dicts, where a weighted id has the keys"),
        ([[{"id": 1, "weight": None}]], "got a null for the weight of an id"),
        (pa.array([1], pa.decimal128(3)), "got Decimal128Array of decimal128"),
        (pl.DataFrame({"x": [1]}).lazy(), ""),
    ],
    ids=str,
)  # fmt: skip
def test_columns_that_hold_no_ids_are_refused_by_name(column: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"feature 'a': .*{message}"):
        encode({"a": column}, "a")


PRICE, PAIR = DenseInput("price", ()), DenseInput("price", (2,))
COLUMNS_OF_NUMBERS: dict[str, Callable[[list[Any]], Any]] = {
    "pyarrow": pa.array,
    "pyarrow chunks": lambda rows: pa.chunked_array([pa.array([*rows[:1], *rows[:1]])[1:], pa.array(rows[1:])]),
    "polars": pl.Series,
    "pyarrow runs": lambda rows: in_runs(pa.array(rows)),
    "pandas": pd.Series,
    "pandas of objects": lambda rows: pd.Series(rows, dtype=object),
    "pandas of Arrow": lambda rows: pd.Series(rows, dtype=pd.ArrowDtype(pa.array(rows).type)),
}


@pytest.mark.parametrize("form", COLUMNS_OF_NUMBERS)
def test_a_column_is_a_dense_input(form: str) -> None:
    make = COLUMNS_OF_NUMBERS[form]
    for dense_input, rows in (
        (PRICE, [0.5, 2.0, 3.0]),
        (PAIR, [[0.5, 2.0], [1.0, 3.0], [0.0, 1.0]]),
        (DenseInput("price", (1, 2)), [[[0.5, 2.0]], [[1.0, 3.0]], [[0.0, 1.0]]]),
        (DenseInput("price", (), InputDtype.INT64), [2**62, 3, -1]),
        (DenseInput("price", (1,), InputDtype.INT8), [2, 3, -1]),
        (DenseInput("price", (), InputDtype.BOOL), [True, False, True]),
    ):
        encoded = encode_dense([dense_input], {"price": make(rows)})["price"]
        expected = encode_dense([dense_input], {"price": np.array(rows)})["price"]
        assert encoded.dtype == expected.dtype
        assert encoded.shape == (3, *dense_input.shape)
        assert encoded.tolist() == expected.tolist()


def test_columns_of_one_size_are_dense_inputs() -> None:
    rows = [[[0.5, 2.0]], [[1.0, 3.0]]]
    two = pa.list_(pa.float32(), 2)
    for column in (
        pa.array(rows, pa.list_(two, 1)),
        pl.Series(rows, dtype=pl.Array(pl.Float32, (1, 2))),
        pa.chunked_array([pa.array([None, *rows], pa.list_(two, 1))[1:], pa.array([], pa.list_(two, 1))]),
    ):
        encoded = encode_dense([DenseInput("price", (1, 2))], {"price": column})["price"]
        assert encoded.tolist() == rows
    assert encode_dense([PAIR], {"price": pa.array([], pa.list_(pa.float32()))})["price"].shape == (0, 2)


def test_columns_side_by_side_are_a_dense_input() -> None:
    table = pa.table({"x": [0.5, 1.0], "y": [2, 3]})
    for frame in (table, table.to_batches()[0], pl.from_arrow(table), table.to_pandas()):
        assert encode_dense([PAIR], {"price": frame})["price"].tolist() == [[0.5, 2.0], [1.0, 3.0]]
    assert encode_dense([PRICE], {"price": pl.DataFrame({"x": [0.5, 1.0]})})["price"].tolist() == [0.5, 1.0]


def test_columns_side_by_side_keep_their_integers() -> None:
    """numpy makes floats of an int64 column beside a float64 or uint64 one."""
    table = pa.table({"x": pa.array([2**62 + 1, -1]), "y": pa.array([3, 2**63 - 1], pa.uint64())})
    pair = DenseInput("price", (2,), InputDtype.INT64)
    assert encode_dense([pair], {"price": table})["price"].tolist() == [[2**62 + 1, 3], [-1, 2**63 - 1]]
    with pytest.raises(InvalidRequest, match=r"expected numbers of FP32, .* got the integer 16777217"):
        encode_dense([PAIR], {"price": pa.table({"x": [0.5], "y": [2**24 + 1]})})


@pytest.mark.parametrize(
    ("dense_input", "column", "message"),
    [
        (PRICE, pa.array([0.5, None]), "expected numbers: got a null in sample 1: fill it, or leave the sample out"),
        (PRICE, pa.chunked_array([[0.5], [1.0, None]]), "expected numbers: got a null in sample 2"),
        (PRICE, pl.Series([0.5, None]), "expected numbers: got a null in sample 1"),
        (PRICE, pd.Series([0.5, None], dtype="Float64"), "expected numbers: got a null in sample 1"),
        (PRICE, pd.Series([0.5, None], dtype=object), "expected numbers: got a null in sample 1"),
        (PAIR, pl.Series([[0.5, 1.0], [2.0, None]]), "expected numbers: got a null in sample 1"),
        (PAIR, pa.array([[0.5, 1.0], None]), "expected numbers: got a null in sample 1"),
        (PAIR, pa.array([None, [0.5, 1.0]], pa.list_(pa.float32(), 2)), "expected numbers: got a null in sample 0"),
        (PAIR, pa.array([[0.5, 1.0], [2.0]]), r"expected numbers: got the shape \[1\] in sample 1, where the first row has \[2\]"),
        (PRICE, pa.array(["a"]), "expected numbers or lists of numbers, got StringArray of string"),
        (PRICE, pl.Series([2**24 + 1]), "expected numbers of FP32, .* got the integer 16777217"),
        (PRICE, pd.Series([0.5, 2**24 + 1], dtype=object), "expected numbers of FP32, .* got the integer 16777217"),
        (DenseInput("price", (), InputDtype.INT64), pl.Series([1.0]), "expected integers, .* got float64"),
    ],
    ids=str,
)  # fmt: skip
def test_columns_that_do_not_fit_a_dense_input_are_refused_by_name(
    dense_input: Any, column: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"dense input 'price': .*{message}"):
        encode_dense([dense_input], {"price": column}, nulls="empty")


TIMES = DenseInput("times", (), InputDtype.INT64, key="seen")
PLACES = DenseInput("times", (2,), key="seen")
LENGTHS = {"seen": np.array([2, 0, 1], np.int32)}


@pytest.mark.parametrize("form", COLUMNS_OF_NUMBERS)
def test_columns_of_per_id_numbers_are_taken_as_bags_or_flat(form: str) -> None:
    make = COLUMNS_OF_NUMBERS[form]
    for rows in ([[7, 8], [], [9]], [7, 8, 9]):
        assert encode_dense([TIMES], {"times": make(rows)}, LENGTHS)["times"].tolist() == [7, 8, 9]
    pairs = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    for bags in ([pairs[:2], [], pairs[2:]], pairs):
        assert encode_dense([PLACES], {"times": make(bags)}, LENGTHS)["times"].tolist() == pairs
    with pytest.raises(InvalidRequest, match=r"a row for each id of 'seen', got 1 rows for the 2 ids of sample 0$"):
        encode_dense([TIMES], {"times": make([[7], [], [8, 9]])}, LENGTHS)


def test_a_null_list_of_rows_is_an_empty_one() -> None:
    bags = [[7, 8], None, [9]]
    columns: list[Any] = [pl.Series(bags), pa.array(bags), pd.Series(bags), bags]
    for column in columns:
        encoded = encode_dense([TIMES], {"times": column}, LENGTHS, nulls="empty")["times"]
        assert encoded.tolist() == [7, 8, 9]
        with pytest.raises(
            InvalidRequest, match=r"dense input 'times': expected numbers: expected no nulls, .*sample 1"
        ) as refused:
            encode_dense([TIMES], {"times": column}, LENGTHS)
        assert "null ids" not in str(refused.value)


@pytest.mark.parametrize(
    "column",
    [
        pa.DictionaryArray.from_arrays(pa.array([0, -1]), pa.array([3, 4]), safe=False),
        pa.DictionaryArray.from_arrays(pa.array([0, 2]), pa.array([3, 4]), safe=False),
        pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([], pa.int64()), safe=False),
        pa.ListViewArray.from_arrays(pa.array([0, 2], pa.int32()), pa.array([1, 2], pa.int32()), pa.array([3, 4, 5])),
        pa.ListViewArray.from_arrays(
            pa.array([-1, 0], pa.int32()), pa.array([1, 2], pa.int32()), pa.array([3, 4, 5])
        ),
        pa.ListArray.from_arrays(pa.array([0, 3, 1, 3], pa.int32()), pa.array([3, 4, 5])),
    ],
    ids=["index -1", "index too large", "no values", "list ends too late", "list starts too early", "offsets fall"],
)
def test_values_outside_a_column_are_refused(column: Any) -> None:
    """pyarrow makes such columns, and numpy would read an index of -1 as the last value."""
    with pytest.raises(InvalidRequest, match=r"feature 'x': expected a valid column, got .* not within"):
        encode({"x": column})


def test_bags_may_be_arrays_of_pyarrow() -> None:
    bags = [pa.array([3, 5]), None, pa.chunked_array([[1], [None, 2]])]
    tensors = encode({"x": bags}, nulls="empty")
    assert (tensors.values.tolist(), tensors.lengths.tolist()) == ([3, 5, 1, 2], [2, 0, 2])


def test_values_stored_for_null_lists_are_not_read() -> None:
    offsets, sizes = pa.array([7, -1], pa.int32()), pa.array([9, 4], pa.int32())
    bags = pa.ListViewArray.from_arrays(offsets, sizes, pa.array([3, 4, 5]), mask=pa.array([True, True]))
    assert encode({"x": bags}, nulls="empty").lengths.tolist() == [0, 0]
