"""A minute of load, and ten seconds of too much; `make soak` takes half an hour and tells figures."""

from pathlib import Path

import pytest

from tests.soak.overload import overload
from tests.soak.soak import growth, soak

SECONDS = 60


@pytest.mark.timeout(SECONDS + 180)
def test_a_minute_of_load_is_answered_right_and_nothing_grows(tmp_path: Path) -> None:
    soaked = soak(tmp_path, SECONDS)
    print(soaked.line())
    assert soaked.wrong == []
    assert soaked.errors == {}
    assert soaked.checked == soaked.answers > 1000
    assert soaked.memory_bytes < 50e6
    assert soaked.descriptors <= 10
    assert soaked.threads <= 10


def test_more_load_than_there_is_capacity_is_refused_by_type_and_forgotten(tmp_path: Path) -> None:
    overloaded = overload(tmp_path, 4.0)
    print(overloaded.line())
    assert overloaded.wrong == []
    assert overloaded.others == {}  # nothing waits until its deadline
    assert overloaded.refused > 100
    assert overloaded.checked > 100
    assert overloaded.recovered_s is not None


def test_growth_is_seen() -> None:
    assert growth([0] * 10 + [7] * 80 + [19] * 10) == 12
    assert growth([3] * 100) == 0
