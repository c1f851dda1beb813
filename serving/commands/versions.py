"""The options of `tbe-serve run` that say which versions it serves."""

from collections.abc import Callable
from typing import Annotated

import typer

from serving.errors import ConfigurationError
from serving.server.models import Pins
from serving.terminal.options import EVERY, as_given, by_name, shared_options

# The longest deadline that lookups should have: docs/operating.md#clients.
_UNLOAD_AFTER_S = 10.0
_MOST_S = 1_000_000


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


def _follow(
    *,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Serve what the releases of models say (`tbe-export release`), and go on with it when they change.",
        ),
    ] = False,
    unload_after_s: Annotated[
        float | None,
        typer.Option(
            help=f"With --follow: how long the older version serves on, for callers that name it. Default: "
            f"{_UNLOAD_AFTER_S:g}."
        ),
    ] = None,
) -> float | None:
    if not follow and unload_after_s is not None:
        raise ConfigurationError("--unload-after-s: expected --follow with it")
    if unload_after_s is not None and not 0 <= unload_after_s <= _MOST_S:
        raise ConfigurationError(f"--unload-after-s: expected 0 to {_MOST_S}, got {unload_after_s:g}")
    return (_UNLOAD_AFTER_S if unload_after_s is None else unload_after_s) if follow else None


PinsOf = Callable[[], Pins]
FollowOf = Callable[[], float | None]
# A command calls `pins()` for the versions that the options say, and `follow()` for how long an older version serves
# on when a release changes. None: releases are not followed.
takes_pins = shared_options("pins", _pins)
takes_follow = shared_options("follow", _follow)
