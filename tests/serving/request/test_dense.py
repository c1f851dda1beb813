"""Dense inputs become FP32 only where that changes no integer, and no number to an infinity."""

from typing import Any

import numpy as np
import pytest
import torch

from serving.errors import InvalidRequest
from serving.request.dense import encode_dense

LAST = 2**24


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
        encode_dense({"price": given})
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
    found = encode_dense({"price": given})["price"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.asarray(given).astype(np.float32))
