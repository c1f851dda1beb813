"""Log loss, against torch's."""

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from export.scores.log_loss import are_probabilities, log_loss_of

LABELS = np.arange(50) % 3 == 0


def test_log_loss_of_logits_and_of_probabilities() -> None:
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32) * 5
    labels = torch.from_numpy(LABELS).double()
    expected = float(binary_cross_entropy_with_logits(torch.from_numpy(logits).double(), labels))
    assert log_loss_of(logits, LABELS, is_sigmoid=True) == pytest.approx(expected)
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = float(binary_cross_entropy(torch.from_numpy(probabilities), labels))
    assert log_loss_of(probabilities, LABELS, is_sigmoid=False) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("is_sigmoid", "extreme"), [(True, 1e9), (False, 1.0)])
def test_a_certain_wrong_score_costs_a_finite_amount(is_sigmoid: bool, extreme: float) -> None:
    assert np.isfinite(log_loss_of(np.full(50, extreme, np.float32), LABELS, is_sigmoid=is_sigmoid))


def test_numbers_outside_of_0_to_1_are_no_probabilities() -> None:
    assert are_probabilities(np.array([0, 0.5, 1]))
    assert not are_probabilities(np.array([0.5, 1.01]))
    assert not are_probabilities(np.array([-0.01, 0.5]))
