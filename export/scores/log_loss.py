"""The log loss of scores: the mean of −log of the probability that they give to the labels."""

import numpy as np

from export.batchability.differences import Numbers
from export.scores.labelled_requests import Labels

# Probabilities are kept this far from 0 and 1: the distance of 1 to the next FP32 number.
_EPSILON = float(np.finfo(np.float32).eps)


def are_probabilities(scores: Numbers) -> bool:
    """Whether all scores are in [0, 1]."""
    return bool(((scores >= 0) & (scores <= 1)).all())


def log_loss_of(scores: Numbers, labels: Labels, *, is_sigmoid: bool) -> float:
    """The log loss of probabilities, or of the sigmoid of logits.

    Args:
        scores: [n], without NaN.
        labels: bool [n].
        is_sigmoid: whether scores are logits.
    """
    if is_sigmoid:
        logits = scores.astype(np.float64)
        return float(np.logaddexp(0, np.where(labels, -logits, logits)).mean())
    probabilities = np.clip(scores.astype(np.float64), _EPSILON, 1 - _EPSILON)
    return float(-np.log(np.where(labels, probabilities, 1 - probabilities)).mean())
