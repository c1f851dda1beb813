"""The command `tbe-serve`."""

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from serving.client import DEFAULT_TIMEOUT_S, LookupClient
from serving.encoding import Features
from serving.errors import InvalidRequest, ServingError
from serving.kjt import Embeddings
from serving.server import LOOPBACK, Ports, Server, run_server

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it would read [id, ...] as a style
    help="Serve exported embedding tables, and look them up.",
)
_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)


@app.command()
def run(
    repository: Annotated[Path, typer.Argument(help="The model repository that tbe-export wrote.")],
    triton_options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- TRITON_OPTIONS]", help="Passed on to tritonserver.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = LOOPBACK,
    grpc_port: Annotated[int, typer.Option(help="gRPC port; 0 takes a free one.")] = Ports().grpc,
    http_port: Annotated[int, typer.Option(help="HTTP port; 0 takes a free one.")] = Ports().http,
    metrics_port: Annotated[int, typer.Option(help="Prometheus port; 0 takes a free one.")] = Ports().metrics,
    as_json: Annotated[bool, typer.Option("--json", help="When ready, print one line of JSON.")] = False,
) -> None:
    """Run a tritonserver on a model repository until SIGINT or SIGTERM; exits with its exit code."""
    server: Server | None = None

    def pass_on(number: int, _: FrameType | None) -> None:
        if server is None:
            raise SystemExit(128 + number)  # nothing is ready yet; leaving run_server stops what has started
        server.signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    ports = Ports(grpc=grpc_port, http=http_port, metrics=metrics_port)
    try:
        with run_server(repository, ports, host=host, options=triton_options or ()) as started:
            server = started
            print(_as_json(server)) if as_json else _out.print(_as_text(server))
            sys.stdout.flush()
            code = server.wait()
    except ServingError as error:
        _fail(error)
    if code:
        _err.print(f"tbe-serve: tritonserver exited with {code}")
    raise typer.Exit(code if code >= 0 else 128 - code)


@app.command()
def lookup(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    file: Annotated[
        typer.FileText, typer.Argument(help="JSON lines, one request each; standard input by default.")
    ] = "-",  # type: ignore[assignment]
    url: Annotated[str, typer.Option(help="The server's gRPC address.")] = f"{LOOPBACK}:{Ports().grpc}",
    timeout_s: Annotated[float, typer.Option(help="Deadline of each request, in seconds.")] = DEFAULT_TIMEOUT_S,
    as_table: Annotated[bool, typer.Option("--table", help="Print a table instead of JSON lines.")] = False,
) -> None:
    """Look embeddings up: each line {"feature": [[id, ...], ...], ...} gives {"feature": [[number, ...], ...], ...}.

    Instead of a list of bags, a feature may have {"values": [...], "lengths": [...], "weights": [...]}.
    A line that cannot be answered is reported, the others are answered, and the exit code is 1.
    """
    refused = False
    try:
        with LookupClient(url, model, timeout_s) as client:
            for number, line in enumerate(file, start=1):
                try:
                    answer = client.lookup(_request(line))
                except InvalidRequest as error:
                    refused = True
                    _err.print(f"tbe-serve: line {number}: {error}", markup=False, soft_wrap=True)
                else:
                    _out.print(_table(answer)) if as_table else print(json.dumps(_plain(answer)), flush=True)
    except ServingError as error:
        _fail(error)
    raise typer.Exit(refused)


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


def _request(line: str) -> Features:
    try:
        request: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"expected JSON: {error}") from error
    if not isinstance(request, dict):
        raise InvalidRequest(f'expected {{"feature": [[id, ...], ...], ...}}, got {line.strip()[:40]!r}')
    return {name: _bags(name, bags) for name, bags in request.items()}


def _bags(name: str, bags: Any) -> Any:
    if not isinstance(bags, dict):
        return bags
    if not {"values", "lengths"} <= bags.keys() <= {"values", "lengths", "weights"}:
        raise InvalidRequest(f"feature {name!r}: expected values, lengths and perhaps weights, got {list(bags)}")
    return tuple(bags[key] for key in ("values", "lengths", "weights") if key in bags)


def _plain(answer: dict[str, Embeddings]) -> dict[str, Any]:
    """The shortest decimals that read back as the same numbers."""
    return {name: rows.astype(str).astype(np.float64).tolist() for name, rows in answer.items()}


def _table(answer: dict[str, Embeddings]) -> Table:
    table = Table("sample", "feature", "dim", "embedding")
    for sample in range(len(next(iter(answer.values())))):
        for name, rows in answer.items():
            row = rows[sample]
            shown = " ".join(f"{number:+.4f}" for number in row[:6])
            table.add_row(str(sample), name, str(row.size), shown + (" …" if row.size > 6 else ""))
        table.add_section()
    return table


def _fail(error: ServingError) -> NoReturn:
    _err.print(f"tbe-serve: {error}", markup=False, soft_wrap=True)
    raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
