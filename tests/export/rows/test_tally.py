"""Sums of how far two versions of numbers are from one another."""

import numpy as np
import pytest

from export.rows.table_error import Tally, finite

_NAN, _INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (1.0, 1.0, (1.0, 1.0)),
        (1.0, 2.0, (1.0, 2.0)),
        (_NAN, _NAN, (0.0, 0.0)),
        (_INF, _INF, (0.0, 0.0)),
        (-_INF, -_INF, (0.0, 0.0)),
        (_INF, -_INF, (_INF, -_INF)),
        (_INF, _NAN, (_INF, _NAN)),
        (_NAN, _INF, (_NAN, _INF)),
        (1.0, _NAN, (1.0, _NAN)),
        (_NAN, 1.0, (_NAN, 1.0)),
        (_INF, 1.0, (_INF, 1.0)),
        (1.0, _INF, (1.0, _INF)),
    ],
)
def test_equal_non_finite_elements_have_no_error(a: float, b: float, expected: tuple[float, float]) -> None:
    result = finite(np.array([[3.0, a]]), np.array([[4.0, b]]))
    np.testing.assert_array_equal(result, [[[3.0, expected[0]]], [[4.0, expected[1]]]])


@pytest.mark.parametrize("first", [0.0, 5.0])
def test_nan_is_the_largest_error_at_any_row(first: float) -> None:
    tally = Tally()
    for start, number in enumerate((first, _NAN, 1.0, _NAN, _INF)):
        tally.add(start, np.array([[number]]), np.array([[0.0]]))
    assert np.isnan(tally.agreement.largest)
    assert tally.agreement.worst_row == 1


def test_the_first_row_of_the_largest_error_is_named() -> None:
    tally = Tally()
    for start, number in enumerate((1.0, 3.0, 3.0, 2.0)):
        tally.add(start, np.array([[number]]), np.array([[0.0]]))
    assert (tally.agreement.largest, tally.agreement.worst_row, tally.agreement.mean) == (3.0, 1, 2.25)
