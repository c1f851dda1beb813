"""Checks of arguments: their declared types, timeouts and addresses. Errors name the wrong argument."""

import inspect
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from serving.errors import ConfigurationError

# The valid forms of a host's name, and of a server's address.
_HOST = r"[A-Za-z0-9_.-]{1,253}"
_ADDRESS = re.compile(rf"(?:(?:dns|ipv4|ipv6):(?:///)?)?(?:{_HOST}|\[[0-9A-Fa-f:.%]{{2,60}}\]):[0-9]{{1,5}}")
_MOST_PORT = 65535
_UNIONS = (Union, UnionType)


def check_arguments(config: Any) -> None:
    """Compare every field of a dataclass with the type that it is declared with.

    Call this in `__post_init__`. An int is also a float, but a bool is not a number. The value of a field with
    `repr=False` is a secret, so the error only says its type.

    Raises:
        ConfigurationError: a field has a wrong type. The message names it, and the expected type.
    """
    kinds = _kinds(config.__class__)
    for setting in fields(config):
        check_argument(setting.name, getattr(config, setting.name), kinds[setting.name], secret=not setting.repr)


def check_argument(name: str, value: Any, kind: Any, *, secret: bool = False) -> None:
    """Compare one argument with its type.

    Args:
        name: the name of the argument, for the error.
        value: its value.
        kind: a class, Callable, a union, or a Mapping, Sequence or tuple of these.
        secret: whether the error only says the type of the value.

    Raises:
        ConfigurationError: the value has a wrong type. The message names the argument, or the entry of a mapping.
    """
    for where, wrong, expected in _wrong_parts(name, value, kind):
        member = None if secret else _member(expected, wrong)
        raise ConfigurationError(
            f"{where}: expected {member or _type_text(expected)}, got {_value_text(wrong, secret)}"
        )


@cache
def _kinds(config: Any) -> dict[str, Any]:
    return get_type_hints(config)


def _wrong_parts(where: str, value: Any, kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """The parts of `value` with wrong types: the name of the part, the part itself, and its expected type."""
    if isinstance(value, Mapping) and _is_of_mappings(kind):
        of_key, of_value = get_args(kind)
        for key, item in value.items():
            yield from _wrong_parts(f"{where} {key!r}", key, of_key)
            yield from _wrong_parts(f"{where} {key!r}", item, of_value)
    elif not _fits(value, kind):
        yield where, value, kind


def _fits(value: Any, kind: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in _UNIONS:
        return any(_fits(value, part) for part in parts)
    if kind is int or kind is float:
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if origin is None:
        return isinstance(value, kind)
    if origin is Callable:
        return callable(value)
    if _is_of_mappings(kind):
        return isinstance(value, origin) and not any(_wrong_parts("", value, kind))
    # A string is a sequence of strings, but is never meant as one.
    return isinstance(value, origin) and not isinstance(value, str) and all(_fits(item, parts[0]) for item in value)


def _is_of_mappings(kind: Any) -> bool:
    return isinstance(origin := get_origin(kind), type) and issubclass(origin, Mapping)


def _value_text(value: Any, secret: bool) -> str:
    """A value for a message, with its type if the text does not show it: numpy's 2 looks like Python's."""
    kind, shown = type(value), reprlib.repr(value)
    if secret:
        return kind.__name__
    return shown if kind.__module__ == "builtins" or kind.__name__ in shown else f"{kind.__name__} {shown}"


def _type_text(kind: Any) -> str:
    """The text of a type, such as `int | None` or `Mapping[str, WeightDtype]`."""
    return re.sub(r"\w+\.", "", inspect.formatannotation(kind))


def _member(kind: Any, text: Any) -> str | None:
    """The member, such as "WeightDtype.INT4", of an enum or a union of enums that options and TOML call `text`."""
    parts = get_args(kind) if get_origin(kind) in _UNIONS else (kind,)
    enums = [part for part in parts if isinstance(part, type) and issubclass(part, Enum)]
    members = {str(member.value).lower(): f"{enum.__name__}.{member.name}" for enum in enums for member in enum}
    return members.get(text.lower()) if isinstance(text, str) else None


_MOST_S = 1_000_000


def check_timeout(timeout_s: float) -> None:
    """Refuse an impossible timeout.

    Raises:
        ConfigurationError: the timeout is not a number of seconds above 0, or is more than a million.
    """
    check_argument("timeout_s", timeout_s, float)
    if not 0 < timeout_s <= _MOST_S:
        raise ConfigurationError(f"timeout_s: expected > 0 and at most {_MOST_S}, got {timeout_s}")


def is_host_name(text: str) -> bool:
    """Whether `text` is a valid name of a host, or an IPv4 address."""
    return re.fullmatch(_HOST, text) is not None


def is_address(text: str) -> bool:
    """Whether `text` is the address of a server for gRPC.

    That is the name or IP address of a host, with IPv6 in brackets, and a port. A scheme may say how gRPC resolves
    the name, as in "dns:///name:8001".
    """
    return _ADDRESS.fullmatch(text) is not None and int(text.rpartition(":")[2]) <= _MOST_PORT
