"""Two halves of the labelled rows: one half chooses the bundle to recommend, and the other half confirms it.

Of many bundles, the best one on some rows partly owes its rank to chance. Its loss on rows that were not used to
choose it is free of this bias.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from export.batchability.differences import Numbers
from export.compare.auc_loss import PairedAuc
from export.compare.choose_dtypes import Dtypes
from export.compare.dtype_study import ComparedRows, Measured
from export.scores.labelled_requests import Labels
from export.scores.log_loss import are_probabilities, log_loss_of
from serving.bundle.tables import Table
from serving.errors import ConfigurationError

# Fewest rows of each label in each half. With fewer, the intervals are too narrow.
LEAST_ROWS = 10

RowNumbers = npt.NDArray[np.intp]


def split_rows(labels: Labels) -> tuple[RowNumbers, RowNumbers | None]:
    """The numbers of the rows that choose, and of those that confirm.

    The rows of each label are divided at random, with a fixed seed, so that both halves have equally many rows of
    each label, even if the labels of a file alternate. If a half would have fewer than `LEAST_ROWS` rows of a label,
    all rows choose.

    Args:
        labels: bool [n].
    """
    random = np.random.default_rng(0)
    by_label = [random.permutation(np.flatnonzero(labels == label)) for label in (False, True)]
    if min(numbers.size for numbers in by_label) < 2 * LEAST_ROWS:
        return np.arange(labels.size), None
    choosing = [numbers[: (numbers.size + 1) // 2] for numbers in by_label]
    held_out = [numbers[(numbers.size + 1) // 2 :] for numbers in by_label]
    return np.sort(np.concatenate(choosing)), np.sort(np.concatenate(held_out))


class Comparison:
    """Bundles beside the trained model, on each half of the rows.

    Args:
        tables: of the model.
        labels: bool [n].
        trained: the trained model's scores [n].

    Attributes:
        choosing: the rows that choose.
        held_out: the rows that confirm. None: there are too few rows.
        is_sigmoid: whether log loss is of the sigmoid of scores.

    Raises:
        ConfigurationError: all labels are the same.
    """

    def __init__(self, tables: Sequence[Table], labels: Labels, trained: Numbers) -> None:
        if labels.all() or not labels.any():
            raise ConfigurationError(
                f"labelled: expected rows labelled 0 and rows labelled 1, all {labels.size} are {int(labels[0])}"
            )
        self.is_sigmoid = not are_probabilities(trained)
        choosing, held_out = split_rows(labels)
        self.choosing = Half(tables, choosing, labels, trained, is_sigmoid=self.is_sigmoid)
        self.held_out = (
            None if held_out is None else Half(tables, held_out, labels, trained, is_sigmoid=self.is_sigmoid)
        )


class Half:
    """Bundles beside the trained model, on some of the rows.

    Args:
        tables: of the model.
        numbers: of the rows.
        labels: of all rows, bool [n].
        trained: the trained model's scores of all rows [n].
        is_sigmoid: whether log loss is of the sigmoid of scores.

    Attributes:
        compared: the rows, and the trained model on them.
    """

    def __init__(
        self, tables: Sequence[Table], numbers: RowNumbers, labels: Labels, trained: Numbers, *, is_sigmoid: bool
    ) -> None:
        self._tables = tables
        self._numbers = numbers
        self._labels = labels[numbers]
        self._is_sigmoid = is_sigmoid
        self._paired = PairedAuc(self._labels, trained[numbers])
        self.compared = ComparedRows(
            rows=numbers.size,
            ones=int(self._labels.sum()),
            trained_auc=self._paired.trained_auc,
            trained_log_loss=self._log_loss(trained[numbers]),
        )

    def measure(self, bundles: Sequence[Dtypes], scores: Sequence[Numbers]) -> list[Measured]:
        """Each of the bundles, by its scores of all rows [n]."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # numpy sorts and adds without the GIL
            return [*pool.map(self._measured, bundles, scores)]

    def _measured(self, dtypes: Dtypes, scores: Numbers) -> Measured:
        scores = scores[self._numbers]
        size = sum(table.rows * dtypes[table.name].row_bytes(table.dim) for table in self._tables)
        return Measured(size, self._paired.loss_of(scores), self._log_loss(scores))

    def _log_loss(self, scores: Numbers) -> float:
        return log_loss_of(scores, self._labels, is_sigmoid=self._is_sigmoid)
