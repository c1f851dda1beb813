"""Which file of a lineage comes next, squashed or not, and which names are none."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.bundle.lineage import (
    MOST_DELTAS,
    Step,
    delta_path,
    files_of,
    needed_files,
    next_step,
    reached,
    step_of,
    step_of_file,
    steps_in,
)
from tests.support.deltas import listed

MOST = 8
# Some of all the steps that there can be between so many deltas.
STEPS = st.sets(st.sampled_from([Step(last, since) for last in range(1, MOST + 1) for since in range(last)]))


def furthest(steps: set[Step], sequence: int, until: int = MOST) -> int:
    """The delta that can be reached by any of some steps, found by trying each way."""
    ways = [
        furthest(steps, step.sequence, until) for step in steps if step.since <= sequence < step.sequence <= until
    ]
    return max(ways, default=sequence)


@given(STEPS, st.integers(0, MOST))
def test_sorted_steps_reach_as_far_as_any_path(steps: set[Step], sequence: int) -> None:
    assert reached(sorted(steps), sequence) == furthest(steps, sequence)


@given(STEPS, st.integers(0, MOST), st.integers(0, MOST))
def test_repeated_next_steps_reach_as_far_as_any_path(steps: set[Step], sequence: int, until: int) -> None:
    """And takes no more steps than there are: each goes on."""
    expected = furthest(steps, sequence, until)
    count = 0
    while (step := next_step(steps, sequence, until)) in steps and step.sequence <= until:
        sequence, count = step.sequence, count + 1
    assert sequence == expected
    assert count <= MOST


@given(st.integers(1, MOST_DELTAS), st.integers(0, MOST_DELTAS - 1))
def test_a_file_name_parses_back_to_its_step(sequence: int, since: int) -> None:
    step = Step(sequence, min(since, sequence - 1))
    assert step_of(delta_path(Path("f"), *step).name) == step


@pytest.mark.parametrize(
    "name",
    [
        "000000000007.since-6.safetensors",
        "000000000007.since-7.safetensors",
        "000000000007.since-9.safetensors",
        "000000000007.since-00.safetensors",
        "000000000007.since-01.safetensors",
        "000000000007.since-.safetensors",
        "000000000007.since--1.safetensors",
        "000000000007.since-0.0123456789abcdef.sig",
        "000000000007.since-0.safetensors.tmp",
        "7.since-0.safetensors",
        "000000000007.Since-0.safetensors",
        "٠٠٠٠٠٠٠٠٠٠٠٧.safetensors",
    ],
)
def test_files_with_other_names_are_ignored(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    (tmp_path / "000000000003.safetensors").touch()
    (tmp_path / "000000000009.since-3.safetensors").touch()
    assert step_of(name) is None
    assert steps_in(tmp_path) == [Step(3, 2), Step(9, 3)]
    assert listed(tmp_path) == [3]


def test_a_step_prints_its_range_of_deltas() -> None:
    assert [str(Step(7, 6)), str(Step(7, 2))] == ["delta 7", "deltas 3 to 7"]


def test_files_of_deltas_come_before_their_signatures() -> None:
    sign = "0123456789abcdef.sig"
    names = [
        f"000000000007.{sign}",
        "000000000007.safetensors",
        f"000000000007.since-2.{sign}",
        "000000000008.safetensors",
    ]
    names += ["000000000007.since-2.safetensors", ".read", f"7.{sign}", f"000000000007.since-9.{sign}"]
    assert files_of(names, [Step(7, 6)]) == ["000000000007.safetensors", f"000000000007.{sign}"]
    assert files_of(names, {Step(7, 2), Step(8, 7)}) == [names[3], names[4], names[2]]
    assert [step_of_file(name) for name in names[-3:]] == [None] * 3


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        pytest.param(0, ["6 since 0", "6", "7"], id="all"),
        pytest.param(5, ["6", "7"], id="has applied the last that is squashed"),
        pytest.param(6, ["7"], id="is behind it"),
    ],
)
def test_deltas_replaced_by_squashed_ones_are_not_needed(after: int, expected: list[str]) -> None:
    steps = {
        "4 since 0": Step(4, 0),
        "6 since 0": Step(6, 0),
        **{f"{number}": Step(number, number - 1) for number in range(1, 8)},
    }
    there = [delta_path(Path(), *step).name for step in steps.values() if step.sequence > after]
    assert {*needed_files(there, after)} == {delta_path(Path(), *steps[index]).name for index in expected}
