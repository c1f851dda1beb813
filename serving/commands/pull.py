"""`tbe-serve pull`: pull the versions to serve from a repository in a store into a folder, once or repeatedly."""

from pathlib import Path
from typing import Annotated

import typer

from serving.commands.version_options import PinsOf, takes_pins
from serving.log import server_log
from serving.server.mirror import Mirror
from serving.store import Store
from serving.terminal.app import bytes_bar, out


@takes_pins
def pull(
    url: Annotated[str, typer.Argument(help="A repository in a store, such as s3://bucket/models.")],
    repository: Annotated[Path, typer.Argument(help="The model repository to pull into; made if it is missing.")],
    pins: PinsOf,
    model: Annotated[
        list[str] | None, typer.Option(help="Pull only this model. May be repeated. Default: all models.")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Pull the versions of releases (`tbe-export release`)."),
    ] = False,
    every_s: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=86_400,
            help="Pull again after this many seconds, until SIGINT or SIGTERM.",
        ),
    ] = None,
) -> None:
    """Pull the versions to serve from a store into a repository in a folder, and compare each with its digests.

    A version appears only when it is complete. Run an interrupted pull again to resume it.
    """
    mirror = Mirror(Store(url), repository, models=model or None, pins=pins(), follow=follow)
    with bytes_bar("pulling") as progress:
        for name, version in mirror.pull(progress):
            out.print(f"{repository / name / str(version)}", soft_wrap=True)
    if every_s is not None:
        mirror.keep(server_log(), every_s)
