"""How labelled rows are halved."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from export.compare.halves import LEAST_ROWS, split_rows


@given(arrays(np.bool_, st.integers(4 * LEAST_ROWS, 300)))
def test_each_row_is_in_one_half_and_labels_are_balanced(labels: npt.NDArray[np.bool_]) -> None:
    choosing, held_out = split_rows(labels)
    ones = int(labels.sum())
    if min(ones, labels.size - ones) < 2 * LEAST_ROWS:
        assert held_out is None
        assert choosing.tolist() == [*range(labels.size)]
        return
    assert held_out is not None
    assert sorted([*choosing, *held_out]) == [*range(labels.size)]
    assert 0 <= labels[choosing].sum() - labels[held_out].sum() <= 1
    assert 0 <= (~labels[choosing]).sum() - (~labels[held_out]).sum() <= 1


@pytest.mark.parametrize("period", [2, 3, 5, 7])
def test_alternating_rows_are_spread_over_both_halves(period: int) -> None:
    """A file of one click and some rows without a click in turn, or sorted by time."""
    labels = np.arange(4200) % period == 0
    choosing, held_out = split_rows(labels)
    assert held_out is not None
    for half in (choosing, held_out):
        assert abs(half.mean() - 2100) < 100
        for rest in range(2 * period):
            assert abs((half % (2 * period) == rest).sum() - 2100 / (2 * period)) < 100


def test_the_split_is_always_the_same() -> None:
    labels = np.arange(100) % 3 == 0
    first, second = (split_rows(labels)[1] for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.tolist() == second.tolist()
    assert first[:5].tolist() == [1, 6, 8, 10, 11]
