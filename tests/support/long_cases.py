"""How often values of tests are tried: some each time, all by `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

# Between two rounds of who asks all the time: the servers that they ask have the same cores.
BREATH_S = 0.2


def one_in(number: int, values: Iterable[Any]) -> list[Any]:
    """The values, of which one in a number, the first of them too, is tried each time, and the others are `long`."""
    return [value if index % number == 0 else _long(value) for index, value in enumerate(values)]


def fewer_examples(test: Any) -> Any:
    """A decorator for tests of hypothesis whose examples export a model: `make test-all` tries a quarter of them."""
    few, some = settings.get_profile("short").max_examples, settings().max_examples
    return settings(max_examples=max(few, some // 4))(test)


def _long(value: Any) -> Any:
    if hasattr(value, "marks"):  # of pytest.param
        return pytest.param(*value.values, id=value.id, marks=[*value.marks, pytest.mark.long])
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
