"""AUC losses and their intervals, against counts of pairs and against DeLong's formula."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.compare.auc_loss import PairedAuc, resampled_aucs

Array = npt.NDArray[np.float64]


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans(), st.integers(0, 3)), min_size=1, max_size=30))
def test_the_auc_of_a_resample_is_that_of_its_rows(rows: list[tuple[int, bool, int]]) -> None:
    """Every pair is counted, of rows that are repeated as often as they are drawn."""
    scores = np.array([score for score, _, _ in rows], np.float32) / 8
    labels, counts = np.array([label for _, label, _ in rows]), np.array([[count for _, _, count in rows]], np.uint8)
    drawn, drawn_labels = np.repeat(scores, counts[0]), np.repeat(labels, counts[0])
    pairs = drawn[drawn_labels][:, np.newaxis] - drawn[~drawn_labels]
    (auc,) = resampled_aucs(scores, labels, counts)
    if pairs.size:
        assert auc == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2)
    else:
        assert np.isnan(auc)


def delong_deviation(labels: npt.NDArray[np.bool_], one: Array, other: Array) -> float:
    """The standard deviation of the difference of two AUCs on the same rows (DeLong et al., Biometrics 44, 1988)."""

    def placements(scores: Array) -> Array:
        ones, zeros = scores[labels][:, np.newaxis], scores[~labels]
        return np.where(ones > zeros, 1.0, np.where(ones == zeros, 0.5, 0.0))

    difference = placements(one) - placements(other)
    by_one, by_zero = difference.mean(axis=1), difference.mean(axis=0)
    return float(np.sqrt(by_one.var(ddof=1) / by_one.size + by_zero.var(ddof=1) / by_zero.size))


@pytest.mark.parametrize("noise", [0.02, 0.3, 2.0])
def test_an_interval_is_as_wide_as_delong_s(noise: float) -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=1500)
    labels = random.random(1500) < 1 / (1 + np.exp(-logits))
    other = logits + noise * random.normal(size=1500)
    loss = PairedAuc(labels, logits).loss_of(other)
    half = 1.96 * delong_deviation(labels, logits, other)
    assert (loss.high - loss.low) / 2 == pytest.approx(half, rel=0.2)
    assert (loss.high + loss.low) / 2 == pytest.approx(loss.loss)


def test_a_loss_of_0_keeps_an_interval_set_by_the_number_of_rows() -> None:
    labels = np.arange(40) % 2 == 0
    scores = np.arange(40.0)
    loss = PairedAuc(labels, scores).loss_of(scores * 2)
    assert loss.loss == 0
    assert loss.high == -loss.low == pytest.approx(-np.log(0.025) / (20 * 20), rel=1e-3)


def test_a_single_row_of_a_label_gives_an_interval() -> None:
    """Resamples without it have no AUC."""
    labels = np.arange(40) == 7
    loss = PairedAuc(labels, np.arange(40.0)).loss_of(np.arange(40.0)[::-1].copy())
    assert np.isfinite([loss.low, loss.high]).all()
    assert loss.loss == pytest.approx((7 - 32) / 39)
