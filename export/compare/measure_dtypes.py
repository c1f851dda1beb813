"""Measure the AUC that dtypes cost on labelled rows, and recommend a dtype for each table."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from export.batchability.differences import Numbers
from export.compare.auc_loss import CONFIDENCE
from export.compare.choose_dtypes import Candidate, Choice, Dtypes, TableOption, choose, widening_steps
from export.compare.dtype_scores import DtypeScorer, StoredDtype, choose_output, store_dtype
from export.compare.dtype_study import DtypeOptions, DtypeStudy, Measured, MeasuredBundle
from export.compare.halves import LEAST_ROWS, Comparison
from export.compare.labelled_rows import LabelledBatch, LabelledColumns
from export.prepare import Prepared
from export.scores.labelled_requests import Labels
from serving.bundle.formats import WeightDtype
from serving.errors import ConfigurationError
from serving.files import as_text

EXACT = WeightDtype.FP32
# A bundle is not measured if it is expected to lose more than this many times the limit.
_HOPELESS = 4.0

Show = Callable[[str, int, int], None]
T = TypeVar("T")


def measure_dtypes(prepared: Prepared, options: DtypeOptions, show: Show = lambda *_: None) -> DtypeStudy:
    """Measure every dtype on labelled rows, for all tables and for each alone; then the bundles that may be smallest.

    Half of the rows chooses the bundle to recommend, and the other half confirms it. The rows are read twice: once
    for the dtypes, and once for these bundles. On the disk, the tables take the bytes of all dtypes together: 8 for
    each element at most. Memory is 4 bytes for each row and bundle of a pass, or 8 while they are joined, and 200 for
    each row.

    Args:
        prepared: the model, with scores and FP32 tables.
        options: rows, limit and dtypes.
        show: called as rows are scored: with the step, the number of rows so far, and 0.

    Raises:
        ConfigurationError: the rows cannot be read or scored, a label is not 0 or 1, or all are the same.
        CheckpointError, QuantizeError: a table cannot be stored.
        ModelError: a score is not a number.
    """
    assert prepared.scored is not None  # noqa: S101
    manifest, part = prepared.manifest, prepared.scored.part
    output = choose_output(part, options.output)
    columns = LabelledColumns(
        features=[*manifest.keys],
        dense=[dense.name for dense in part.inputs],
        weighted=manifest.weighted_keys,
        outputs=[part_output.name for part_output in part.outputs],
        output=output.name,
    )
    read = options.rows.open(columns)
    with tempfile.TemporaryDirectory(prefix="tbe-compare-") as folder, ExitStack() as stack:
        stored = {}
        for dtype in sorted({*options.dtypes, EXACT}, key=lambda dtype: dtype.format.bits):
            show(f"storing {dtype.value.lower()}", 0, 0)
            stored[dtype] = store_dtype(Path(folder) / dtype.value, prepared, dtype)
            stack.enter_context(stored[dtype].engine)
        scorer = DtypeScorer(prepared, stored, output)
        score_rows = partial(_score_rows, read, scorer, show)
        dtypes = _measure_dtypes(prepared, stored, score_rows)
        candidates = _measure_candidates(prepared, options, dtypes, score_rows)
    return _study(options, columns, stored, dtypes, candidates)


@dataclass(frozen=True, eq=False, slots=True)
class _ScoredRows:
    """All rows, scored.

    Attributes:
        labels: bool [n].
        by_model: the scores of the trained model [n]; None if it cannot be run.
        by_bundle: the scores of each bundle, [n] each.
    """

    labels: Labels
    by_model: Numbers | None
    by_bundle: list[Numbers]


def _score_rows(
    read: Callable[[], Iterator[LabelledBatch]], scorer: DtypeScorer, show: Show, step: str, bundles: Sequence[Dtypes]
) -> _ScoredRows:
    labels: list[Labels] = []
    by_model: list[Numbers] = []
    by_bundle: list[list[Numbers]] = [[] for _ in bundles]
    rows = 0
    for batch in read():
        scores, scores_of_model = scorer.score(batch, bundles)
        labels.append(batch.labels)
        for batches, scores_of_bundle in zip(by_bundle, scores, strict=True):
            batches.append(scores_of_bundle)
        if scores_of_model is not None:
            by_model.append(scores_of_model)
        rows += batch.labels.size
        show(step, rows, 0)
    if not labels:
        raise ConfigurationError("labelled: expected rows, got none")
    return _ScoredRows(
        np.concatenate(labels),
        np.concatenate(by_model) if by_model else None,
        [np.concatenate(batches) for batches in by_bundle],
    )


ScoreRows = Callable[[str, Sequence[Dtypes]], _ScoredRows]


@dataclass(frozen=True, eq=False, slots=True)
class _MeasuredDtypes:
    """What the first pass over the rows measured.

    Attributes:
        comparison: compares with the trained model.
        runs_model: whether that is its own forward, or a bundle with FP32 rows.
        whole: all tables in one dtype, by dtype.
        alone: one table in a dtype and all others in FP32, by table and dtype, on the choosing rows.
    """

    comparison: Comparison
    runs_model: bool
    whole: Mapping[WeightDtype, Candidate]
    alone: Mapping[str, Mapping[WeightDtype, Measured]]


def _measure_dtypes(
    prepared: Prepared, stored: Mapping[WeightDtype, StoredDtype], score_rows: ScoreRows
) -> _MeasuredDtypes:
    tables = [table.name for table in prepared.manifest.tables]
    exact = dict.fromkeys(tables, EXACT)
    whole = [dtype for dtype, stored_dtype in stored.items() if not stored_dtype.refusals]
    alone = [
        (table, dtype)
        for table in tables
        for dtype, stored_dtype in stored.items()
        if dtype is not EXACT and table not in stored_dtype.refusals
    ]
    bundles = [
        *(dict.fromkeys(tables, dtype) for dtype in whole),
        *({**exact, table: dtype} for table, dtype in alone),
    ]
    scored = score_rows("scoring in each dtype", bundles)
    trained = scored.by_bundle[whole.index(EXACT)] if scored.by_model is None else scored.by_model
    comparison = Comparison(prepared.manifest.tables, scored.labels, trained)
    measured = comparison.choosing.measure(bundles, scored.by_bundle)
    by_table: dict[str, dict[WeightDtype, Measured]] = {table: {} for table in tables}
    for (table, dtype), measured_alone in zip(alone, measured[len(whole) :], strict=True):
        by_table[table][dtype] = measured_alone
    estimates = [max(of_bundle.auc.loss, 0.0) for of_bundle in measured]
    held_out = _held_out(comparison, bundles[: len(whole)], scored.by_bundle[: len(whole)])
    candidates = map(Candidate, bundles, estimates, measured, held_out)  # ends with `held_out`
    return _MeasuredDtypes(
        comparison, scored.by_model is not None, dict(zip(whole, candidates, strict=True)), by_table
    )


def _held_out(
    comparison: Comparison, bundles: Sequence[Dtypes], scores: Sequence[Numbers]
) -> Sequence[Measured | None]:
    """Each of the bundles on the held-out rows, if there are any."""
    return [None] * len(bundles) if comparison.held_out is None else comparison.held_out.measure(bundles, scores)


def _measure_candidates(
    prepared: Prepared, options: DtypeOptions, dtypes: _MeasuredDtypes, score_rows: ScoreRows
) -> list[Candidate]:
    """The bundles that may be the smallest within the limit, measured; from the smallest to all tables in FP32."""
    table_options = {}
    for table in prepared.manifest.tables:
        losses = {dtype: measured.auc.loss for dtype, measured in dtypes.alone[table.name].items()} | {EXACT: 0.0}
        table_options[table.name] = [
            TableOption(dtype, table.rows * dtype.row_bytes(table.dim), loss) for dtype, loss in losses.items()
        ]
    most = _HOPELESS * options.max_auc_loss
    steps = [(step, estimate) for step, estimate in widening_steps(table_options) if estimate <= most]
    bundles = [step for step, _ in steps]
    scored = score_rows("scoring the smallest bundles", bundles)
    estimates = [estimate for _, estimate in steps]
    measured = dtypes.comparison.choosing.measure(bundles, scored.by_bundle)
    held_out = _held_out(dtypes.comparison, bundles, scored.by_bundle)
    return [*map(Candidate, bundles, estimates, measured, held_out)]


def _study(
    options: DtypeOptions,
    columns: LabelledColumns,
    stored: Mapping[WeightDtype, StoredDtype],
    dtypes: _MeasuredDtypes,
    candidates: Sequence[Candidate],
) -> DtypeStudy:
    comparison, exact = dtypes.comparison, candidates[-1]
    choice = Choice(exact, None, [])
    if comparison.held_out is not None:
        choice = choose([*candidates, *dtypes.whole.values()], exact, options.max_auc_loss)
    return DtypeStudy(
        labelled=as_text(str(options.rows.path)),
        label=options.rows.label,
        output=columns.output,
        choosing=comparison.choosing.compared,
        held_out=None if comparison.held_out is None else comparison.held_out.compared,
        runs_model=dtypes.runs_model,
        is_sigmoid=comparison.is_sigmoid,
        max_auc_loss=options.max_auc_loss,
        confidence=CONFIDENCE,
        bundles=_by_name({dtype: candidate.measured for dtype, candidate in dtypes.whole.items()}),
        tables={table: _by_name(measured) for table, measured in dtypes.alone.items()},
        refusals={
            table: _by_name({d: s.refusals[table] for d, s in stored.items() if table in s.refusals})
            for table in exact.dtypes
        },
        steps=[_bundle(candidate) for candidate in candidates],
        contradicted=[_bundle(candidate) for candidate in choice.contradicted],
        recommended=_bundle(choice.best),
        reason=_reason(choice, exact, comparison, options.max_auc_loss),
    )


def _reason(choice: Choice, exact: Candidate, comparison: Comparison, limit: float) -> str:
    """Why no smaller bundle is recommended, and whether the held-out rows confirm this one."""
    if comparison.held_out is None:
        rows, ones = comparison.choosing.compared.rows, comparison.choosing.compared.ones
        return (
            f"the halves of these rows are too small to choose on one and to confirm on the other: {2 * LEAST_ROWS} "
            f"rows of each label are needed, {min(ones, rows - ones)} have the rarer one"
        )
    best, ended_by = choice.best, choice.ended_by
    reasons = []
    if choice.contradicted:
        reasons.append("so does a smaller bundle, which the held-out rows contradict")
    if ended_by is not None:
        start = "no smaller bundle is certain to: " if best is exact and not choice.contradicted else ""
        loss = ended_by.measured.auc
        end = ": more rows make this interval narrower" if best is exact else ""
        reasons.append(
            f"{start}the next smaller bundle may lose more: {loss.loss:.5f} ({loss.low:.5f} to {loss.high:.5f}){end}"
        )
    if best is not exact and best.held_out is not None and best.held_out.auc.high > limit:
        reasons.append(
            f"the held-out rows cannot confirm it: their interval reaches {best.held_out.auc.high:.5f}: more rows "
            "make it narrower"
        )
    return "; ".join(reasons) or "no smaller bundle was found"


def _by_name(by_dtype: Mapping[WeightDtype, T]) -> dict[str, T]:
    return {dtype.value.lower(): value for dtype, value in by_dtype.items()}


def _bundle(candidate: Candidate) -> MeasuredBundle:
    return MeasuredBundle(
        {table: dtype.value.lower() for table, dtype in candidate.dtypes.items()},
        candidate.measured,
        candidate.held_out,
    )
