"""`tbe-serve run`: a tritonserver on a repository."""

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from serving.commands.terminal import say
from serving.commands.trust import TrustOf, takes_trust
from serving.errors import ServerFailed
from serving.server import LOOPBACK, Access, Ports, Server, ServerTls, Supervisor, run_server
from serving.server.access import CLOSED
from serving.server.process import SHM_BYTES
from serving.terminal import out


@takes_trust
def run(
    repository: Annotated[Path, typer.Argument(help="The model repository that tbe-export wrote.")],
    trust: TrustOf,
    triton_options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- TRITON_OPTIONS]", help="Passed on to tritonserver.")
    ] = None,
    host: Annotated[str, typer.Option(help="IPv4 address of gRPC and metrics.")] = LOOPBACK,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0 takes a free one.")] = Ports().grpc,
    http: Annotated[
        bool, typer.Option("--http", help="Take lookups over HTTP too, on this machine alone unless --insecure.")
    ] = False,
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="HTTP port, with --http; 0 takes a free one.")
    ] = Ports().http,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Prometheus port; 0 takes a free one.")
    ] = Ports().metrics,
    tls_cert: Annotated[Path | None, typer.Option(help="The server's certificate for gRPC, in PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, in PEM, without a password.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Ask clients for certificates signed by this, in PEM.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine in the clear: something else protects it.")
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="PROTOCOL", help=f"Leave open what else needs a key: {', '.join(CLOSED)}."),
    ] = None,
    shm_mib: Annotated[
        int,
        typer.Option(
            min=1, max=1 << 40, help="Most shared memory of an instance, for the requests it is handed together."
        ),
    ] = SHM_BYTES >> 20,
    recover: Annotated[
        bool,
        typer.Option(
            help="Start anew what died or hangs, a model or tritonserver; else stop, and exit with its code."
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="When ready, print one line of JSON.")] = False,
) -> None:
    """Run a tritonserver on a model repository until SIGINT or SIGTERM; exits with its exit code.

    A stop answers every request that was accepted.
    """
    supervisor: Supervisor | None = None

    def pass_on(number: int, _: FrameType | None) -> None:
        if supervisor is None:
            raise SystemExit(128 + number)  # nothing is ready yet; leaving run_server stops what has started
        supervisor.stop(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    ports = Ports(grpc=grpc_port, http=http_port, metrics=metrics_port)
    access = Access(
        host=host,
        http=http,
        tls=_tls(tls_cert, tls_key, tls_client_ca),
        insecure=insecure,
        allow=tuple(allow or ()),
    )
    options = triton_options or ()
    with run_server(
        repository, ports, access=access, trust=trust(), shm_bytes=shm_mib << 20, options=options
    ) as server:
        for warning in server.warnings:
            say(warning)
        supervisor = Supervisor(server, recover, say)
        print(_as_json(server)) if as_json else out.print(_as_text(server))
        sys.stdout.flush()
        code = supervisor.wait()
    if code:
        say(f"tritonserver exited with {code}")
    raise typer.Exit(code if code >= 0 else 128 - code)


def _tls(certificate: Path | None, key: Path | None, client_root: Path | None) -> ServerTls | None:
    if certificate is None and key is None and client_root is None:
        return None
    if certificate is None or key is None:
        raise ServerFailed("TLS: expected --tls-cert and --tls-key together, and --tls-client-ca only beside them")
    return ServerTls(certificate=certificate, private_key=key, client_root=client_root)


def _as_json(server: Server) -> str:
    seen = {"grpc": server.grpc, "http": server.http, "metrics": server.metrics, "models": server.models}
    return msgspec.json.encode(seen).decode()


def _as_text(server: Server) -> Table:
    table = Table.grid(padding=(0, 2))
    for model in server.models:
        table.add_row("ready", f"{model.name} {', '.join(map(str, model.versions))}")
    table.add_row("gRPC", server.grpc)
    if server.http is not None:
        table.add_row("HTTP", f"http://{server.http}")
    table.add_row("metrics", f"http://{server.metrics}/metrics")
    table.add_row("stop", "Ctrl-C")
    return table
