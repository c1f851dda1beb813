"""`tbe-serve run`: a tritonserver on a repository."""

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from serving.commands.terminal import fail, out, say
from serving.errors import ServingError
from serving.server.process import LOOPBACK, Ports, Server, run_server
from serving.server.supervisor import Supervisor


def run(
    repository: Annotated[Path, typer.Argument(help="The model repository that tbe-export wrote.")],
    triton_options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- TRITON_OPTIONS]", help="Passed on to tritonserver.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = LOOPBACK,
    grpc_port: Annotated[int, typer.Option(help="gRPC port; 0 takes a free one.")] = Ports().grpc,
    http_port: Annotated[int, typer.Option(help="HTTP port; 0 takes a free one.")] = Ports().http,
    metrics_port: Annotated[int, typer.Option(help="Prometheus port; 0 takes a free one.")] = Ports().metrics,
    recover: Annotated[
        bool, typer.Option(help="Load a model anew when its process died; else stop, and exit with 1.")
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
    try:
        with run_server(repository, ports, host=host, options=triton_options or ()) as server:
            supervisor = Supervisor(server, recover, say)
            print(_as_json(server)) if as_json else out.print(_as_text(server))
            sys.stdout.flush()
            code = supervisor.wait()
    except ServingError as error:
        fail(error)
    if code:
        say(f"tritonserver exited with {code}")
    raise typer.Exit(code if code >= 0 else 128 - code)


def _as_json(server: Server) -> str:
    seen = {"grpc": server.grpc, "http": server.http, "metrics": server.metrics, "models": server.models}
    return msgspec.json.encode(seen).decode()


def _as_text(server: Server) -> Table:
    table = Table.grid(padding=(0, 2))
    for model in server.models:
        table.add_row("ready", f"{model.name} {', '.join(map(str, model.versions))}")
    table.add_row("gRPC", server.grpc)
    table.add_row("HTTP", f"http://{server.http}")
    table.add_row("metrics", f"http://{server.metrics}/metrics")
    table.add_row("stop", "Ctrl-C")
    return table
