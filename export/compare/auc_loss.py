"""How much AUC is lost: the AUC of scores beside the trained model's on the same rows, with an interval."""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from export.batchability.differences import Numbers
from export.compare.dtype_study import AucLoss
from export.scores.auc import auc_of
from export.scores.labelled_requests import Labels

RESAMPLES = 200
# An interval is 1.96 standard deviations to each side: of a normal distribution, it misses 5 in 100.
CONFIDENCE = 0.95
_DEVIATIONS = 1.96
# Of pairs that were never seen to change their order, 5 in 200 samples would have shown none if this many were
# expected: -ln(0.025), from the Poisson distribution.
_UNSEEN_PAIRS = 3.69


class PairedAuc:
    """The AUC of several scores of the same rows, each compared with that of the trained model.

    The interval is a paired bootstrap over rows: both AUCs are computed on the same resample, so that the luck of
    the rows, which both share, is not part of the loss (B. Efron and R. J. Tibshirani, An Introduction to the
    Bootstrap, 1993, chapter 6). Its width has a lower bound that depends on the number of rows.

    Memory is 200 bytes for each row.

    Args:
        labels: bool [n], with both values.
        trained: the trained model's scores [n], without NaN.
    """

    def __init__(self, labels: Labels, trained: Numbers) -> None:
        random = np.random.default_rng(0)
        self._labels = labels
        self._counts = np.empty((RESAMPLES, labels.size), np.uint8)
        for counts in self._counts:  # how often each row is drawn
            counts[:] = np.bincount(random.integers(labels.size, size=labels.size), minlength=labels.size)
        self.trained_auc = auc_of(trained, labels)
        self._trained = resampled_aucs(trained, labels, self._counts)

    def loss_of(self, scores: Numbers) -> AucLoss:
        """The AUC of scores [n] without NaN, and what it is below the trained model's."""
        auc = auc_of(scores, self._labels)
        loss = self.trained_auc - auc
        losses = self._trained - resampled_aucs(scores, self._labels, self._counts)
        half = max(_DEVIATIONS * float(np.nanstd(losses)), self._resolution)
        return AucLoss(auc, loss, loss - half, loss + half)

    @cached_property
    def _resolution(self) -> float:
        ones = int(self._labels.sum())
        return _UNSEEN_PAIRS / (ones * (self._labels.size - ones))


def resampled_aucs(scores: Numbers, labels: Labels, counts: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """The AUC of scores on resamples of the rows: as `auc_of`, where equal scores count half.

    Args:
        scores: [n], without NaN.
        labels: bool [n].
        counts: how often each resample has each row [R, n].

    Returns:
        float64 [R]. NaN where all rows of a resample have one label.
    """
    order = np.argsort(scores)
    ascending = scores[order]
    starts = np.flatnonzero(np.concatenate([[True], ascending[1:] != ascending[:-1]]))  # of equal scores
    sorted_labels = labels[order]
    aucs = np.empty(len(counts))
    for resample, counts_of_rows in enumerate(counts):
        drawn = counts_of_rows[order]
        ones = np.add.reduceat(drawn * sorted_labels, starts, dtype=np.int64)
        zeros = np.add.reduceat(drawn, starts, dtype=np.int64) - ones
        below = np.cumsum(zeros) - zeros
        pairs = int(ones.sum()) * int(zeros.sum())
        aucs[resample] = float((ones * (2 * below + zeros)).sum()) / (2 * pairs) if pairs else np.nan
    return aucs
