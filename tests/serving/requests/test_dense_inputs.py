"""Dense inputs become FP32 only where that changes no integer, and no number to an infinity; others are exact."""

from typing import Any

import numpy as np
import pytest
import torch

from serving.bundle.scores import DenseInput, InputDtype
from serving.errors import InvalidRequest
from serving.requests.dense_inputs import accept_dense, encode_dense

LAST = 2**24
PRICE = DenseInput("price", (1,))
MA: Any = np.ma  # its functions have types from numpy 2 on
MASKED = MA.masked_array([3, 5], [False, True])


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ([[1, LAST + 1]], "16777217, which it would round to 16777216"),
        ([[-LAST - 1]], "-16777217, which it would round to -16777216"),
        ([[0.5, LAST + 1]], "16777217"),
        (np.array([[2**40 + 1]]), "1099511627777"),
        ([[np.int64(LAST + 1), 0.5]], "16777217"),
        ([[np.float32(1), np.uint32(LAST + 1)]], "16777217"),
        ([[torch.tensor(LAST + 1), torch.tensor(0.5)]], "16777217"),
        (np.array([[LAST + 1]], np.uint32), "16777217"),
        (np.array([[2**63 + 1]], np.uint64), "9223372036854775809"),
        (torch.tensor([[LAST + 1]]), "16777217"),
        ([[2**63 - 1]], "9223372036854775807"),
        ([[1e300]], "1e+300"),
        ([[1, -1e39]], "-1e+39"),
        (np.array([[3.5e38]]), "3.5e+38"),
    ],
    ids=str,
)
def test_numbers_that_fp32_cannot_represent_are_refused(values: Any, wrong: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        encode_dense([PRICE], {"price": values})
    assert str(refused.value).startswith("dense input 'price': expected numbers of FP32")
    assert wrong in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        [[1, LAST]],
        [[2**40, -(2**63)]],  # powers of two
        [[0.1, 16777217.0, 123456789.5]],  # measured numbers are rounded
        np.array([[16777217.0]]),
        [[float("nan"), float("inf"), -float("inf")]],
        np.array([[LAST + 1]], np.float32),
        [[True, False]],
        np.zeros((0, 3)),
        torch.ones(2, 3),
    ],
    ids=str,
)
def test_other_numbers_are_taken_as_numpy_casts_them(values: Any) -> None:
    encoded = encode_dense([PRICE], {"price": values})["price"]
    assert encoded.dtype == np.float32
    np.testing.assert_array_equal(encoded, np.asarray(values).astype(np.float32))


@pytest.mark.parametrize("dtype", [InputDtype.INT64, InputDtype.INT32, InputDtype.INT16])
@pytest.mark.parametrize(
    "values",
    [[3, -1], np.array([3, -1], np.int8), np.array([3, 200], np.uint8), torch.tensor([3, -1]), [], np.zeros(0)],
    ids=str,
)
def test_integers_travel_as_they_are(dtype: InputDtype, values: Any) -> None:
    encoded = encode_dense([DenseInput("relation", (), dtype)], {"relation": values})["relation"]
    assert encoded.dtype == dtype.numpy
    np.testing.assert_array_equal(encoded, np.asarray(values).astype(np.int64))


def test_booleans_travel_as_they_are() -> None:
    new = DenseInput("new", (2,), InputDtype.BOOL)
    for values in ([[True, False]], np.array([[True, False]]), torch.tensor([[True, False]])):
        encoded = encode_dense([new], {"new": values})["new"]
        assert encoded.dtype == np.bool_
        assert encoded.tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("dtype", "values", "why"),
    [
        (InputDtype.INT64, [1.0], "expected integers, which travel as INT64, got float64"),
        (InputDtype.INT64, np.ones(1, np.float32), "expected integers, which travel as INT64, got float32"),
        (InputDtype.INT32, torch.ones(1), "expected integers, which travel as INT32, got float32"),
        (InputDtype.INT32, [True], "expected integers, which travel as INT32, got bool"),
        (InputDtype.INT32, MASKED, "expected numbers: a masked array"),
        (InputDtype.INT32, [2, True], "expected integers, which travel as INT32, got a boolean among them"),
        (
            InputDtype.INT64,
            [[2, 3], [False, 1]],
            "expected integers, which travel as INT64, got a boolean among them",
        ),
        (
            InputDtype.INT8,
            [np.int16(3), np.True_],
            "expected integers, which travel as INT8, got a boolean among them",
        ),
        (
            InputDtype.INT8,
            [torch.tensor(3), torch.tensor(True)],
            "expected integers, which travel as INT8, got a bool",
        ),
        (InputDtype.INT16, [2**15], "expected integers that fit INT16, got 32768"),
        (InputDtype.INT8, [-129], "expected integers that fit INT8, got -129"),
        (InputDtype.UINT8, torch.tensor([256]), "expected integers that fit UINT8, got 256"),
        (InputDtype.INT32, [2**31], "expected integers that fit INT32, got 2147483648"),
        (InputDtype.INT32, [-(2**31) - 1], "expected integers that fit INT32, got -2147483649"),
        (InputDtype.INT64, [2**63], "expected integers that fit INT64, got 9223372036854775808"),
        (InputDtype.INT64, [2**64], "expected numbers: got 18446744073709551616, which no 64-bit dtype holds"),
        (InputDtype.INT64, np.array([1j]), "expected real numbers, got complex128"),
        (InputDtype.INT64, ["1"], "expected numbers: got str in sample 0"),
        (InputDtype.INT64, [[1], [1, 2]], "expected numbers: "),
        (InputDtype.BOOL, [1], "expected booleans, which travel as BOOL, got int64"),
        (InputDtype.BOOL, [1.0], "expected booleans, which travel as BOOL, got float64"),
    ],
    ids=str,
)
def test_numbers_of_other_dtypes_are_refused_by_name(dtype: InputDtype, values: Any, why: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        encode_dense([DenseInput("relation", (), dtype)], {"relation": values})
    assert str(refused.value).startswith(f"dense input 'relation': {why}")


INPUTS = (
    DenseInput("price", (2, 3)),
    DenseInput("relation", (), InputDtype.INT64),
    DenseInput("day", (1,), InputDtype.INT32),
    DenseInput("new", (2,), InputDtype.BOOL),
)
GOOD = {
    "price": np.ones((3, 2, 3), np.float32),
    "relation": np.array([0, 2**62, -1]),
    "day": np.ones((3, 1), np.int32),
    "new": np.ones((3, 2), np.bool_),
}


def test_inputs_of_every_dtype_and_shape_are_taken_unchanged() -> None:
    for values, array in zip(GOOD.values(), accept_dense(INPUTS, GOOD, 3), strict=True):
        assert array is values
    shared = {**GOOD, "relation": np.array([7]), "new": np.array([[True, False]])}
    _, relation, _, new = accept_dense(INPUTS, shared, 3, ["relation", "new"])
    assert relation.tolist() == [7, 7, 7]
    assert new.tolist() == [[True, False]] * 3


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"price": np.ones((3, 6), np.float32)}, "'price': expected float32 [3, 2, 3], a row for each sample, got float32 [3, 6]"),
        ({"relation": np.ones(3, np.int32)}, "'relation': expected int64 [3], a row for each sample, got int32 [3]"),
        ({"relation": np.ones((3, 1), np.int64)}, "'relation': expected int64 [3], a row for each sample, got int64 [3, 1]"),
        ({"day": np.ones((3, 1), np.float32)}, "'day': expected int32 [3, 1], a row for each sample, got float32 [3, 1]"),
        ({"new": np.ones((3, 2), np.uint8)}, "'new': expected bool [3, 2], a row for each sample, got uint8 [3, 2]"),
        ({"new": np.full((3, 2), 2, np.uint8).view(np.bool_)}, "'new': expected bool [3, 2], a row for each sample, got a byte that is neither 0 nor 1"),
        ({"age": np.ones(3)}, "'age': expected one of 'price', 'relation', 'day', 'new'"),
    ],
)  # fmt: skip
def test_other_arrays_are_refused_by_name(change: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        accept_dense(INPUTS, GOOD | change, 3)
    assert str(refused.value) == f"dense input {why}"


@pytest.mark.parametrize("outside", [-1, 7, 2**40])
def test_integers_outside_of_an_embedding_are_refused(outside: int) -> None:
    country = DenseInput("country", (2,), InputDtype.INT64, rows=7)
    accept_dense([country], {"country": np.array([[0, 6], [3, 3]])}, 2)
    accept_dense([country], {"country": np.empty((0, 2), np.int64)}, 0)
    with pytest.raises(InvalidRequest, match=rf"'country': .*, got {outside} in sample 1, which is outside \[0, 7\)"):
        accept_dense([country], {"country": np.array([[0, 6], [outside, 3]])}, 2)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize(
    "values",
    [
        [0.5, 2],
        [[0.5], [2]],
        np.array([0.5, 2]),
        np.array([[0.5], [2]]),
        np.array([0.5, 2], object),
        np.array([[0.5], [2]], object),
        torch.tensor([0.5, 2]),
    ],
    ids=repr,
)
def test_an_input_of_one_number_has_one_dimension_or_two(shape: tuple[int, ...], values: Any) -> None:
    encoded = encode_dense([DenseInput("price", shape)], {"price": values})["price"]
    assert encoded.tolist() == np.array([0.5, 2]).reshape(2, *shape).tolist()
    assert encoded.dtype == np.float32


def test_empty_inputs_are_accepted_for_any_shape() -> None:
    without_samples: list[Any] = [[], np.zeros(0), np.zeros((0, 0))]
    for nothing in without_samples:
        assert encode_dense([DenseInput("price", (2, 3))], {"price": nothing})["price"].shape == (0, 2, 3)


def objects(*items: Any) -> Any:
    array = np.empty(len(items), object)
    for position, item in enumerate(items):
        array[position] = item
    return array


def test_objects_are_taken_as_the_numbers_that_they_are() -> None:
    for rows in (objects([0.5, 2.0], (1, 3)), objects(np.array([0.5, 2.0]), np.array([1, 3]))):
        encoded = encode_dense([DenseInput("price", (2,))], {"price": rows})["price"]
        assert encoded.tolist() == [[0.5, 2.0], [1.0, 3.0]]
    relation = DenseInput("relation", (), InputDtype.INT64)
    assert encode_dense([relation], {"relation": objects(2**62, 3)})["relation"].tolist() == [2**62, 3]


@pytest.mark.parametrize(
    ("dense_input", "values", "message"),
    [
        (PRICE, objects(0.5, None), "expected numbers: got a null in sample 1: fill it, or leave the sample out"),
        (PRICE, objects("1"), "expected numbers: got str in sample 0"),
        (PRICE, objects([1.0], [1.0, 2.0]), r"expected numbers: got the shape \[2\] in sample 1, where the first row has \[1\]"),
        (PRICE, objects(0.5, LAST + 1), "expected numbers of FP32, .* got the integer 16777217"),
        (PRICE, objects([0.5], [LAST + 1]), "expected numbers of FP32, .* got the integer 16777217"),
        (DenseInput("price", (), InputDtype.INT64), objects(2, True), "expected integers, .* got a boolean among them"),
        (DenseInput("price", (), InputDtype.INT64), objects(2, 1.0), "expected integers, .* got float64"),
    ],
    ids=str,
)  # fmt: skip
def test_objects_that_are_no_such_numbers_are_refused(dense_input: DenseInput, values: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"dense input 'price': {message}"):
        encode_dense([dense_input], {"price": values})


TIMES = DenseInput("times", (), InputDtype.INT64, key="seen")
PLACES = DenseInput("places", (2,), key="seen")


@pytest.mark.parametrize(
    "values",
    [
        [[7, 8], [], [9]],
        [7, 8, 9],
        np.array([7, 8, 9]),
        torch.tensor([7, 8, 9]),
        [np.array([7, 8]), np.zeros(0, np.int64), [9]],
        [torch.tensor([7, 8]), [], (9,)],
    ],
    ids=str,
)
def test_a_number_for_each_id_comes_in_bags_or_without(values: Any) -> None:
    encoded = encode_dense([TIMES], {"times": values}, {"seen": np.array([2, 0, 1], np.int32)})["times"]
    assert encoded.dtype == np.int64
    assert encoded.tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    "values",
    [
        [[[1, 2], [3, 4]], [[5, 6]]],
        [[1, 2], [3, 4], [5, 6]],
        np.arange(1, 7).reshape(3, 2),
        [np.array([[1, 2], [3, 4]]), [[5, 6]]],
    ],
    ids=str,
)
def test_several_numbers_for_each_id_are_taken_as_bags_or_flat(values: Any) -> None:
    encoded = encode_dense([PLACES], {"places": values}, {"seen": np.array([2, 1], np.int32)})["places"]
    assert encoded.dtype == np.float32
    assert encoded.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_bags_of_one_length_may_be_an_array() -> None:
    lengths = {"seen": np.array([2, 2], np.int32)}
    for of, shape in ((TIMES, (2, 2)), (PLACES, (2, 2, 2))):
        values = np.arange(np.prod(shape)).reshape(shape)
        for form in (values, values.tolist()):
            encoded = encode_dense([of], {of.name: form}, lengths)[of.name]
            np.testing.assert_array_equal(encoded, values.reshape(4, *of.shape))


@pytest.mark.parametrize("of", [TIMES, PLACES], ids=lambda of: of.name)
def test_bags_without_ids_have_no_numbers(of: DenseInput) -> None:
    every: list[Any] = [[], [[], []], np.zeros((0, *of.shape), np.int64)]
    for values in every:
        encoded = encode_dense([of], {of.name: values}, {"seen": np.zeros(len(values), np.int32)})[of.name]
        assert encoded.shape == (0, *of.shape)
        assert encoded.dtype == of.dtype.numpy


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ([[7], [8, 9]], "1 rows for the 2 ids of sample 0"),
        ([[7, 8, 9]], "bags of 1 samples for ids of 2"),
        ([[7, 8], [9], []], "bags of 3 samples for ids of 2"),
    ],
)
def test_numbers_in_other_bags_than_their_ids_are_refused(values: Any, got: str) -> None:
    """As many in all, but not those of the same samples."""
    with pytest.raises(InvalidRequest) as refused:
        encode_dense([TIMES], {"times": values}, {"seen": np.array([2, 1], np.int32)})
    assert str(refused.value) == (f"dense input 'times': expected bags with a row for each id of 'seen', got {got}")


@pytest.mark.parametrize("values", [[[7, 8], 9], [["a"], ["b"]], [[7, [8]], [9]], {"seen": [7]}, None], ids=str)
def test_invalid_bags_of_numbers_are_refused(values: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^dense input 'times': expected "):
        encode_dense([TIMES], {"times": values}, {"seen": np.array([2, 1], np.int32)})


def test_per_id_numbers_must_match_the_number_of_ids() -> None:
    good = np.array([7, 8, 9])
    (accepted,) = accept_dense([TIMES], {"times": good}, 2, ids={"seen": 3})
    assert accepted is good
    for ids, values, why in (
        (2, good, r"expected int64 \[2\], a row for each id of 'seen', got int64 \[3\]"),
        (3, good.astype(np.int32), r"expected int64 \[3\], a row for each id of 'seen', got int32 \[3\]"),
        (3, good[:, np.newaxis], r"expected int64 \[3\], a row for each id of 'seen', got int64 \[3, 1\]"),
    ):
        with pytest.raises(InvalidRequest, match=f"^dense input 'times': {why}"):
            accept_dense([TIMES], {"times": values}, 2, ids={"seen": ids})
    with pytest.raises(InvalidRequest, match=r"^once: 'times': has a row for each id of 'seen': name that key"):
        accept_dense([TIMES], {"times": good}, 2, ["times"], {"seen": 3})
    actions = DenseInput("actions", (), InputDtype.INT64, rows=5, key="seen")
    with pytest.raises(InvalidRequest, match=r"got 5 in row 2, which is outside \[0, 5\)"):
        accept_dense([actions], {"actions": np.array([0, 4, 5])}, 2, ids={"seen": 3})
