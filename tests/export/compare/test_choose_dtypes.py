"""Which bundles are measured, and which of the measured ones is recommended."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.compare.choose_dtypes import Candidate, TableOption, choose, widening_steps
from export.compare.dtype_study import AucLoss, Measured
from serving.bundle.formats import WeightDtype

FP32, FP16, INT8, INT4 = WeightDtype.FP32, WeightDtype.FP16, WeightDtype.INT8, WeightDtype.INT4
BYTES = {FP32: 40, FP16: 20, INT8: 12, INT4: 8}


def options(**losses: float) -> list[TableOption]:
    """Of a table: its dtypes with the loss of each, and FP32."""
    return [TableOption(FP32, 40, 0.0)] + [
        TableOption(WeightDtype[name], BYTES[WeightDtype[name]], loss) for name, loss in losses.items()
    ]


def test_steps_widen_the_table_that_gains_most_per_byte() -> None:
    steps = widening_steps(
        {"matters": options(INT4=0.1, INT8=0.001, FP16=0.0), "idle": options(INT4=0.002, INT8=-0.1, FP16=0.0)}
    )
    assert [tuple(dtypes.values()) for dtypes, _ in steps] == [
        (INT4, INT4),
        (INT8, INT4),
        (INT8, INT8),
        (FP16, INT8),
        (FP32, FP32),
    ]
    assert [loss for _, loss in steps] == pytest.approx([0.102, 0.003, 0.001, 0, 0])


@given(
    st.lists(
        st.fixed_dictionaries({"INT4": st.floats(-0.01, 0.1), "INT8": st.floats(-0.01, 0.1)}), min_size=1, max_size=4
    ),
)
def test_no_bundle_is_smaller_and_loses_less_than_a_step(losses: list[dict[str, float]]) -> None:
    """Of all combinations of dtypes."""
    tables = {f"t{number}": options(**of_table) for number, of_table in enumerate(losses)}
    combinations = [
        (sum(option.bytes for option in combination), sum(max(option.loss, 0) for option in combination))
        for combination in product(*tables.values())
    ]
    for dtypes, loss in widening_steps(tables)[:-1]:
        size = sum(BYTES[dtype] for dtype in dtypes.values())
        assert not [1 for bytes_, other in combinations if bytes_ < size and other < loss - 1e-9]


def candidate(size: int, estimate: float, high: float, held_out: tuple[float, float] = (0, 0)) -> Candidate:
    """`held_out`: the interval on the held-out rows."""
    low, high_held_out = held_out
    return Candidate(
        {f"t{size}": FP32},
        estimate,
        Measured(size, AucLoss(0.7, estimate, -high, high), 0.6),
        Measured(size, AucLoss(0.7, (low + high_held_out) / 2, low, high_held_out), 0.6),
    )


EXACT = candidate(100, 0, 0)
LIMIT = 0.005


@pytest.mark.parametrize(
    ("candidates", "size", "ended_by"),
    [
        pytest.param([(50, 0.001, 0.002), (30, 0.002, 0.004)], 30, None, id="all keep to it"),
        pytest.param([(50, 0.001, 0.002), (30, 0.002, 0.006)], 50, 30, id="the smallest may lose more"),
        pytest.param([(50, 0.001, 0.006), (30, 0.002, 0.004)], 100, 50, id="luck after a failure does not count"),
        pytest.param([(50, 0.001, 0.002), (60, 0.002, 0.006), (30, 0.003, 0.004)], 30, None, id="larger ones do not end it"),
        pytest.param([], 100, None, id="none"),
    ],
)  # fmt: skip
def test_the_smallest_bundle_certain_to_keep_the_limit_is_chosen(
    candidates: list[tuple[int, float, float]], size: int, ended_by: int | None
) -> None:
    choice = choose([candidate(*numbers) for numbers in reversed(candidates)] + [EXACT], EXACT, LIMIT)
    assert choice.best.measured.bytes == size
    assert (None if choice.ended_by is None else choice.ended_by.measured.bytes) == ended_by
    assert choice.contradicted == []


ABOVE, AROUND, BELOW = (0.006, 0.009), (0.004, 0.009), (0.001, 0.004)


@pytest.mark.parametrize(
    ("held_out", "size", "contradicted"),
    [
        pytest.param({30: ABOVE, 50: BELOW}, 50, [30], id="the next one is larger"),
        pytest.param({30: ABOVE, 50: ABOVE}, 100, [30, 50], id="none is left"),
        pytest.param({30: AROUND, 50: BELOW}, 30, [], id="noise contradicts nothing"),
        pytest.param({30: BELOW, 50: ABOVE}, 30, [], id="larger ones do not count"),
    ],
)
def test_a_bundle_that_held_out_rows_contradict_is_not_chosen(
    held_out: dict[int, tuple[float, float]], size: int, contradicted: list[int]
) -> None:
    candidates = [candidate(size, 0.001 * (60 - size), 0.004, interval) for size, interval in held_out.items()]
    choice = choose([*candidates, EXACT], EXACT, LIMIT)
    assert choice.best.measured.bytes == size
    assert [bundle.measured.bytes for bundle in choice.contradicted] == contradicted


def test_a_skipped_larger_bundle_replaces_a_contradicted_one() -> None:
    """It was not tested, because a smaller one with less loss was certain."""
    chosen, skipped = candidate(30, 0.0, 0.004, ABOVE), candidate(50, 0.001, 0.004, BELOW)
    assert choose([chosen, skipped, EXACT], EXACT, LIMIT).best is skipped
