"""`tbe-serve status` and `tbe-serve health`: the state of servers, and whether their models answer."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.filesize import decimal
from rich.table import Table

from serving.client import DEFAULT_TIMEOUT_S, LookupClient
from serving.client.connection import Connection
from serving.client.messages import Answer
from serving.client.metadata import MetadataFile
from serving.client.retries import Retries
from serving.client.server_info import ServerInfo, differences, query_servers
from serving.commands.connection import DEFAULT_URL, TlsOf, UrlOption, say, takes_tls
from serving.model.settings import ServingSettings
from serving.requests.encoding import Features
from serving.server.run_file import find_run_file
from serving.server.status import ModelStatus, ProcessMemory, Status, status_of
from serving.terminal.app import out
from serving.terminal.output import print_json

_SLOW_KERNELS = (
    "FBGEMM uses its reference kernels: lookups take 10 to 30 times as long: something in the environment imports "
    "torchrec or fbgemm_gpu before serving, such as sitecustomize.py: remove that, or start the server with "
    "LD_PRELOAD=…/torch/lib/libc10.so"
)
_CHOSEN_BY = {"pin": "--serve", "release": "its release", "load": "tbe-serve load", "config": "config.pbtxt"}


def status_tables(status: Status) -> Iterator[Table]:
    """The status of a server as tables."""
    yield _server(status)
    yield _versions(status.models)
    if (programs := _programs(status.models)).row_count:
        yield programs
    if (reasons := _reasons(status.models)).row_count:
        yield reasons
    if (hosts := _hosts(status.models)).row_count:
        yield hosts
    yield _processes(status)
    if (changed := _settings(status.models)).row_count:
        yield changed


def fleet_table(servers: Iterable[ServerInfo]) -> Table:
    """The versions that each server of a fleet serves."""
    table = _table("server", "tritonserver", "model", "versions", "state")
    for server in servers:
        if server.problem is not None or not server.models:
            table.add_row(server.address, server.triton or "", "", "", "unreachable" if server.problem else "empty")
        for model, versions in server.models.items():
            table.add_row(server.address, server.triton, model, ", ".join(map(str, versions)), "ready")
    return table


def _server(status: Status) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("server", status.address)
    table.add_row("tritonserver", f"{status.triton}, process {status.process}")
    last = status.last_recovery
    when = "" if last is None else time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(last.at))
    details = "" if last is None else f"; the last at {when}: {f'{last.model}: ' if last.model else ''}{last.why}"
    table.add_row("recoveries", f"{status.recoveries}{details}")
    if status.drains_until is not None:
        until = time.strftime("%H:%M:%S %Z", time.localtime(status.drains_until))
        table.add_row("draining", f"not ready; answers until its connections are closed, at the latest {until}")
    return table


def _versions(models: Iterable[ModelStatus]) -> Table:
    table = _table("model", "version", "state", "chosen by", "instances", "tables", "in page cache", "delta")
    for model in models:
        for version in model.versions:
            table.add_row(
                model.name,
                str(version.version),
                version.state.lower(),
                _CHOSEN_BY[model.chosen_by],
                str(len(version.instances)),
                _size(version.weights_bytes),
                _size(version.cached_bytes),
                "" if version.deltas is None else f"{version.deltas.sequence:,}",
            )
    return table


def _programs(models: Iterable[ModelStatus]) -> Table:
    """What makes the answers of the versions that serve."""
    table = _table("model", "version", "kernels", "lookups", "scores")
    for model in models:
        for version in model.versions:
            if version.kernels is not None:
                table.add_row(
                    model.name,
                    str(version.version),
                    version.kernels.instruction_set,
                    ", ".join(sorted({programs.lookup for programs in version.programs})),
                    ", ".join(sorted({programs.scores for programs in version.programs})),
                )
    return table


def _reasons(models: Iterable[ModelStatus]) -> Table:
    """Why versions do not serve, serve slowly, or apply no deltas. A separate table: reasons need the full width."""
    table = Table.grid(padding=(0, 2))
    for model in models:
        for version in model.versions:
            name = f"{model.name} {version.version}"
            if version.reason:
                table.add_row(name, version.reason)
            if version.kernels is not None and version.kernels.are_slow:
                table.add_row(name, _SLOW_KERNELS)
            if version.deltas is not None and version.deltas.stopped:
                table.add_row(name, f"no further delta is applied: {version.deltas.stopped}")
    return table


def _hosts(models: Iterable[ModelStatus]) -> Table:
    """Every replica of the routers' hosts."""
    table = _table("router", "host", "model", "version", "replica", "state")
    for model in models:
        for version in model.versions:
            for host in version.hosts:
                for replica in host.replicas:
                    table.add_row(
                        f"{model.name} {version.version}",
                        str(host.host),
                        host.model,
                        str(host.version),
                        replica.address,
                        "ready" if replica.problem is None else replica.problem,
                    )
    return table


def _processes(status: Status) -> Table:
    table = _table("process", "of", "now", "resident", "share (PSS)", "tables mapped", "in huge pages")
    table.add_row(str(status.process), "tritonserver", "", *_memory(status.memory))
    for model in status.models:
        for version in model.versions:
            for instance in version.instances:
                now = "busy" if instance.is_busy else "idle"
                table.add_row(
                    str(instance.process), f"{model.name} {version.version}", now, *_memory(instance.memory)
                )
    return table


def _settings(models: Iterable[ModelStatus]) -> Table:
    """The settings that are not at their defaults."""
    table = _table("model", "setting", "value")
    for model in models:
        for name, value in model.settings.items():
            if value != getattr(ServingSettings(), name):
                table.add_row(model.name, name.replace("_", "-"), str(value))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    return table


_NUMBERS = {
    "delta",
    "instances",
    "tables",
    "in page cache",
    "resident",
    "share (PSS)",
    "tables mapped",
    "in huge pages",
}


def _memory(memory: ProcessMemory | None) -> tuple[str, str, str, str]:
    if memory is None:
        return "", "", "", ""
    return _size(memory.resident), _size(memory.share), _size(memory.mapped), _size(memory.huge)


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else decimal(size_bytes)


@takes_tls
def status(
    tls: TlsOf,
    address: Annotated[str, typer.Argument(help="The server's gRPC address.")] = DEFAULT_URL,
    fleet: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS[,ADDRESS]", help="Compare the versions that these servers serve. May be repeated."
        ),
    ] = None,
    metadata: Annotated[
        Path | None,
        typer.Option(
            help="File with a JSON object of strings, such as a token, to send with each call to the fleet."
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Deadline of each call, in seconds.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the state of a server: full details for your own server on this machine, versions for any other server.

    Exits with 1 and the reason if a server does not answer or serves nothing, or if servers of a fleet serve
    different versions of a model.
    """
    run = None if fleet else find_run_file(address)
    if run is not None:
        server_status = status_of(run, timeout_s)
        if as_json:
            print_json(msgspec.json.encode(server_status))
        else:
            for table in status_tables(server_status):
                out.print(table, end="\n\n")
        return
    addresses = [part.strip() for text in fleet or [address] for part in text.split(",")]
    servers = query_servers(
        Connection(
            addresses=list(dict.fromkeys(addresses)),
            timeout_s=timeout_s,
            retries=Retries(attempts=1),
            tls=tls(),
            metadata={} if metadata is None else MetadataFile(metadata)(),
        )
    )
    problems = list(differences(servers))
    if as_json:
        print_json(msgspec.json.encode({"servers": servers, "problems": problems}))
    else:
        out.print(fleet_table(servers))
    for problem in problems:
        say(problem)
    raise typer.Exit(bool(problems))


@takes_tls
def health(
    models: Annotated[list[str], typer.Argument(help="The models that must answer.")],
    tls: TlsOf,
    url: UrlOption = DEFAULT_URL,
    timeout_s: Annotated[
        float, typer.Option(help="Deadline of each model's lookup, in seconds.")
    ] = DEFAULT_TIMEOUT_S,
) -> None:
    """Look up a row of every table of each model. Exits with 1 and the reason if a model does not answer in time."""
    for model in models:
        with LookupClient(url, model, timeout_s, retries=Retries(attempts=1), tls=tls()) as client:
            out.print(f"{model}: version {ask_every_table(client).version} answers")


def ask_every_table(client: LookupClient) -> Answer:
    """Look up row 0 of every table for one sample: {feature: [1, dim]}. A router asks every host.

    Triton 24.10 reports a model as ready even when its process has died.

    Raises:
        ServingError: the model does not answer.
    """
    info = client.info()
    row = np.zeros(1, np.int64), np.ones(1, np.int32)
    features: Features = {
        name: (*row, np.ones(1, np.float32)) if name in info.weighted else row for name in info.keys
    }
    return client.lookup(features, every_host=True)
