"""The parameters of a request: each has a type, and anybody may send anything."""

import json
from typing import Any

import pytest

from serving.backend.parameters import Parameters
from serving.errors import InvalidRequest

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("text", ["", "{}", '{"other": [1]}'])
def test_there_may_be_none(text: str) -> None:
    found = Parameters(text)
    assert (found.features, found.tables, found.once, found.bundle, found.trace) == (None,) * 5
    assert found.every_host is False


def test_each_is_read() -> None:
    said = {"features": "b,a", "tables": "t", "once": "", "bundle": "00", "every_host": True, "traceparent": TRACE}
    found = Parameters(json.dumps(said))
    assert (found.features, found.tables, found.once) == (["b", "a"], ["t"], [])
    assert (found.bundle, found.every_host, found.trace) == ("00", True, TRACE)


WRONG: dict[str, list[Any]] = {
    **{name: [7, True, 0.5, [], {}] for name in ("features", "tables", "once", "bundle")},
    "every_host": [1, 0, "true", []],
}


@pytest.mark.parametrize(("parameter", "value"), [(name, each) for name, wrong in WRONG.items() for each in wrong])
def test_one_of_another_type_is_refused_by_name(parameter: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"parameter {parameter}: expected "):
        Parameters(json.dumps({parameter: value}))


@pytest.mark.parametrize(
    "value",
    [7, True, 0.5, [TRACE], "", "x", f"{TRACE}\n", f" {TRACE}", TRACE.upper(), TRACE[:-1], f"{TRACE}-more" * 1000],
)
def test_a_trace_context_that_is_none_counts_as_none(value: Any) -> None:
    """As https://www.w3.org/TR/trace-context/ says; the log and captured requests name it."""
    assert Parameters(json.dumps({"traceparent": value})).trace is None
