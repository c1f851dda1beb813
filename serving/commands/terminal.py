"""What all commands print with, and the options that several have."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from serving.client import Tls
from serving.errors import ServingError
from serving.server import LOOPBACK, Ports

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

UrlOption = Annotated[str, typer.Option(help="The server's gRPC address.")]
DEFAULT_URL = f"{LOOPBACK}:{Ports().grpc}"
TlsCaOption = Annotated[
    Path | None,
    typer.Option(envvar="TBE_SERVE_TLS_CA", help="Speak TLS: who signed the server's certificate (PEM)."),
]
TlsCertOption = Annotated[
    Path | None, typer.Option(envvar="TBE_SERVE_TLS_CERT", help="The certificate to show the server, in PEM.")
]
TlsKeyOption = Annotated[Path | None, typer.Option(envvar="TBE_SERVE_TLS_KEY", help="Its private key, in PEM.")]
TlsServerNameOption = Annotated[
    str | None,
    typer.Option(envvar="TBE_SERVE_TLS_SERVER_NAME", help="The server's name, if its certificate has another."),
]


def tls_of(ca: Path | None, certificate: Path | None, key: Path | None, server_name: str | None) -> Tls | None:
    """How to speak TLS; None where no option asks for it."""
    if ca is None and certificate is None and key is None and server_name is None:
        return None
    return Tls(root_certificates=ca, certificate_chain=certificate, private_key=key, server_name=server_name)


def say(message: str) -> None:
    """A line on stderr."""
    err.print(f"tbe-serve: {message}", markup=False, soft_wrap=True)


def fail(error: ServingError) -> NoReturn:
    """Say why, and exit with 1."""
    say(str(error))
    raise typer.Exit(1) from error
