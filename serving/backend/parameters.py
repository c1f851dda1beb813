"""The parameters of a request, each of the type that it has. Anybody may send anything."""

import json
import re
from collections.abc import Mapping
from typing import Any

from serving.errors import InvalidRequest, Reason
from serving.ranks.message import BUNDLE, PART_OF
from serving.request.tensors import EVERY_HOST, ONCE, TABLES

# What Triton says of a request without parameters. To read it as JSON takes longer than to read an input.
_NONE = ("{}", "")
# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Parameters:
    """The parameters of a request.

    Args:
        text: as Triton gives them, in JSON.

    Attributes:
        features, tables, once: names; None where the parameter is missing.
        bundle: the digest of the bundle that has to answer; None: any bundle.
        part_of: what the bundle that answers has to be a part of, as `Part.text` of `serving.bundle.hosts`.
        every_host: whether every host of a router has to answer.
        trace: the W3C `traceparent`; None if there is none. One that is malformed counts as none, as W3C says.

    Raises:
        InvalidRequest: a parameter is of another type; names it.
    """

    def __init__(self, text: str) -> None:
        said: Mapping[str, Any] = {} if text in _NONE else json.loads(text)
        self.features = _names(said, "features")
        self.tables = _names(said, TABLES)
        self.once = _names(said, ONCE)
        self.bundle = _of_type(said, BUNDLE, str, "a digest")
        self.part_of = _of_type(said, PART_OF, str, "a plan and a host")
        self.every_host = _of_type(said, EVERY_HOST, bool, "true or false") is True
        trace = said.get("traceparent")
        self.trace = trace if isinstance(trace, str) and _TRACEPARENT.fullmatch(trace) else None


def _names(said: Mapping[str, Any], parameter: str) -> list[str] | None:
    names = _of_type(said, parameter, str, "comma-separated names")
    return names.split(",") if names else None if names is None else []


def _of_type(said: Mapping[str, Any], parameter: str, kind: type, expected: str) -> Any:
    value = said.get(parameter)
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(f"parameter {parameter}: expected {expected}, got {value!r}", Reason.FEATURES)
    return value
