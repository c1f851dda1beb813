"""The parameters of a request: each has a type, and anybody may send anything."""

import json
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from serving.errors import InvalidRequest
from serving.requests.parameters import PARAMETERS, decode_parameters, encode_parameters
from serving.requests.types import Tensors

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("text", ["", "{}", '{"other": [1]}'])
def test_parameters_may_be_absent(text: str) -> None:
    assert decode_parameters(text) == {}


def test_each_parameter_is_read() -> None:
    said = {"features": "b,a", "tables": "t", "once": "", "bundle": "00", "part_of": "1/2", "every_host": True}
    assert decode_parameters(json.dumps(said | {"traceparent": TRACE})) == {
        "features": ["b", "a"],
        "tables": ["t"],
        "shared": [],
        "bundle": "00",
        "part_of": "1/2",
        "every_host": True,
        "trace": TRACE,
    }


def test_encoded_parameters_are_decoded() -> None:
    """Of every field that has a parameter; nothing is sent for one that says nothing."""
    values, lengths = np.array([1]), np.array([1], np.int32)
    said = {
        "features": ["b", "a"],
        "tables": ["t"],
        "shared": ["b"],
        "bundle": "00",
        "part_of": "1/2",
        "trace": TRACE,
    }
    tensors = Tensors(values=values, lengths=lengths, every_host=True, **said)  # type: ignore[arg-type]
    assert decode_parameters(sent(tensors)) == said | {"every_host": True}
    assert (said | {"every_host": True}).keys() == PARAMETERS.keys()
    assert sent(Tensors(None, values, lengths)) == "{}"
    assert decode_parameters(sent(Tensors([], values, lengths, tables=[]))) == {"features": [], "tables": []}
    assert json.loads(sent(tensors, but=PARAMETERS.keys() - {"shared"})) == {"once": "b"}


def sent(tensors: Tensors, but: Collection[str] = ()) -> str:
    """The parameters as Triton hands them over."""
    request = pb.ModelInferRequest()
    encode_parameters(tensors, request.parameters, but)
    choices = {name: value.WhichOneof("parameter_choice") for name, value in request.parameters.items()}
    return json.dumps({name: getattr(request.parameters[name], choice) for name, choice in choices.items()})


WRONG: dict[str, list[Any]] = {
    **{name: [7, True, 0.5, [], {}] for name in ("features", "tables", "once", "bundle", "part_of")},
    "every_host": [1, 0, "true", []],
}


@pytest.mark.parametrize(("parameter", "value"), [(name, value) for name, wrong in WRONG.items() for value in wrong])
def test_a_parameter_of_another_type_is_refused_by_name(parameter: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"parameter {parameter}: expected "):
        decode_parameters(json.dumps({parameter: value}))


@pytest.mark.parametrize(
    "value",
    [7, True, 0.5, [TRACE], "", "x", f"{TRACE}\n", f" {TRACE}", TRACE.upper(), TRACE[:-1], f"{TRACE}-more" * 1000],
)
def test_an_invalid_trace_context_is_ignored(value: Any) -> None:
    """As https://www.w3.org/TR/trace-context/ says; the log and captured requests name it."""
    assert decode_parameters(json.dumps({"traceparent": value})) == {"trace": None}
