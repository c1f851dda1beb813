"""`tbe-serve load`: switch a running server to another version."""

from pathlib import Path
from typing import Annotated

import typer

from serving.errors import ServingError
from serving.server import LOOPBACK, Control, Ports
from serving.server.run_file import find_run_file
from serving.server.trust import check_trusted
from serving.terminal import out


def load(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    version: Annotated[
        int | None,
        typer.Option(min=1, max=2**63 - 1, help="The version to serve; else the one config.pbtxt says: the newest."),
    ] = None,
    url: Annotated[str, typer.Option(help="The server's HTTP address.")] = f"{LOOPBACK}:{Ports().http}",
    timeout_s: Annotated[float, typer.Option(help="How long the version may take to load, in seconds.")] = 120.0,
) -> None:
    """Serve the newest version of a model, or the one given, without losing a request.

    The version that serves now goes on until the other is ready; if that cannot be loaded, it stays.
    To serve an older version after a restart too: `tbe-serve configure --version`.

    On the server's own machine, by the user that runs it: `tbe-serve run` keeps the key to this for that user.
    """
    run = find_run_file(url)
    control = Control(http=url, key=None if run is None else run.key, timeout_s=timeout_s)
    before = control.ready(model)
    try:
        if run is not None and run.trusted_keys is not None:
            check_trusted(Path(run.repository) / model, Path(run.trusted_keys), version)
        after = control.load(model, version)
    except ServingError:
        now = control.ready(model)
        out.print(f"{model}: still serves version {_listed(now)}" if now else f"{model}: serves no version")
        raise
    out.print(f"{model}: version {_listed(before)} → {_listed(after)}")


def _listed(versions: tuple[int, ...]) -> str:
    return ", ".join(map(str, versions)) or "none"
