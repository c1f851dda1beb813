"""Run a real tritonserver: start it, wait until its models are ready, stop it."""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.bundle import MANIFEST
from serving.errors import ServerFailed
from serving.server.installation import Installation, find_tritonserver

LOOPBACK = "127.0.0.1"
_POLL_S = 0.05
# What Triton adds to a reason that a Python model gave: the line of our code that gave it.
_AT = re.compile(r"\\n\\nAt:.*")
_HTTP_TIMEOUT_S = 5.0
# The server is on this machine: no proxy that the environment names knows it.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """Where a server listens; 0 takes a free port."""

    grpc: int = 8001
    http: int = 8000
    metrics: int = 8002


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready, and its ready versions."""

    name: str
    versions: tuple[int, ...]


@dataclass(slots=True)
class Server:
    """A running tritonserver whose models are ready.

    Attributes:
        grpc, http, metrics: addresses, "host:port".
    """

    process: subprocess.Popen[bytes]
    grpc: str
    http: str
    metrics: str
    models: tuple[ServedModel, ...] = ()

    def wait(self) -> int:
        """Wait until the server ends; its exit code."""
        return self.process.wait()

    def signal(self, number: int) -> None:
        """Pass a signal on; nothing happens to a server that has ended."""
        self.process.send_signal(number)


def find_models(repository: Path) -> tuple[str, ...]:
    """The models of a repository that tbe-export made.

    Raises:
        ServerFailed: there is no repository, or no exported model in it.
    """
    if not repository.is_dir():
        raise ServerFailed(f"{repository}: expected a model repository, found no folder: tbe-export makes one")
    models = sorted({path.parent.parent.name for path in repository.glob(f"*/*/{MANIFEST}")})
    if not models:
        raise ServerFailed(f"{repository}: expected models made by tbe-export, found none")
    return tuple(models)


@contextlib.contextmanager
def run_server(
    repository: Path,
    ports: Ports,
    *,
    models: Sequence[str] | None = None,
    host: str = LOOPBACK,
    ready_timeout_s: float = 120.0,
    log: Path | None = None,
    options: Sequence[str] = (),
) -> Iterator[Server]:
    """Start a tritonserver on `repository`, wait until its models are ready, and stop it afterwards.

    The server also ends when this process dies.

    Args:
        repository: a model repository with models made by tbe-export.
        ports: where to listen.
        models: the models to load; all that tbe-export made where None.
        host: the address to listen on.
        ready_timeout_s: how long the models may take to load.
        log: the file that takes the server's log; stderr where None.
        options: further options of tritonserver, such as "--log-info=true".

    Raises:
        ServerFailed: no tritonserver was found, a port is taken, a model did not load, or the time is up.
    """
    models = models or find_models(repository)
    with contextlib.ExitStack() as stack:
        installation = find_tritonserver(stack)
        taken = _take_ports(host, ports)
        output = stack.enter_context(log.open("wb")) if log else sys.stderr
        with _signals_deferred():
            process = subprocess.Popen(
                _command(installation, repository, models, host, taken, options),
                env=os.environ | installation.environment,
                stdin=subprocess.DEVNULL,
                stdout=output.fileno(),
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is ours to pass on, once
                preexec_fn=_die_with_parent,
            )
            stack.callback(_stop, process)
        server = Server(process, f"{host}:{taken.grpc}", f"{host}:{taken.http}", f"{host}:{taken.metrics}")
        server.models = _wait_until_ready(server, models, ready_timeout_s, log)
        yield server


def _take_ports(host: str, ports: Ports) -> Ports:
    """Check that the ports are free, and choose the ones that were left open (0)."""
    with contextlib.ExitStack() as stack:
        chosen = {}
        for name in ("grpc", "http", "metrics"):
            asked = getattr(ports, name)
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, asked))
            except OSError as error:
                raise ServerFailed(
                    f"--{name}-port {asked}: cannot listen on {host}: {error.strerror}: pick another, or 0 for a "
                    "free one"
                ) from error
            chosen[name] = listener.getsockname()[1]
        return Ports(**chosen)


def _command(
    installation: Installation,
    repository: Path,
    models: Sequence[str],
    host: str,
    ports: Ports,
    options: Sequence[str],
) -> list[str]:
    command = [
        str(installation.program),
        f"--model-repository={repository.absolute()}",
        # Explicit: a version is loaded when somebody asks for it, never because a file changed.
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in models),
        # config.pbtxt says everything; completion would drop what makes ragged inputs merge.
        "--disable-auto-complete-config",
        *(f"--{protocol}-address={host}" for protocol in ("grpc", "http", "metrics")),
        f"--grpc-port={ports.grpc}",
        f"--http-port={ports.http}",
        f"--metrics-port={ports.metrics}",
        "--allow-gpu-metrics=false",
        "--pinned-memory-pool-byte-size=0",  # for copies to a GPU, which a CPU model never makes
        "--log-info=false",
        # Of the headers only the trace context is the backend's business.
        "--grpc-header-forward-pattern=(?i)traceparent",
        "--http-header-forward-pattern=(?i)traceparent",
    ]
    if installation.backends:
        command.append(f"--backend-directory={installation.backends}")
    return [*command, *options]


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Handle SIGINT and SIGTERM at the end: a handler that raises would lose a process that is just starting."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread alone
        return
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    for number in came:
        signal.raise_signal(number)


def _die_with_parent() -> None:
    """In the child: ask the kernel for SIGTERM when the parent ends (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _wait_until_ready(
    server: Server, models: Sequence[str], timeout_s: float, log: Path | None
) -> tuple[ServedModel, ...]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (code := server.process.poll()) is not None:
            raise ServerFailed(f"tritonserver exited with {code} before its models were ready: {_said(log)}")
        ready = _ready_models(server.http)
        if {model.name for model in ready} >= set(models):
            return ready
        time.sleep(_POLL_S)
    raise ServerFailed(f"tritonserver: {', '.join(models)} not ready within {timeout_s:g} s: {_said(log)}")


def _said(log: Path | None) -> str:
    """The error lines of a log, or where it is."""
    if log is None:
        return "its log is above"
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(_AT.sub("", line) for line in lines if line.startswith("E")) or f"see {log}"


def _ready_models(http: str) -> tuple[ServedModel, ...]:
    """What Triton's repository index calls ready; nothing while the server is still starting."""
    request = urllib.request.Request(f"http://{http}/v2/repository/index", data=b"{}", method="POST")
    try:
        with _DIRECT.open(request, timeout=_HTTP_TIMEOUT_S) as response:
            index: list[dict[str, Any]] = json.load(response)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return ()
    versions: dict[str, list[int]] = {}
    for entry in index:
        if entry.get("state") == "READY":
            versions.setdefault(entry["name"], []).append(int(entry["version"]))
    return tuple(ServedModel(name, tuple(sorted(found))) for name, found in sorted(versions.items()))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to finish what it has accepted and end; wait until it has."""
    if process.poll() is None:
        process.terminate()
    process.wait()
