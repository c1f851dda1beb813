"""`tbe-serve load`: switch a running server to another version."""

from typing import Annotated

import typer

from serving.client.connection import Connection
from serving.commands.terminal import DEFAULT_URL, UrlOption, fail, out
from serving.errors import ServingError
from serving.server.control import Control


def load(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    version: Annotated[
        int | None, typer.Option(help="The version to serve; else the one config.pbtxt says: the newest.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    timeout_s: Annotated[float, typer.Option(help="How long the version may take to load, in seconds.")] = 120.0,
) -> None:
    """Serve the newest version of a model, or the one given, without losing a request.

    The version that serves now goes on until the other is ready; if that cannot be loaded, it stays.
    To serve an older version after a restart too: `tbe-serve configure --version`.
    """
    try:
        with Control(Connection(addresses=[url], timeout_s=timeout_s)) as control:
            before = control.ready(model)
            try:
                after = control.load(model, version)
            except ServingError:
                now = control.ready(model)
                out.print(f"{model}: still serves version {_listed(now)}" if now else f"{model}: serves no version")
                raise
    except ServingError as error:
        fail(error)
    out.print(f"{model}: version {_listed(before)} → {_listed(after)}")


def _listed(versions: tuple[int, ...]) -> str:
    return ", ".join(map(str, versions)) or "none"
