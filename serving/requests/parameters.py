"""The parameters of a request: the fields of `Tensors` that are not tensors.

A new option of a lookup is a field of `Tensors`, a line of `PARAMETERS`, and an argument of the clients' methods.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from serving.errors import InvalidRequest, Reason
from serving.requests.types import Tensors

# Triton's JSON for a request without parameters. A comparison is faster than parsing.
_NO_PARAMETERS = ("{}", "")
# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def _names(text: str) -> list[str]:
    return text.split(",") if text else []


def _trace(value: Any) -> str | None:
    """A `traceparent`, or None if it is malformed, as W3C requires."""
    return value if isinstance(value, str) and _TRACEPARENT.fullmatch(value) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of a ModelInferRequest.

    Attributes:
        name: the name of the parameter.
        kind: the type of its value.
        expected: describes the value in error messages.
        parse: converts a value to the value of the field.
        default: the value of the field if the parameter is missing. A default value is not sent.
    """

    name: str
    kind: type = str
    expected: str = ""
    parse: Callable[[Any], Any] = lambda value: value
    default: Any = None


_LISTED = "comma-separated names"
# By field of `Tensors`.
PARAMETERS: Mapping[str, Parameter] = {
    "features": Parameter(name="features", expected=_LISTED, parse=_names),
    "tables": Parameter(name="tables", expected=_LISTED, parse=_names),
    "shared": Parameter(name="once", expected=_LISTED, parse=_names, default=()),
    "bundle": Parameter(name="bundle", expected="a digest"),
    "part_of": Parameter(name="part_of", expected="a plan and a host"),
    "every_host": Parameter(name="every_host", kind=bool, expected="true or false", default=False),
    "trace": Parameter(name="traceparent", kind=object, parse=_trace),
}


def decode_parameters(text: str) -> dict[str, Any]:
    """Parse the parameters of a request into fields of `Tensors`.

    Args:
        text: the parameters in Triton's JSON.

    Raises:
        InvalidRequest: a parameter has the wrong type. The message names it.
    """
    if text in _NO_PARAMETERS:
        return {}
    sent: Mapping[str, Any] = json.loads(text)
    fields: dict[str, Any] = {}
    for name, parameter in PARAMETERS.items():
        value = sent.get(parameter.name)
        if value is None:
            continue
        if not isinstance(value, parameter.kind):
            raise InvalidRequest(
                f"parameter {parameter.name}: expected {parameter.expected}, got {value!r}", Reason.FEATURES
            )
        fields[name] = parameter.parse(value)
    return fields


def encode_parameters(tensors: Tensors, into: Any, but: Collection[str] = ()) -> None:
    """Add the parameters of a request to those of a ModelInferRequest.

    Args:
        tensors: the request.
        into: the message's `parameters`.
        but: fields to leave out.
    """
    for name, parameter in PARAMETERS.items():
        value = getattr(tensors, name)
        if value is None or (parameter.default is not None and not value) or name in but:
            continue
        if parameter.kind is bool:
            into[parameter.name].bool_param = bool(value)
        else:
            into[parameter.name].string_param = value if isinstance(value, str) else ",".join(value)
