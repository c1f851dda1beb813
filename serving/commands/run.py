"""`tbe-serve run`: a tritonserver on a model repository."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from serving.bundle.lineage import deltas_url
from serving.commands.listen_options import AccessOf, PortsOf, takes_access, takes_ports
from serving.commands.version_options import FollowOf, PinsOf, TrustOf, takes_follow, takes_pins, takes_trust
from serving.files import is_url
from serving.log import LogFormat, server_log
from serving.server import (
    Ports,
    ServedModel,
    Server,
    Supervisor,
    find_models,
    run_local_hosts,
    run_server,
)
from serving.server.drain import MOST_S
from serving.server.local_hosts import FleetSupervisor
from serving.server.mirror import mirror_of
from serving.server.releases import ReleaseFile, ReleaseFollower, read_releases, released_versions
from serving.tables.memory_need import SHM_BYTES
from serving.terminal.app import bytes_bar, out
from serving.terminal.output import print_json

# Seconds between checks of a store.
_CHECK_EVERY_S = 5.0


@takes_follow
@takes_pins
@takes_trust
@takes_access
@takes_ports
def run(
    repository: Annotated[
        str,
        typer.Argument(
            help="The model repository that tbe-export wrote: a folder, or a URL such as s3://bucket/models."
        ),
    ],
    pins: PinsOf,
    follow: FollowOf,
    trust: TrustOf,
    access: AccessOf,
    ports: PortsOf,
    triton_options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- TRITON_OPTIONS]", help="Further options of tritonserver.")
    ] = None,
    shm_mib: Annotated[
        int,
        typer.Option(
            min=1, max=1 << 40, help="Maximum shared memory of an instance in MiB, for requests answered together."
        ),
    ] = SHM_BYTES >> 20,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="With a URL: the folder to download versions into. Default: a folder in ~/.cache/tbe-serving."
        ),
    ] = None,
    every_s: Annotated[
        float | None,
        typer.Option(
            min=0.1, max=86_400, help="With a URL and --follow: seconds between checks of the store. Default: 5."
        ),
    ] = None,
    deltas: Annotated[
        str | None,
        typer.Option(
            help="Folder, or URL in a store, with deltas for models with `weights-memory: live`. Default: "
            "REPOSITORY.deltas."
        ),
    ] = None,
    drain_s: Annotated[
        float,
        typer.Option(
            min=0,
            max=MOST_S,
            help="Seconds (at least 2) for clients to leave before the server stops. Meanwhile it is not ready, and "
            "answers until all connections are closed. 0: stop at once. A second signal always stops at once.",
        ),
    ] = 0.0,
    recover: Annotated[
        bool,
        typer.Option(
            help="Restart a model or tritonserver that died or hangs. Without: stop, and exit with its code."
        ),
    ] = True,
    local_hosts: Annotated[
        bool,
        typer.Option(
            "--local-hosts",
            help="Serve a router and its hosts from one repository on this machine: a tritonserver for each host on "
            "free ports, and one for the router on the ports of this command.",
        ),
    ] = False,
    log_format: Annotated[
        LogFormat, typer.Option(help="Format of the log on stderr, including tritonserver's lines.")
    ] = LogFormat.TEXT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when ready.")] = False,
) -> None:
    """Run tritonserver on a model repository until SIGINT or SIGTERM.

    Requests accepted before the signal are answered; the exit code is then 0. A second signal stops the server
    without answering them.
    """
    versions, unload_after_s, trusted = pins(), follow(), trust()
    if deltas is None and is_url(repository):
        deltas = deltas_url(repository)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would wait for a store that hangs
    with bytes_bar("pulling") if is_url(repository) else nullcontext(lambda *_: None) as progress:
        mirror = mirror_of(
            repository,
            cache,
            versions,
            every_s=every_s,
            follow=unload_after_s is not None,
            deltas=deltas,
            progress=progress,
        )
    signals = _Signals()
    folder = Path(repository) if mirror is None else mirror.repository
    files: tuple[ReleaseFile, ...] = ()
    if unload_after_s is not None:
        followed = [model for model in find_models(folder) if model not in versions]
        files = read_releases(folder, followed, None if trusted is None else trusted.keys)
    pinned = {**released_versions(files), **versions}
    common: dict[str, Any] = {
        "trust": trusted,
        "deltas": deltas,
        "shm_bytes": shm_mib << 20,
        "drain_s": drain_s,
        "options": triton_options or (),
    }
    serve = partial(_router_and_hosts if local_hosts else _one_server, log_format=log_format)
    with _private_files(), serve(folder, ports(), pins=pinned, access=access(), **common) as servers:
        watched = [
            Supervisor(server, recover, _follower(server, files, unload_after_s)) for server in servers.values()
        ]
        log = servers[""].log
        if mirror is not None and mirror.problem is not None:
            log.warning("serving what was pulled before: %s", mirror.problem, extra={"event": "pull_failed"})
        for warning in dict.fromkeys(warning for server in servers.values() for warning in server.warnings):
            log.warning(warning, extra={"event": "warning"})
        for server in servers.values():
            models = ", ".join(map(_name_and_versions, server.models))
            server.log.info("serves %s on %s", models, server.grpc, extra={"event": "ready"})
        signals.supervisor = supervisor = FleetSupervisor(watched[:-1], watched[-1]) if local_hosts else watched[0]
        print_json(_as_json(servers)) if as_json else out.print(_as_text(servers))
        sys.stdout.flush()
        if mirror is not None and unload_after_s is not None:
            arguments = (log, every_s or _CHECK_EVERY_S, [server.health for server in servers.values()])
            threading.Thread(target=mirror.keep, args=arguments, name="store", daemon=True).start()
        code = supervisor.wait()
    raise typer.Exit(code if code >= 0 else 128 - code)


# Servers by the prefix of their log lines. The last one, with the prefix "", is the one for clients.
Servers = Mapping[str, Server]


@contextmanager
def _one_server(repository: Path, ports: Ports, *, log_format: LogFormat, **options: Any) -> Iterator[Servers]:
    with run_server(repository, ports, log=server_log(form=log_format), **options) as server:
        yield {"": server}


@contextmanager
def _router_and_hosts(repository: Path, ports: Ports, *, log_format: LogFormat, **options: Any) -> Iterator[Servers]:
    with run_local_hosts(repository, ports, log_format=log_format, **options) as fleet:
        yield {f"host {number}": server for number, server in fleet.hosts.items()} | {"": fleet.router}


def _follower(server: Server, files: Sequence[ReleaseFile], unload_after_s: float | None) -> ReleaseFollower | None:
    """Follows the releases of a server's models. None without --follow."""
    if unload_after_s is None:
        return None
    served = {model.name for model in server.models}
    return ReleaseFollower(server, [file for file in files if file.model in served], unload_after_s)


@contextmanager
def _private_files() -> Iterator[None]:
    """Within the block, files that this process makes are readable by its user only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


class _Signals:
    """Passes SIGINT and SIGTERM to the supervisor. Before there is a supervisor, they end the command."""

    def __init__(self) -> None:
        self.supervisor: Supervisor | FleetSupervisor | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        if self.supervisor is None:
            raise SystemExit(128 + number)  # run_server then stops a server that it has started
        self.supervisor.stop(number)


def _as_json(servers: Servers) -> str:
    *hosts, server = servers.values()
    fields: dict[str, Any] = {
        "grpc": server.grpc,
        "http": server.http,
        "operations": server.operations,
        "models": server.models,
    }
    if hosts:
        fields["hosts"] = [
            {"grpc": host.grpc, "operations": host.operations, "models": host.models} for host in hosts
        ]
    return msgspec.json.encode(fields).decode()


def _as_text(servers: Servers) -> Table:
    table = Table.grid(padding=(0, 2))
    server = servers[""]
    for name, host in servers.items():
        if name:
            table.add_row(name, f"{host.grpc}  {', '.join(map(_name_and_versions, host.models))}")
    for model in server.models:
        table.add_row("ready", _name_and_versions(model))
    table.add_row("gRPC", server.grpc)
    if server.http is not None:
        table.add_row("HTTP", f"http://{server.http}")
    table.add_row("operations", f"{server.operations}/metrics, /readyz, /livez")
    table.add_row("stop", "Ctrl-C")
    return table


def _name_and_versions(model: ServedModel) -> str:
    return f"{model.name} {', '.join(map(str, model.versions))}"
