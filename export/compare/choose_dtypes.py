"""Choose the dtype of each table by the AUC that is lost: the bundles to measure, and the one to recommend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from export.compare.dtype_study import Measured
from serving.bundle.formats import WeightDtype

# The dtype of each table.
Dtypes = Mapping[str, WeightDtype]


@dataclass(frozen=True, slots=True)
class TableOption:
    """A dtype that a table can be stored in.

    Attributes:
        dtype: the dtype.
        bytes: stored bytes of the table.
        loss: the AUC that is lost if this table alone has the dtype. 0 for FP32.
    """

    dtype: WeightDtype
    bytes: int
    loss: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A bundle that may be recommended.

    Attributes:
        dtypes: the dtype of each table.
        estimate: the AUC that it is expected to lose, by which candidates are ordered.
        measured: its bytes, and the AUC that it loses on the rows that choose.
        held_out: the same, on the held-out rows. None: no rows are held out.
    """

    dtypes: Dtypes
    estimate: float
    measured: Measured
    held_out: Measured | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The bundle to recommend.

    Attributes:
        best: the bundle.
        ended_by: the smaller one that ended the search, because it may lose more than the limit. None: all may be
            recommended.
        contradicted: smaller ones, the smallest first, that the choosing rows would recommend, and that lose more
            than the limit on the held-out rows.
    """

    best: Candidate
    ended_by: Candidate | None
    contradicted: Sequence[Candidate]


def widening_steps(options: Mapping[str, Sequence[TableOption]]) -> list[tuple[dict[str, WeightDtype], float]]:
    """Bundles from the smallest one to all in FP32, where each step widens the table that gains most AUC for a byte.

    The losses of tables are taken to add up. This is the greedy algorithm for the multiple-choice knapsack problem
    (P. Sinha and A. A. Zoltners, Operations Research 27, 1979).

    Args:
        options: of each table: its dtypes, with FP32.

    Returns:
        The dtypes of each bundle, and the sum of the losses of its tables, where a negative loss counts as 0.
    """
    hulls = {table: _hull(table_options) for table, table_options in options.items()}
    steps = [
        ((before.loss - after.loss) / (after.bytes - before.bytes), table, before, after)
        for table, hull in hulls.items()
        for before, after in pairwise(hull)
    ]
    dtypes = {table: hull[0].dtype for table, hull in hulls.items()}
    loss = sum(hull[0].loss for hull in hulls.values())
    bundles = [(dict(dtypes), loss)]
    for _, table, before, after in sorted(steps, key=lambda step: -step[0]):  # stable: a table's steps stay in order
        dtypes[table] = after.dtype
        loss -= before.loss - after.loss
        bundles.append((dict(dtypes), loss))
    exact = dict.fromkeys(options, WeightDtype.FP32)
    return bundles if bundles[-1][0] == exact else [*bundles, (exact, 0.0)]


def _hull(options: Sequence[TableOption]) -> list[TableOption]:
    """The options of a table that are worth their bytes: the lower convex hull of loss over bytes."""
    ascending = sorted(options, key=lambda option: option.bytes)
    ascending = [TableOption(option.dtype, option.bytes, max(option.loss, 0.0)) for option in ascending]
    hull = [ascending[0]]
    while wider := [option for option in ascending if option.loss < hull[-1].loss and option.bytes > hull[-1].bytes]:
        last = hull[-1]
        hull.append(max(wider, key=lambda option: (last.loss - option.loss) / (option.bytes - last.bytes)))
    return hull


def choose(candidates: Sequence[Candidate], exact: Candidate, limit: float) -> Choice:
    """The smallest bundle that is certain to keep to a limit, and that the held-out rows do not contradict.

    As in a fixed-sequence test, candidates are tested in order of their estimates, the least first, and the first
    that may lose more than the limit ends the search. So no bundle is picked because it was the luckiest of many.
    If its whole interval on the held-out rows is above the limit, it is left out, and the search is repeated.

    Args:
        candidates: in any order.
        exact: the bundle whose rows are the trained ones, which is recommended if no other is certain.
        limit: the most AUC that may be lost.
    """
    contradicted: list[Candidate] = []
    while True:
        best, ended_by = _smallest_certain(candidates, exact, limit)
        if best is exact or best.held_out is None or best.held_out.auc.low <= limit:
            return Choice(best, ended_by, contradicted)
        contradicted.append(best)
        candidates = [candidate for candidate in candidates if candidate.dtypes != best.dtypes]


def _smallest_certain(
    candidates: Sequence[Candidate], exact: Candidate, limit: float
) -> tuple[Candidate, Candidate | None]:
    """The smallest bundle that is certain by the rows that choose, and the one that ended the search, if one did."""
    best = exact
    for candidate in sorted(candidates, key=lambda candidate: (candidate.estimate, -candidate.measured.bytes)):
        if candidate.measured.bytes >= best.measured.bytes:
            continue
        if candidate.measured.auc.high > limit:
            return best, candidate
        best = candidate
    return best, None
