"""The options of `tbe-serve run` that say where it listens, and who may reach it."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from serving.errors import ConfigurationError
from serving.server import LOOPBACK, Access, Ports, ServerTls
from serving.terminal.options import shared_options
from serving.triton.options import RESTRICTED


def _ports(
    *,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0 takes a free one.")] = Ports().grpc,
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="HTTP port, with --http; 0 takes a free one.")
    ] = Ports().http,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Prometheus port; 0 takes a free one.")
    ] = Ports().metrics,
) -> Ports:
    return Ports(grpc=grpc_port, http=http_port, metrics=metrics_port)


def _access(
    *,
    host: Annotated[str, typer.Option(help="IPv4 address of gRPC.")] = LOOPBACK,
    metrics_host: Annotated[
        str,
        typer.Option(help="IPv4 address of metrics. Let nobody but a scraper reach it: it is open and in the clear."),
    ] = LOOPBACK,
    http: Annotated[
        bool, typer.Option("--http", help="Take lookups over HTTP too, on this machine alone unless --insecure.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="The server's certificate for gRPC, in PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, in PEM, without a password.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Ask clients for certificates that this CA signed, in PEM.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Listen beyond this machine without TLS: something else keeps others out."),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="PROTOCOL", help=f"Allow without a key what else needs one: {', '.join(RESTRICTED)}."),
    ] = None,
) -> Access:
    tls = _tls(tls_cert, tls_key, tls_client_ca)
    return Access(
        host=host, metrics_host=metrics_host, http=http, tls=tls, insecure=insecure, allow=tuple(allow or ())
    )


def _tls(certificate: Path | None, key: Path | None, client_root: Path | None) -> ServerTls | None:
    if certificate is None and key is None and client_root is None:
        return None
    if certificate is None or key is None:
        raise ConfigurationError("--tls-cert, --tls-key: expected both, and --tls-client-ca only beside them")
    return ServerTls(certificate=certificate, private_key=key, client_root=client_root)


PortsOf = Callable[[], Ports]
AccessOf = Callable[[], Access]
# A command calls `ports()` and `access()` for what the options say.
takes_ports = shared_options("ports", _ports)
takes_access = shared_options("access", _access)
