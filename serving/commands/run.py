"""`tbe-serve run`: a tritonserver on a model repository."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from serving.bundle.lineage import deltas_url
from serving.commands.load import FollowOf, PinsOf, TrustOf, takes_follow, takes_pins, takes_trust
from serving.commands.pull import mirror_of
from serving.errors import ConfigurationError
from serving.files import is_url, read_file
from serving.log import LogFormat, server_log
from serving.model.config_file import Pins
from serving.server import (
    LOOPBACK,
    Access,
    Ports,
    ServedModel,
    Server,
    ServerTls,
    Supervisor,
    find_models,
    run_local_hosts,
    run_server,
)
from serving.server.drain import MOST_S
from serving.server.local_hosts import FleetSupervisor
from serving.server.private_folder import Trust
from serving.server.releases import ReleaseFile, ReleaseFollower, read_releases, released_versions
from serving.tables.memory_need import SHM_BYTES
from serving.terminal.app import out
from serving.terminal.options import shared_options
from serving.terminal.output import print_json
from serving.triton.command_line import RESTRICTED


def _ports(
    *,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port. 0: a free one.")] = Ports().grpc,
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="HTTP port, with --http. 0: a free one.")
    ] = Ports().http,
    operations_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of /livez, /readyz and /metrics (Prometheus). 0: a free one."),
    ] = Ports().operations,
) -> Ports:
    return Ports(grpc=grpc_port, http=http_port, operations=operations_port)


def _access(
    *,
    host: Annotated[str, typer.Option(help="IPv4 address of gRPC.")] = LOOPBACK,
    operations_host: Annotated[
        str, typer.Option(help="IPv4 address of the operations port. Only probes and scrapers need to reach it.")
    ] = LOOPBACK,
    operations_tls: Annotated[
        bool, typer.Option("--operations-tls", help="The operations port has the certificate of --tls-cert.")
    ] = False,
    operations_token: Annotated[
        Path | None,
        typer.Option(help="File with a token. Who reads /metrics sends it: `Authorization: Bearer TOKEN`."),
    ] = None,
    http: Annotated[
        bool, typer.Option("--http", help="Serve HTTP too. Only this machine can reach it, unless --insecure.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="The server's certificate for gRPC, in PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, in PEM, without a password.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Clients need a certificate that this CA signed, in PEM.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Listen beyond this machine without TLS. Something else must shield it."),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="PROTOCOL", help=f"A protocol that then needs no key: {', '.join(RESTRICTED)}."),
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
        raise ConfigurationError("--tls-cert, --tls-key: expected both, and --tls-client-ca only beside them")
    return ServerTls(certificate=certificate, private_key=key, client_root=client_root)


# Seconds between two looks at a store.
_EVERY_S = 5.0

PortsOf = Callable[[], Ports]
AccessOf = Callable[[], Access]
# A command calls `ports()` and `access()` for the values of these options.
takes_ports = shared_options("ports", _ports)
takes_access = shared_options("access", _access)


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
        list[str] | None, typer.Argument(metavar="[-- TRITON_OPTIONS]", help="Passed on to tritonserver.")
    ] = None,
    shm_mib: Annotated[
        int,
        typer.Option(
            min=1, max=1 << 40, help="Most shared memory of an instance, for the requests that it answers together."
        ),
    ] = SHM_BYTES >> 20,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Of a URL: the folder that versions are brought into. Default: one in ~/.cache/tbe-serving."
        ),
    ] = None,
    every_s: Annotated[
        float | None,
        typer.Option(min=0.1, max=86_400, help="With a URL and --follow: seconds between looks at the store; 5."),
    ] = None,
    deltas: Annotated[
        str | None,
        typer.Option(
            help="Folder of the deltas of models with `weights-memory: live`, or its URL in a store. Default: "
            "REPOSITORY.deltas, a folder or a URL as the repository is."
        ),
    ] = None,
    drain_s: Annotated[
        float,
        typer.Option(
            min=0,
            max=MOST_S,
            help="Seconds, 2 or more, in which clients of any kind leave before a stop: the server is not ready, and "
            "answers until their connections are closed. 0: stop at once. A second signal always does.",
        ),
    ] = 0.0,
    recover: Annotated[
        bool,
        typer.Option(
            help="Start a model or tritonserver again if it died or hangs. Otherwise stop, and exit with its code."
        ),
    ] = True,
    local_hosts: Annotated[
        bool,
        typer.Option(
            "--local-hosts",
            help="Serve a router and its hosts, whose models lie in the same repository, all on this machine: "
            "a tritonserver for each host on free ports, and one for the router on the ports given here.",
        ),
    ] = False,
    log_format: Annotated[
        LogFormat, typer.Option(help="Form of the log on stderr, tritonserver's lines included: a line an event.")
    ] = LogFormat.TEXT,
    as_json: Annotated[bool, typer.Option("--json", help="When ready, print one line of JSON.")] = False,
) -> None:
    """Run a tritonserver on a model repository until SIGINT or SIGTERM. Exits with its exit code.

    Requests that were accepted before the signal are answered. A second signal ends it without that.
    """
    versions, unload_after_s, trusted = pins(), follow(), trust()
    if deltas is None and is_url(repository):
        deltas = deltas_url(repository)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own would wait for a store that hangs
    mirror = mirror_of(repository, cache, versions, every_s=every_s, follow=unload_after_s is not None, deltas=deltas)
    signals = _Signals()
    folder = Path(repository) if mirror is None else mirror.repository
    files = () if unload_after_s is None else _releases(folder, versions, trusted)
    pinned = {**released_versions(files), **versions}
    common: dict[str, Any] = {
        "trust": trusted,
        "deltas": deltas,
        "shm_bytes": shm_mib << 20,
        "drain_s": drain_s,
        "options": triton_options or (),
    }
    serve = partial(_fleet if local_hosts else _alone, log_format=log_format)
    with _private_files(), serve(folder, ports(), pins=pinned, access=access(), **common) as servers:
        watched = [
            Supervisor(server, recover, _follower(server, files, unload_after_s)) for server in servers.values()
        ]
        log = servers[""].log
        if mirror is not None and mirror.problem is not None:
            log.warning("what was brought before is served: %s", mirror.problem, extra={"event": "pull_failed"})
        for warning in dict.fromkeys(warning for server in servers.values() for warning in server.warnings):
            log.warning(warning, extra={"event": "warning"})
        for server in servers.values():
            named = ", ".join(map(_named, server.models))
            server.log.info("serves %s on %s", named, server.grpc, extra={"event": "ready"})
        signals.supervisor = supervisor = FleetSupervisor(watched[:-1], watched[-1]) if local_hosts else watched[0]
        print_json(_as_json(servers)) if as_json else out.print(_as_text(servers))
        sys.stdout.flush()
        if mirror is not None and unload_after_s is not None:
            told = (log, every_s or _EVERY_S, [server.health for server in servers.values()])
            threading.Thread(target=mirror.keep, args=told, name="store", daemon=True).start()
        code = supervisor.wait()
    raise typer.Exit(code if code >= 0 else 128 - code)


# Servers by what lines about them begin with: nothing for the one that clients ask, which comes last.
Servers = Mapping[str, Server]


@contextmanager
def _alone(repository: Path, ports: Ports, *, log_format: LogFormat, **options: Any) -> Iterator[Servers]:
    with run_server(repository, ports, log=server_log(form=log_format), **options) as server:
        yield {"": server}


@contextmanager
def _fleet(repository: Path, ports: Ports, *, log_format: LogFormat, **options: Any) -> Iterator[Servers]:
    with run_local_hosts(repository, ports, log_format=log_format, **options) as fleet:
        yield {f"host {number}": server for number, server in fleet.hosts.items()} | {"": fleet.router}


def _follower(server: Server, files: Sequence[ReleaseFile], unload_after_s: float | None) -> ReleaseFollower | None:
    """What follows the releases of a server's models. None: they are not followed."""
    if unload_after_s is None:
        return None
    served = {model.name for model in server.models}
    own = [file for file in files if file.model in served]
    return ReleaseFollower(server, own, unload_after_s)


def _releases(repository: Path, pinned: Pins, trust: Trust | None) -> tuple[ReleaseFile, ...]:
    """The release files of all models that are not pinned."""
    models = [model for model in find_models(repository) if model not in pinned]
    return read_releases(repository, models, None if trust is None else trust.keys)


@contextmanager
def _private_files() -> Iterator[None]:
    """In the block, only their own user can open the files that this process makes."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


class _Signals:
    """Passes SIGINT and SIGTERM to the supervisor. Until there is one, they end the command."""

    def __init__(self) -> None:
        self.supervisor: Supervisor | FleetSupervisor | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        if self.supervisor is None:
            raise SystemExit(128 + number)  # on the way out, run_server stops the server if it was started
        self.supervisor.stop(number)


def _as_json(servers: Servers) -> str:
    *hosts, server = servers.values()
    seen: dict[str, Any] = {
        "grpc": server.grpc,
        "http": server.http,
        "operations": server.operations,
        "models": server.models,
    }
    if hosts:
        seen["hosts"] = [{"grpc": host.grpc, "operations": host.operations, "models": host.models} for host in hosts]
    return msgspec.json.encode(seen).decode()


def _as_text(servers: Servers) -> Table:
    table = Table.grid(padding=(0, 2))
    server = servers[""]
    for name, each in servers.items():
        if name:
            table.add_row(name, f"{each.grpc}  {', '.join(map(_named, each.models))}")
    for model in server.models:
        table.add_row("ready", _named(model))
    table.add_row("gRPC", server.grpc)
    if server.http is not None:
        table.add_row("HTTP", f"http://{server.http}")
    table.add_row("operations", f"{server.operations}/metrics, /readyz, /livez")
    table.add_row("stop", "Ctrl-C")
    return table


def _named(model: ServedModel) -> str:
    return f"{model.name} {', '.join(map(str, model.versions))}"
