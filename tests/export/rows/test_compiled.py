"""The compiled steps of a block do what numpy does, to the last bit where it is one operation for each number."""

import numpy as np
import pytest
import torch

from export.rows.compiled import compare, unpack
from export.rows.quantize import quantize
from export.rows.table_error import TableError, rounding_bounds
from serving.bundle.formats import CodeRows, WeightDtype, scales_and_biases_of

CODED = [dtype for dtype in WeightDtype if isinstance(dtype.format, CodeRows)]


@pytest.mark.parametrize("dtype", CODED, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize(("rows", "dim"), [(1, 8), (3000, 64), (3, 40_000), (2, 80_000)])
def test_codes_are_unpacked_as_numpy_does(dtype: WeightDtype, rows: int, dim: int) -> None:
    numbers = torch.randn(rows, dim, generator=torch.Generator().manual_seed(dim))
    stored = quantize("t", 0, numbers, dtype).numpy()
    halves = torch.from_numpy(scales_and_biases_of(stored))
    result = torch.full((rows, dim), float("nan"))
    unpack(torch.from_numpy(stored[:, 4:]), dtype.format.bits, halves.float(), result)
    np.testing.assert_array_equal(result.numpy(), dtype.format.dequantize(stored))


@pytest.mark.parametrize("dtype", WeightDtype, ids=lambda dtype: dtype.value)
def test_an_error_is_the_one_that_numpy_finds(dtype: WeightDtype) -> None:
    rows = torch.randn(3000, 16, generator=torch.Generator().manual_seed(0)).numpy()
    stored = quantize("t", 0, torch.from_numpy(rows), dtype).numpy()
    error = TableError(dtype)
    error.add(100, rows, stored, np.full_like(rows, np.nan))
    numbers = dtype.format.dequantize(stored)
    moved = np.abs(rows - numbers).max(axis=1)
    assert (error.tally.largest, error.tally.elements) == (moved.max(), rows.size)
    assert error.tally.worst_row == (100 + int(moved.argmax()) if moved.any() else 0)
    assert error.largest == np.abs(rows).max()
    assert error.bound == rounding_bounds(rows, stored, dtype).max()
    assert error.unexplained_row is None
    a, b = rows.astype(np.float64), numbers.astype(np.float64)
    assert error.tally.absolute == pytest.approx(np.abs(a - b).sum(), rel=1e-5)
    assert error.tally.squared == pytest.approx(((a - b) ** 2).sum(), rel=1e-5)
    assert error.tally.squared_a == pytest.approx((a**2).sum(), rel=1e-5)
    assert error.tally.squared_b == pytest.approx((b**2).sum(), rel=1e-5)


@pytest.mark.parametrize("dtype", CODED, ids=lambda dtype: dtype.value)
def test_the_first_row_that_moved_too_far_is_named(dtype: WeightDtype) -> None:
    rows = torch.randn(3000, 16, generator=torch.Generator().manual_seed(0)).numpy()
    stored = quantize("t", 0, torch.from_numpy(rows), dtype).numpy()
    stored[[2001, 2900], -1] ^= 0xFF
    error = TableError(dtype)
    error.add(100, rows, stored, np.empty_like(rows))
    assert error.unexplained_row == 2101


def test_squares_beyond_fp32_are_summed() -> None:
    a = torch.full((2, 4), 1e30)
    _, _, sums = compare(a, -a, torch.empty_like(a))
    assert sums[2:] == pytest.approx([8 * 4e60, 8e60, 8e60])


def test_a_difference_has_the_precision_of_the_finer_dtype() -> None:
    a, b = torch.full((1, 2), 1 + 1e-12, dtype=torch.float64), torch.ones(1, 2)
    _, _, sums = compare(a, b, torch.empty_like(a))
    assert sums[0] == pytest.approx(1e-12, rel=1e-3)
