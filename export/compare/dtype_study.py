"""What is measured of dtypes on labelled rows, and what was found: a part of `study.json`."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from export.compare.labelled_rows import LabelledRows
from serving.arguments import check_arguments
from serving.bundle.formats import WeightDtype
from serving.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class DtypeOptions:
    """What is measured, and how much may be lost.

    Attributes:
        rows: the labelled rows.
        output: the output whose AUC is measured. None: the only one with one number for each sample.
        max_auc_loss: the most AUC that the recommended bundle may lose.
        dtypes: the dtypes to measure. FP32 is measured in any case.

    Raises:
        ConfigurationError: the limit is not in (0, 1).
    """

    rows: LabelledRows
    output: str | None
    max_auc_loss: float
    dtypes: Sequence[WeightDtype] = (*WeightDtype,)

    def __post_init__(self) -> None:
        check_arguments(self)
        if not 0 < self.max_auc_loss < 1:
            raise ConfigurationError(f"max_auc_loss: expected > 0 and < 1, got {self.max_auc_loss}")


class AucLoss(msgspec.Struct, frozen=True):
    """The AUC of some scores.

    Attributes:
        auc: on some labelled rows, in [0, 1].
        loss: the trained model's AUC minus this one. Negative: this one is larger.
        low, high: the interval of `loss`.
    """

    auc: float
    loss: float
    low: float
    high: float


class Measured(msgspec.Struct, frozen=True):
    """A bundle on some labelled rows.

    Attributes:
        bytes: stored bytes of all tables.
        auc: AUC, and what it loses beside the trained model.
        log_loss: mean of −log of the probability of the label. See `DtypeStudy.is_sigmoid`.
    """

    bytes: int
    auc: AucLoss
    log_loss: float


class MeasuredBundle(msgspec.Struct, frozen=True):
    """A bundle with a dtype for each table.

    Attributes:
        dtypes: the dtype of each table, in small letters.
        measured: on the rows that choose.
        held_out: on the held-out rows. None: no rows are held out.
    """

    dtypes: dict[str, str]
    measured: Measured
    held_out: Measured | None


class ComparedRows(msgspec.Struct, frozen=True):
    """Labelled rows, and the trained model on them.

    Attributes:
        rows: number of rows.
        ones: how many of them are labelled 1.
        trained_auc, trained_log_loss: of the trained model.
    """

    rows: int
    ones: int
    trained_auc: float
    trained_log_loss: float


class DtypeStudy(msgspec.Struct, frozen=True):
    """The AUC that dtypes cost.

    Attributes:
        labelled: the file or folder with the rows.
        label: the column with the labels. None: JSON lines, which have them.
        output: the output that is compared with the labels.
        choosing: the rows that choose the bundle to recommend: half of all. `bundles`, `tables` and
            `MeasuredBundle.measured` are of these rows.
        held_out: the other half, which confirms it. None: there are too few rows for halves, and all choose.
        runs_model: whether the trained model is its own forward. If not, it is a bundle with FP32 rows.
        is_sigmoid: whether log loss is of the sigmoid of scores, because some score is outside [0, 1].
        max_auc_loss: the most AUC that the recommended bundle may lose.
        confidence: how likely an interval holds the true loss, in [0, 1].
        bundles: all tables in one dtype, by dtype.
        tables: one table in a dtype and all others in FP32, by table and dtype.
        refusals: why a table cannot have a dtype, by table and dtype.
        steps: bundles from the smallest to all tables in FP32, of which one is recommended.
        contradicted: smaller bundles that the choosing rows would recommend, and that lose more than the limit on the
            held-out rows.
        recommended: the smallest bundle whose loss is certain to keep to the limit, and that is not contradicted.
        reason: why.
    """

    labelled: str
    label: str | None
    output: str
    choosing: ComparedRows
    held_out: ComparedRows | None
    runs_model: bool
    is_sigmoid: bool
    max_auc_loss: float
    confidence: float
    bundles: dict[str, Measured]
    tables: dict[str, dict[str, Measured]]
    refusals: dict[str, dict[str, str]]
    steps: list[MeasuredBundle]
    contradicted: list[MeasuredBundle]
    recommended: MeasuredBundle
    reason: str
