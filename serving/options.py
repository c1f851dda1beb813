"""Options that several commands take, said once: typer has no way of its own to share them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def shared_options(name: str, read: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give commands the options of `read`; in their place a command gets a call of `read` with what was said.

    Args:
        name: of the command's parameter that takes that call.
        read: its parameters, all by keyword, are the options.
    """
    shared = inspect.signature(read).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            options = {option: given.pop(option) for option in shared}
            command(**given, **{name: lambda: read(**options)})

        own = [each for each in inspect.signature(command).parameters.values() if each.name != name]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *shared.values())]
        )
        run.__annotations__ = command.__annotations__ | read.__annotations__ | {"return": None}
        return run

    return decorate
