"""`tbe-serve load`: switch the version that a running server serves."""

from pathlib import Path
from typing import Annotated

import typer

from serving.arguments import check_timeout
from serving.bundle.load import check_published
from serving.commands.connection import DEFAULT_URL, UrlOption
from serving.commands.version_options import version_numbers
from serving.errors import ConfigurationError, ServerUnavailable, ServingError
from serving.server import Control
from serving.server.run_file import RunFile, find_run_file
from serving.server.versions import switch
from serving.terminal.app import out


def load(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    version: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N]",
            help="Version to serve, or several versions to serve together. Default: the version in config.pbtxt, or "
            "the newest.",
        ),
    ] = None,
    url: UrlOption = DEFAULT_URL,
    timeout_s: Annotated[float, typer.Option(help="Longest time to load the version, in seconds.")] = 120.0,
) -> None:
    """Switch a running server to the newest version of a model, or to the given versions, without losing requests.

    The current version serves until the new one is ready, and continues to serve if the new one cannot be loaded.
    To keep an older version after a restart, also set `tbe-serve configure --version`.

    Run this on the server's machine, as the server's user: `tbe-serve run` stores the key for that user only.
    """
    check_timeout(timeout_s)
    requested = () if version is None else version_numbers(version)
    if requested is None:
        raise ConfigurationError(f"--version {version}: expected version numbers N[,N], such as 2 or 2,1")
    run = _run_file(url)
    if version is None and model in run.pinned:
        raise ConfigurationError(
            f"{model}: this server's --serve pins it to {_listed(run.pinned[model])}: name a version, --version"
        )
    if model in run.released:
        raise ConfigurationError(
            f"{model}: this server follows its release (--follow): use `tbe-export release` instead"
        )
    control = Control(address=run.control, key=run.key, timeout_s=timeout_s)
    try:
        if requested:
            check_published(Path(run.repository) / model, requested)
        served = Path(run.repository) if run.private is None else run.private.repository
        hosts = run.hosts.get(model)
        switched = switch(control, model, requested, private=run.private, repository=served, hosts=hosts)
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
            "found none: run this on the server's machine, as the server's user"
        )
    return run


def _listed(versions: tuple[int, ...]) -> str:
    return ", ".join(map(str, versions)) or "none"
