"""`tbe-serve run`: a tritonserver on a model repository."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from serving.commands.connection import say
from serving.commands.listening import AccessOf, PortsOf, takes_access, takes_ports
from serving.commands.trust import TrustOf, takes_trust
from serving.commands.versions import FollowOf, PinsOf, takes_follow, takes_pins
from serving.server import Server, Supervisor, find_models, run_server
from serving.server.follower import Follower
from serving.server.models import Pins
from serving.server.private import Trust
from serving.server.process import SHM_BYTES
from serving.server.releases import ReleaseFile, read_releases, released_versions
from serving.terminal.program import out


@takes_follow
@takes_pins
@takes_trust
@takes_access
@takes_ports
def run(
    repository: Annotated[Path, typer.Argument(help="The model repository that tbe-export wrote.")],
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
    recover: Annotated[
        bool,
        typer.Option(
            help="Start a model or tritonserver anew that died or hangs. Otherwise stop, and exit with its code."
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="When ready, print one line of JSON.")] = False,
) -> None:
    """Run a tritonserver on a model repository until SIGINT or SIGTERM. Exits with its exit code.

    Every request that was accepted before is answered.
    """
    signals = _Signals()
    versions, unload_after_s, trusted = pins(), follow(), trust()
    files = () if unload_after_s is None else _releases(repository, versions, trusted)
    with (
        _private_files(),
        run_server(
            repository,
            ports(),
            pins={**released_versions(files), **versions},
            access=access(),
            trust=trusted,
            shm_bytes=shm_mib << 20,
            options=triton_options or (),
        ) as server,
    ):
        for warning in server.warnings:
            say(warning)
        follower = None if unload_after_s is None else Follower(server, files, unload_after_s, say)
        signals.supervisor = supervisor = Supervisor(server, recover, say, follower)
        print(_as_json(server)) if as_json else out.print(_as_text(server))
        sys.stdout.flush()
        code = supervisor.wait()
    if code:
        say(f"tritonserver exited with {code}")
    raise typer.Exit(code if code >= 0 else 128 - code)


def _releases(repository: Path, pinned: Pins, trust: Trust | None) -> tuple[ReleaseFile, ...]:
    """The releases of all models that are not pinned."""
    models = [model for model in find_models(repository) if model not in pinned]
    return read_releases(repository, models, None if trust is None else trust.keys)


@contextmanager
def _private_files() -> Iterator[None]:
    """What this process makes is its user's alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


class _Signals:
    """Passes SIGINT and SIGTERM on to the supervisor. Before there is one, they end the command."""

    def __init__(self) -> None:
        self.supervisor: Supervisor | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        if self.supervisor is None:
            raise SystemExit(128 + number)  # leaving run_server stops what has started
        self.supervisor.stop(number)


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
