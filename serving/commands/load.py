"""`tbe-serve load`: switch a running server to another version."""

from pathlib import Path
from typing import Annotated

import typer

from serving.bundle.opening import check_published
from serving.commands.connection import DEFAULT_URL, UrlOption
from serving.errors import ConfigurationError, ServerUnavailable, ServingError
from serving.server import Control
from serving.server.run_file import RunFile, find_run_file
from serving.server.switch import switch
from serving.terminal.program import out
from serving.timeouts import check_timeout


def load(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    version: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**63 - 1,
            help="The version to serve. Default: the one that config.pbtxt names, or the newest.",
        ),
    ] = None,
    url: UrlOption = DEFAULT_URL,
    timeout_s: Annotated[float, typer.Option(help="How long the version may take to load, in seconds.")] = 120.0,
) -> None:
    """Serve the newest version of a model, or the one given, without losing a request.

    The present version serves until the other is ready. If that cannot be loaded, the present one goes on.
    To serve an older version after a restart too: `tbe-serve configure --version`.

    Call this on the server's machine, as the user that runs it: `tbe-serve run` keeps the key for that user.
    """
    check_timeout(timeout_s)
    run = _run_file(url)
    if version is None and model in run.pinned:
        raise ConfigurationError(f"{model}: --serve pins it to {_listed(run.pinned[model])} here: name a version")
    if model in run.released:
        raise ConfigurationError(
            f"{model}: its release says what is served here, as --follow says: `tbe-export release`"
        )
    control = Control(address=run.control, key=run.key, timeout_s=timeout_s)
    try:
        if version is not None:
            check_published(Path(run.repository) / model, (version,))
        served = Path(run.repository) if run.private is None else run.private.repository
        wanted = () if version is None else (version,)
        switched = switch(control, model, wanted, private=run.private, repository=served)
    except ServingError:
        now = control.ready(model)
        out.print(f"{model}: still serves version {_listed(now)}" if now else f"{model}: serves no version")
        raise
    out.print(f"{model}: version {_listed(switched.before)} → {_listed(switched.after)}")


def _run_file(url: str) -> RunFile:
    run = find_run_file(url)
    if run is None:
        raise ServerUnavailable(
            f"{url or repr(url)}: expected the gRPC address of a server that you run here with `tbe-serve run`, "
            "found none: call this on the server's machine, as the server's user"
        )
    return run


def _listed(versions: tuple[int, ...]) -> str:
    return ", ".join(map(str, versions)) or "none"
