"""How often values of tests are tried: some each time, all by `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest

# Between two rounds of who asks all the time: the servers that they ask have the same cores.
BREATH_S = 0.2


def one_in(number: int, values: Iterable[Any]) -> list[Any]:
    """The values, of which one in a number, the first of them too, is tried each time, and the others are `long`."""
    return [value if index % number == 0 else _long(value) for index, value in enumerate(values)]


def _long(value: Any) -> Any:
    if hasattr(value, "marks"):  # of pytest.param
        return pytest.param(*value.values, id=value.id, marks=[*value.marks, pytest.mark.long])
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
