"""Faults under a load of scores; `make faults` does them more often and tells how long they took."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults import memory, whole
from tests.support.leak_check import keeps_growing


@pytest.mark.promise(
    "A version with a damaged `scores.pt` or `ids.bin` is refused by file name, and the serving version continues"
)
@pytest.mark.parametrize(
    "damages",
    [
        pytest.param(whole.DAMAGES[::4], id="some"),
        pytest.param(whole.DAMAGES, id="all", marks=pytest.mark.long),
    ],
)
def test_a_version_with_damaged_scores_or_ids_is_not_loaded(tmp_path: Path, damages: list[Any]) -> None:
    result = whole.damaged_rolled_out(tmp_path, damages)
    print(result.line())
    assert (result.wrong, result.failed) == (0, 0)
    assert result.version == 2 + len(damages)
    for (file, _), said in zip(damages, result.refused, strict=True):
        assert file in said


@pytest.mark.promise("Requests for scores that would wait too long are refused, and the others are right")
def test_scores_that_would_wait_too_long_are_refused_and_others_are_right(tmp_path: Path) -> None:
    result = whole.shed(tmp_path, at_once=64)
    print(result.line())
    assert result.unexpected == []
    assert result.right > 0
    assert result.refused > 0
    assert result.afterwards == 16


@pytest.mark.long
def test_the_memory_of_huge_dense_inputs_is_given_back(tmp_path: Path) -> None:
    """0.4 GB for a request of one sample."""
    result = memory.huge(tmp_path, whole.large_message(33_000_000), times=5, make_oracle=whole.published)
    print(result.line())
    # Some do not fit into the instance's shared memory beside what the first left there.
    assert result.refusals <= {"INVALID_ARGUMENT", "INTERNAL"}
    assert result.right == 16
    assert not keeps_growing(result.kept_bytes, result.request_bytes // 2), result.kept_bytes
