"""Run a real tritonserver: start it, wait until its models are ready, stop it."""

import contextlib
import ctypes
import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from serving.bundle import MANIFEST
from serving.errors import ServerFailed, ServingError
from serving.server.access import Access
from serving.server.control import Control
from serving.server.hidden import hide
from serving.server.installation import Installation, find_tritonserver
from serving.server.private import PrivateFolder, Trust, private_folder
from serving.server.run_file import RunFile
from serving.server.shared_memory import region_prefix

# Of Triton: 26.04. Earlier ones lack fixes, the 2025 ones of the Python backend's shared memory among them.
_FLOOR = (2, 68)
SHM_BYTES = 1 << 30
# mallopt(3): what requests took is kept for the next ones, up to so much. Given back each time, it is asked for anew
# page by page, which large requests feel; Triton's own pool would keep any size for ever.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
_POLL_S = 0.05
# What Triton adds to a reason that a Python model gave: the line of our code that gave it.
_AT = re.compile(r"\\n\\nAt:.*")
_HTTP_TIMEOUT_S = 5.0


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
        key: opens what it keeps closed; a new one for each server.
        warnings: what whoever runs it should know, a line each.
    """

    process: subprocess.Popen[bytes]
    grpc: str
    http: str
    metrics: str
    key: str = field(repr=False)
    models: tuple[ServedModel, ...] = ()
    warnings: tuple[str, ...] = ()

    def control(self, timeout_s: float) -> Control:
        """What loads and unloads its models."""
        return Control(http=self.http, key=self.key, timeout_s=timeout_s)

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
    access: Access | None = None,
    trust: Trust | None = None,
    ready_timeout_s: float = 120.0,
    log: Path | None = None,
    shm_bytes: int = SHM_BYTES,
    options: Sequence[str] = (),
) -> Iterator[Server]:
    """Start a tritonserver on `repository`, wait until its models are ready, and stop it afterwards.

    The server also ends when this process dies.

    Args:
        repository: a model repository with models made by tbe-export.
        ports: where to listen.
        models: the models to load; all that tbe-export made where None.
        access: who may reach it; this machine alone, in the clear, where None.
        trust: whose signatures count, and how what they signed is served; whatever is there is served where None.
        ready_timeout_s: how long the models may take to load.
        log: the file that takes the server's log; stderr where None.
        shm_bytes: most shared memory that an instance may take for the requests it is handed together. It is the
            kernel's limit on the size of files (RLIMIT_FSIZE), so that it holds for a log file too.
        options: further options of tritonserver, such as "--log-info=true".

    Raises:
        ServerFailed: no tritonserver was found, a port is taken, a model did not load, or the time is up.
        BundleError, ConfigurationError: what would be served was not signed by a trusted key.
    """
    models = models or find_models(repository)
    access = access or Access()
    private: PrivateFolder | None = None
    key = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        if trust is not None:
            private = stack.enter_context(private_folder(repository, models, trust))
            repository = private.repository
        installation = find_tritonserver(stack)
        taken = _take_ports(access, ports)
        regions = stack.enter_context(region_prefix())
        output = stack.enter_context(log.open("wb")) if log else sys.stderr
        with _signals_deferred():
            process = subprocess.Popen(
                [*_command(installation, repository, models, taken, regions), *access.options(key), *options],
                env=_MALLOC | os.environ | installation.environment | (private.environment if private else {}),
                cwd=private.path if private else None,  # it is where a model's Python looks for modules first
                stdin=subprocess.DEVNULL,
                stdout=output.fileno(),
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is ours to pass on, once
                preexec_fn=partial(_in_child, shm_bytes),
            )
            stack.callback(_stop, process)
        is_hidden = hide(process, key)
        server = Server(
            process,
            grpc=f"{access.host}:{taken.grpc}",
            http=f"{access.http_host}:{taken.http}",
            metrics=f"{access.host}:{taken.metrics}",
            key=key,
        )
        run_file = RunFile(http=server.http, key=key, private=private)
        stack.enter_context(run_file.written())
        server.models = _wait_until_ready(server, models, ready_timeout_s, log)
        server.warnings = tuple(_warnings(server, is_hidden))
        yield server


def _warnings(server: Server, is_hidden: bool) -> Iterator[str]:
    version = server.control(_HTTP_TIMEOUT_S).server_version()
    if tuple(map(int, version.split(".")[:2])) < _FLOOR:
        yield (
            f"tritonserver {version} lacks security fixes: let nobody but this machine reach it, or run "
            f"{_FLOOR[0]}.{_FLOOR[1]} (26.04) or later"
        )
    if not is_hidden:
        yield "the key to what the server keeps closed can be read in its command line by users of this machine"


def _take_ports(access: Access, ports: Ports) -> Ports:
    """Check that the ports are free, and choose the ones that were left open (0)."""
    with contextlib.ExitStack() as stack:
        chosen = {}
        for name in ("grpc", "http", "metrics"):
            asked = getattr(ports, name)
            host = access.http_host if name == "http" else access.host
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
    ports: Ports,
    regions: str,
) -> list[str]:
    command = [
        str(installation.program),
        f"--model-repository={repository.absolute()}",
        # Explicit: a version is loaded when somebody asks for it, never because a file changed.
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in models),
        # config.pbtxt says everything; completion would drop what makes ragged inputs merge.
        "--disable-auto-complete-config",
        f"--grpc-port={ports.grpc}",
        f"--http-port={ports.http}",
        f"--metrics-port={ports.metrics}",
        "--allow-gpu-metrics=false",
        # Kept for reuse, a request's memory is never given back: eight of 1.9 GB are 15 GB.
        "--grpc-infer-allocation-pool-size=0",
        f"--backend-config=python,shm-region-prefix-name={regions}",
        "--pinned-memory-pool-byte-size=0",  # for copies to a GPU, which a CPU model never makes
        "--log-info=false",
        # Of the headers only the trace context is the backend's business.
        "--grpc-header-forward-pattern=(?i)traceparent",
        "--http-header-forward-pattern=(?i)traceparent",
        # Clients may ask for a sign of life twice a second; by default Triton ends what asks thrice in five minutes.
        "--grpc-http2-min-recv-ping-interval-without-data=500",
    ]
    if installation.backends:
        command.append(f"--backend-directory={installation.backends}")
    return command


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


def _in_child(shm_bytes: int) -> None:
    """Ask the kernel for SIGTERM when the parent ends (prctl(2), PR_SET_PDEATHSIG), and to limit the size of files.

    Triton's Python backend makes a file in /dev/shm as large as it takes, and never smaller: without a limit a few
    hostile requests fill it. A file that may not grow is an error to it, as long as the signal for that is ignored.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (shm_bytes if most < 0 else min(shm_bytes, most), most))


def _wait_until_ready(
    server: Server, models: Sequence[str], timeout_s: float, log: Path | None
) -> tuple[ServedModel, ...]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (code := server.process.poll()) is not None:
            raise ServerFailed(f"tritonserver exited with {code} before its models were ready: {_said(log)}")
        ready = _ready_models(server)
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


def _ready_models(server: Server) -> tuple[ServedModel, ...]:
    """What Triton's repository index calls ready; nothing while the server is still starting."""
    try:
        index = server.control(_HTTP_TIMEOUT_S).index()
    except ServingError:
        return ()
    versions: dict[str, list[int]] = {}
    for entry in index:
        if entry.state == "READY":
            versions.setdefault(entry.model, []).append(entry.version)
    return tuple(ServedModel(name, tuple(sorted(found))) for name, found in sorted(versions.items()))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to finish what it has accepted and end; wait until it has."""
    if process.poll() is None:
        process.terminate()
    process.wait()
    # A server that was killed leaves its models' processes, which notice, but may hang and hold their memory.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
