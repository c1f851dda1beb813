"""The options of `tbe-serve run` that say which versions it serves."""

from collections.abc import Callable
from typing import Annotated

import typer

from serving.errors import ConfigurationError
from serving.server.models import Pins
from serving.terminal.options import EVERY, as_given, by_name, shared_options


def _pins(
    *,
    serve: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL=N[,N]",
            help="Serve exactly these versions of a model, whatever config.pbtxt says. The newest of them answers "
            "callers that name none.",
        ),
    ] = None,
) -> Pins:
    return {model: _versions(model, text) for model, text in by_name(serve).items()}


def _versions(model: str, text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if model == EVERY or not all(each.isascii() and each.isdecimal() for each in numbers):
        raise ConfigurationError(
            f"--serve {as_given(model, text)}: expected MODEL=N[,N], N a version's number, such as movies=7"
        )
    return tuple(dict.fromkeys(map(int, numbers)))


PinsOf = Callable[[], Pins]
# A command calls `pins()` for the versions that the options say.
takes_pins = shared_options("pins", _pins)
