"""Groups of options that several commands share, which typer has no way to say, and options of the form [NAME=]X."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serving.errors import ConfigurationError

# The name of what was given without one.
EVERY = "*"


def shared_options(name: str, read: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give commands the options of `read`. A command gets a function that calls `read` with the values given.

    What the command passes to that function itself comes before them.

    Args:
        name: the command's parameter that takes that function.
        read: its parameters are the options, all by keyword.
    """
    shared = inspect.signature(read).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            options = {option: given.pop(option) for option in shared}
            command(**given, **{name: lambda *own: read(*own, **options)})

        own = [each for each in inspect.signature(command).parameters.values() if each.name != name]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *shared.values())]
        )
        run.__annotations__ = command.__annotations__ | read.__annotations__ | {"return": None}
        return run

    return decorate


def with_options(read: Callable[..., Any], options: Mapping[str, tuple[Any, Any]]) -> Callable[..., Any]:
    """Give `read`, which takes keywords, the options of a table: typer reads options from a function's signature.

    Args:
        options: by name, the annotation that typer makes an option of, and the default.
    """
    read.__annotations__ = {name: annotation for name, (annotation, _) in options.items()}
    read.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]
    )
    return read


def by_name(given: Sequence[str] | None) -> dict[str, str]:
    """Options of the form [NAME=]X, by name: ["int8", "item*=fp16"] gives {"*": "int8", "item*": "fp16"}.

    They come in the order given. A name that is given again stands where it is given last.
    """
    values: dict[str, str] = {}
    for each in given or ():
        name, _, text = each.rpartition("=")
        values.pop(name or EVERY, None)
        values[name or EVERY] = text
    return values


def named(option: str, given: Sequence[str] | None) -> dict[str, str]:
    """Options of the form NAME=X, by name: ["0=a:8001"] gives {"0": "a:8001"}. X may hold "=".

    Raises:
        ConfigurationError: one has no name, or the name of another.
    """
    values: dict[str, str] = {}
    for each in given or ():
        name, equals, text = each.partition("=")
        if not (name and equals):
            raise ConfigurationError(f"{option}: expected NAME=X, got {each!r}")
        if name in values:
            raise ConfigurationError(f"{option}: expected {name!r} once, got it twice")
        values[name] = text
    return values


def as_given(name: str, text: str) -> str:
    """An option that `by_name` read, as it was typed."""
    return text if name == EVERY else f"{name}={text}"
