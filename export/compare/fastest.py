"""The fastest placements, as far as a measurement can tell."""

from collections.abc import Sequence

from export.compare.study import Placement, Verdict
from serving.bench.report import Figure

IN_ONE_PROCESS = "over_one_rank"
SIDE_BY_SIDE = "side_by_side_over_one_rank"


def judge(placements: Sequence[Placement]) -> list[Verdict]:
    """Say which placements are fastest, for each number of ranks, dtype and measure.

    Placements with an error are left out.
    """
    groups: dict[tuple[int, str], list[Placement]] = {}
    for each in placements:
        if each.error is None:
            groups.setdefault((each.ranks, each.dtype), []).append(each)
    return [
        Verdict(ranks=ranks, dtype=dtype, measure=measure, fastest=_fastest(group, measure))
        for (ranks, dtype), group in groups.items()
        for measure in (IN_ONE_PROCESS, SIDE_BY_SIDE)
    ]


def figure_of(placement: Placement, measure: str) -> Figure:
    """The figure that a verdict is about."""
    found: Figure = getattr(placement, measure)
    return found


def _fastest(placements: Sequence[Placement], measure: str) -> list[str]:
    best, *others = sorted(placements, key=lambda each: figure_of(each, measure).median)
    limit = figure_of(best, measure).high
    return [best.strategy, *(each.strategy for each in others if figure_of(each, measure).low <= limit)]
