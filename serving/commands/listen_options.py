"""The options of `tbe-serve run` for its ports, TLS, and access to them."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from serving.errors import ConfigurationError
from serving.files import read_file
from serving.server import LOOPBACK, Access, Ports, ServerTls
from serving.terminal.options import shared_options
from serving.triton.command_line import RESTRICTED


def _ports(
    *,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port. 0: any free port.")] = Ports().grpc,
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="HTTP port, with --http. 0: any free port.")
    ] = Ports().http,
    operations_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of /livez, /readyz and /metrics (Prometheus). 0: any free port."),
    ] = Ports().operations,
) -> Ports:
    return Ports(grpc=grpc_port, http=http_port, operations=operations_port)


def _access(
    *,
    host: Annotated[str, typer.Option(help="IPv4 address of the gRPC port.")] = LOOPBACK,
    operations_host: Annotated[
        str, typer.Option(help="IPv4 address of the operations port. Only probes and Prometheus need to reach it.")
    ] = LOOPBACK,
    operations_tls: Annotated[
        bool, typer.Option("--operations-tls", help="Use TLS on the operations port, with --tls-cert.")
    ] = False,
    operations_token: Annotated[
        Path | None,
        typer.Option(help="File with a token that /metrics requires: `Authorization: Bearer TOKEN`."),
    ] = None,
    http: Annotated[
        bool, typer.Option("--http", help="Also serve HTTP: on this machine only, unless --insecure.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="The server's certificate for gRPC, in PEM.")] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Private key of --tls-cert, in PEM, without a password.")
    ] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Require client certificates signed by this CA, in PEM.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Listen on other addresses than this machine's without TLS. Protect the ports by other means.",
        ),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROTOCOL",
            help=f"Allow a Triton protocol without its key: {', '.join(RESTRICTED)}. May be repeated.",
        ),
    ] = None,
) -> Access:
    tls = _tls(tls_cert, tls_key, tls_client_ca)
    return Access(
        host=host,
        operations_host=operations_host,
        operations_tls=operations_tls,
        operations_token=None if operations_token is None else _token(operations_token),
        http=http,
        tls=tls,
        insecure=insecure,
        allow=tuple(allow or ()),
    )


def _token(path: Path) -> str:
    try:
        return read_file(path).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--operations-token {path}: cannot be read: {error}") from error


def _tls(certificate: Path | None, key: Path | None, client_root: Path | None) -> ServerTls | None:
    if certificate is None and key is None and client_root is None:
        return None
    if certificate is None or key is None:
        raise ConfigurationError("--tls-cert, --tls-key: expected both; --tls-client-ca requires them")
    return ServerTls(certificate=certificate, private_key=key, client_root=client_root)


PortsOf = Callable[[], Ports]
AccessOf = Callable[[], Access]
# A command calls `ports()` and `access()` for the values of these options.
takes_ports = shared_options("ports", _ports)
takes_access = shared_options("access", _access)
