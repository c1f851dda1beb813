"""What all commands print with, and the options that several have."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from serving.client import Tls
from serving.errors import ServingError
from serving.options import shared_options
from serving.server import LOOPBACK, Ports

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

UrlOption = Annotated[str, typer.Option(help="The server's gRPC address.")]
DEFAULT_URL = f"{LOOPBACK}:{Ports().grpc}"


def _tls(
    *,
    tls_ca: Annotated[
        Path | None,
        typer.Option(envvar="TBE_SERVE_TLS_CA", help="Speak TLS: who signed the server's certificate (PEM)."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(envvar="TBE_SERVE_TLS_CERT", help="The certificate to show the server, in PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(envvar="TBE_SERVE_TLS_KEY", help="Its private key, in PEM.")] = None,
    tls_server_name: Annotated[
        str | None,
        typer.Option(envvar="TBE_SERVE_TLS_SERVER_NAME", help="The server's name, if its certificate has another."),
    ] = None,
) -> Tls | None:
    if tls_ca is None and tls_cert is None and tls_key is None and tls_server_name is None:
        return None
    return Tls(root_certificates=tls_ca, certificate_chain=tls_cert, private_key=tls_key, server_name=tls_server_name)


TlsOf = Callable[[], Tls | None]
# A command gets `tls()`: how to speak TLS, or None where no option asks for it.
takes_tls = shared_options("tls", _tls)


def say(message: str) -> None:
    """A line on stderr."""
    err.print(f"tbe-serve: {message}", markup=False, soft_wrap=True)


def fail(error: ServingError) -> NoReturn:
    """Say why, and exit with 1."""
    say(str(error))
    raise typer.Exit(1) from error
