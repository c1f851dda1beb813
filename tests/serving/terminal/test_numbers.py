"""Numbers as people write them."""

import math

import pytest

from serving.errors import ConfigurationError
from serving.terminal.options import integer, real

LOOSE = ["", " 3", "3 ", "3\n", "1_000", "0x3", "0b1", "٣", "３", "²", "1,000", "--3", "3-", "x", "None", "True"]


@pytest.mark.parametrize("text", [*LOOSE, "+3", "3.0", "1e3", "nan", "9" * 5000])
def test_numbers_that_are_not_whole_are_refused_by_their_setting(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^id_policy: expected a whole number, got '"):
        integer("id_policy", text)


@pytest.mark.parametrize("text", [*LOOSE, ".", "e5", "1e", "1e5.0", "infinite", "1.2.3", "0x1p3"])
def test_values_that_are_no_numbers_are_refused_by_their_setting(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^max_error: expected a number, got '"):
        real("max_error", text)


@pytest.mark.parametrize("text", ["0", "3", "-3", "007", "123456789012345678901234567890"])
def test_whole_numbers_are_parsed(text: str) -> None:
    assert integer("x", text) == int(text)


@pytest.mark.parametrize(
    "text", ["0", "-3", "+3", ".5", "5.", "1e-05", "1E+5", "1.25e2", "inf", "-INF", "1e309", str(0.1)]
)
def test_numbers_are_parsed(text: str) -> None:
    assert real("x", text) == float(text)


def test_nan_is_parsed_and_left_to_configs_to_refuse() -> None:
    assert math.isnan(real("x", "NaN"))
