"""Options that several commands share, which typer does not support, and options of the form [NAME=]X."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serving.errors import ConfigurationError

_INTEGER = re.compile(r"-?[0-9]+")
_REAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[+-]?(?:inf|nan)", re.IGNORECASE)


def integer(setting: str, text: str) -> int:
    """The whole number in `text`.

    Raises:
        ConfigurationError: it is no whole number. The message names the setting.
    """
    try:
        if _INTEGER.fullmatch(text):
            return int(text)
    except ValueError:  # int() refuses 5,000 digits
        pass
    raise ConfigurationError(f"{setting}: expected a whole number, got {text!r}")


def real(setting: str, text: str) -> float:
    """The number in `text`. It may be infinite or NaN.

    Raises:
        ConfigurationError: it is no number. The message names the setting.
    """
    if not _REAL.fullmatch(text):
        raise ConfigurationError(f"{setting}: expected a number, got {text!r}")
    return float(text)


# The name of an option [NAME=]X that was given without one: a glob that matches all names.
EVERY = "*"


def shared_options(name: str, reader: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that adds the options of `reader` to a command.

    The command gets a `functools.partial` as its parameter `name`: `reader` with the values of the options, by
    keyword. Its own arguments come first.

    Args:
        name: the command's parameter that takes the function.
        reader: its parameters are the options.
    """
    shared = inspect.signature(reader).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            options = {option: arguments.pop(option) for option in shared}
            command(**arguments, **{name: functools.partial(reader, **options)})

        parameters = [
            parameter for parameter in inspect.signature(command).parameters.values() if parameter.name != name
        ]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*parameters, *shared.values())]
        )
        run.__annotations__ = command.__annotations__ | reader.__annotations__ | {"return": None}
        return run

    return decorate


def with_options(reader: Callable[..., Any], options: Mapping[str, tuple[Any, Any]]) -> Callable[..., Any]:
    """Give `reader` a signature with the options of a table. typer reads options from the signature of a function.

    Args:
        reader: takes any keyword.
        options: by name: the annotation that typer makes an option of, and the default.
    """
    reader.__annotations__ = {name: annotation for name, (annotation, _) in options.items()}
    reader.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]
    )
    return reader


def by_name(texts: Sequence[str] | None) -> dict[str, str]:
    """Options of the form [NAME=]X, by name: ["int8", "item*=fp16"] gives {"*": "int8", "item*": "fp16"}.

    They keep their order. If a name is given twice, the last one counts, in its place.
    """
    values: dict[str, str] = {}
    for option_text in texts or ():
        name, _, text = option_text.rpartition("=")
        values.pop(name or EVERY, None)
        values[name or EVERY] = text
    return values


def named(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Options of the form NAME=X, by name: ["0=a:8001"] gives {"0": "a:8001"}. X may hold "=".

    Raises:
        ConfigurationError: an option has no name, or a name is given twice.
    """
    values: dict[str, str] = {}
    for option_text in texts or ():
        name, equals, text = option_text.partition("=")
        if not (name and equals):
            raise ConfigurationError(f"{option}: expected NAME=X, got {option_text!r}")
        if name in values:
            raise ConfigurationError(f"{option}: expected {name!r} once, got it twice")
        values[name] = text
    return values


def as_given(name: str, text: str) -> str:
    """The text of an option that `by_name` read, as it was typed."""
    return text if name == EVERY else f"{name}={text}"
