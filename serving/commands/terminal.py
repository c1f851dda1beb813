"""What all commands print with, and the options that several have."""

from typing import Annotated, NoReturn

import typer
from rich.console import Console

from serving.errors import ServingError
from serving.server.process import LOOPBACK, Ports

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

UrlOption = Annotated[str, typer.Option(help="The server's gRPC address.")]
DEFAULT_URL = f"{LOOPBACK}:{Ports().grpc}"


def say(message: str) -> None:
    """A line on stderr."""
    err.print(f"tbe-serve: {message}", markup=False, soft_wrap=True)


def fail(error: ServingError) -> NoReturn:
    """Say why, and exit with 1."""
    say(str(error))
    raise typer.Exit(1) from error
