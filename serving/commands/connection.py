"""The options of commands that call a server: address and TLS."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from serving.client import Tls
from serving.errors import ConfigurationError
from serving.server import LOOPBACK, Ports
from serving.terminal.app import complain
from serving.terminal.options import shared_options

# Prints a line on stderr.
say = partial(complain, "tbe-serve")

UrlOption = Annotated[str, typer.Option(help="The server's gRPC address.")]
DEFAULT_URL = f"{LOOPBACK}:{Ports().grpc}"


def _tls(
    *,
    tls_ca: Annotated[
        Path | None,
        typer.Option(envvar="TBE_SERVE_TLS_CA", help="Use TLS. The server's root certificates, in PEM."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(envvar="TBE_SERVE_TLS_CERT", help="The client's certificate, in PEM.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(envvar="TBE_SERVE_TLS_KEY", help="Private key of --tls-cert, in PEM.")
    ] = None,
    tls_server_name: Annotated[
        str | None,
        typer.Option(
            envvar="TBE_SERVE_TLS_SERVER_NAME", help="Name in the server's certificate. Default: its address."
        ),
    ] = None,
) -> Tls | None:
    if tls_ca is None and tls_cert is None and tls_key is None and tls_server_name is None:
        return None
    if (tls_cert is None) != (tls_key is None):
        raise ConfigurationError("--tls-cert, --tls-key: expected both, got one of them")
    return Tls(root_certificates=tls_ca, certificate_chain=tls_cert, private_key=tls_key, server_name=tls_server_name)


TlsOf = Callable[[], Tls | None]
# A command calls `tls()` for the certificates of the options. None: no TLS.
takes_tls = shared_options("tls", _tls)
