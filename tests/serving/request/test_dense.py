"""Dense inputs become FP32 only where that changes no integer, and no number to an infinity; others are exact."""

from typing import Any

import numpy as np
import pytest
import torch

from serving.bundle.scores import DenseInput, InputDtype
from serving.errors import InvalidRequest
from serving.request.dense import accept_dense, encode_dense

LAST = 2**24
PRICE = DenseInput("price", (1,))


@pytest.mark.parametrize(
    ("given", "wrong"),
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
def test_numbers_that_fp32_has_not_are_refused(given: Any, wrong: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        encode_dense([PRICE], {"price": given})
    assert str(refused.value).startswith("dense input 'price': expected numbers of FP32")
    assert wrong in str(refused.value)


@pytest.mark.parametrize(
    "given",
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
def test_other_numbers_are_taken_as_numpy_casts_them(given: Any) -> None:
    found = encode_dense([PRICE], {"price": given})["price"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.asarray(given).astype(np.float32))


@pytest.mark.parametrize("dtype", [InputDtype.INT64, InputDtype.INT32])
@pytest.mark.parametrize(
    "given",
    [[3, -1], np.array([3, -1], np.int8), np.array([3, 200], np.uint8), torch.tensor([3, -1]), [], np.zeros(0)],
    ids=str,
)
def test_integers_travel_as_they_are(dtype: InputDtype, given: Any) -> None:
    found = encode_dense([DenseInput("relation", (), dtype)], {"relation": given})["relation"]
    assert found.dtype == dtype.numpy
    np.testing.assert_array_equal(found, np.asarray(given).astype(np.int64))


def test_booleans_travel_as_they_are() -> None:
    new = DenseInput("new", (2,), InputDtype.BOOL)
    for given in ([[True, False]], np.array([[True, False]]), torch.tensor([[True, False]])):
        found = encode_dense([new], {"new": given})["new"]
        assert found.dtype == np.bool_
        assert found.tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("dtype", "given", "why"),
    [
        (InputDtype.INT64, [1.0], "expected integers, which travel as INT64, got float64"),
        (InputDtype.INT64, np.ones(1, np.float32), "expected integers, which travel as INT64, got float32"),
        (InputDtype.INT32, torch.ones(1), "expected integers, which travel as INT32, got float32"),
        (InputDtype.INT32, [True], "expected integers, which travel as INT32, got bool"),
        (InputDtype.INT32, [2**31], "expected integers that fit INT32, got 2147483648"),
        (InputDtype.INT32, [-(2**31) - 1], "expected integers that fit INT32, got -2147483649"),
        (InputDtype.INT64, [2**63], "expected integers that fit INT64, got 9223372036854775808"),
        (InputDtype.INT64, [2**64], "expected numbers of one dtype that numpy has, got object"),
        (InputDtype.INT64, ["1"], "expected numbers of one dtype that numpy has, got <U1"),
        (InputDtype.INT64, [[1], [1, 2]], "expected numbers: "),
        (InputDtype.BOOL, [1], "expected booleans, which travel as BOOL, got int64"),
        (InputDtype.BOOL, [1.0], "expected booleans, which travel as BOOL, got float64"),
    ],
    ids=str,
)
def test_other_numbers_than_the_model_takes_are_refused_by_name(dtype: InputDtype, given: Any, why: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        encode_dense([DenseInput("relation", (), dtype)], {"relation": given})
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


def test_inputs_of_every_dtype_and_shape_are_taken_as_they_are() -> None:
    for given, found in zip(GOOD.values(), accept_dense(INPUTS, GOOD, 3), strict=True):
        assert found is given
    once = {**GOOD, "relation": np.array([7]), "new": np.array([[True, False]])}
    _, relation, _, new = accept_dense(INPUTS, once, 3, ["relation", "new"])
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
def test_integers_that_read_no_row_of_an_embedding_are_refused(outside: int) -> None:
    country = DenseInput("country", (2,), InputDtype.INT64, rows=7)
    accept_dense([country], {"country": np.array([[0, 6], [3, 3]])}, 2)
    accept_dense([country], {"country": np.empty((0, 2), np.int64)}, 0)
    with pytest.raises(InvalidRequest, match=rf"'country': .*, got {outside} in sample 1, which is outside \[0, 7\)"):
        accept_dense([country], {"country": np.array([[0, 6], [outside, 3]])}, 2)
