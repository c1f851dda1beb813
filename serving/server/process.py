"""Run a real tritonserver: start it, wait until its models are ready, stop it."""

import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from serving.bundle import MANIFEST
from serving.errors import ServerFailed, ServingError
from serving.server.access import Access
from serving.server.child import Child, Launch, signals_deferred
from serving.server.control import UNIX, Control
from serving.server.hidden import hide
from serving.server.installation import Installation, find_tritonserver
from serving.server.ports import Ports, free_ports, ipv4_alone
from serving.server.private import PrivateFolder, Trust, private_folder
from serving.server.run_file import RunFile, control_socket
from serving.server.shared_memory import region_prefix, remove_regions

# Of Triton: 26.04. Earlier ones lack fixes, the 2025 ones of the Python backend's shared memory among them.
_FLOOR = (2, 68)
SHM_BYTES = 1 << 30
_POLL_S = 0.05
_CONTROL_TIMEOUT_S = 5.0
# Triton's own --exit-timeout-secs, and what it gets on top of that before it is killed.
_EXIT_TIMEOUT_S, _GRACE_S = 30.0, 15.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready, and its ready versions."""

    name: str
    versions: tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class Server:
    """A running tritonserver whose models are ready.

    Attributes:
        grpc, metrics: addresses, "host:port".
        http: the same, where clients may use HTTP.
        control_address: where it takes commands; see `Control`.
        key: opens what it keeps closed; a new one for each server.
        launch, child: how it is started, and its process of now.
        regions: how the names of its shared memory begin.
        started: when it was first, Unix time.
        exit_timeout_s: how long it may take to stop.
        warnings: what whoever runs it should know, a line each.
    """

    grpc: str
    http: str | None
    metrics: str
    control_address: str
    key: str = field(repr=False)
    launch: Launch = field(repr=False)
    child: Child
    regions: str
    exit_timeout_s: float
    started: float = field(default_factory=time.time)
    models: tuple[ServedModel, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """Its process; another one after `start_anew`."""
        return self.child.process

    def control(self, timeout_s: float) -> Control:
        """What loads and unloads its models."""
        return Control(address=self.control_address, key=self.key, timeout_s=timeout_s)

    def start_anew(self) -> None:
        """Put another process in the place of one that has ended: same addresses, same key, no model loaded yet.

        From the main thread alone: the kernel ends the process with the thread that started it.
        """
        self.end()
        remove_regions(self.regions)
        if self.control_address.startswith(UNIX):
            Path(self.control_address.removeprefix(UNIX)).unlink(missing_ok=True)
        self.child = self.launch.start()

    def end(self) -> None:
        """Ask it to finish what it has accepted and end; wait until it has."""
        self.child.end(self.exit_timeout_s)

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
        shm_bytes: most shared memory that an instance may take for the requests it is handed together: the kernel's
            limit on the size of files (RLIMIT_FSIZE).
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
        taken = stack.enter_context(free_ports(access, ports))
        stack.enter_context(ipv4_alone(access.host, taken.grpc))
        regions = stack.enter_context(region_prefix())
        http = f"{access.http_host}:{taken.http}" if access.http else None
        control = http or stack.enter_context(control_socket())
        command = _command(installation, repository, taken, regions)
        # Triton has one HTTP endpoint: where clients have none, it is for us alone.
        command += [] if access.http else [f"--http-address={control}"]
        launch = Launch(
            command=[*command, *access.options(key), *options],
            environment=installation.environment | (private.environment if private else {}),
            folder=Path(private.path) if private else None,
            shm_bytes=shm_bytes,
            sink=stack.enter_context(_sink(log)),
        )
        with signals_deferred():
            server = Server(
                grpc=f"{access.host}:{taken.grpc}",
                http=http,
                metrics=f"{access.host}:{taken.metrics}",
                control_address=control,
                key=key,
                launch=launch,
                child=launch.start([f"--load-model={model}" for model in models]),
                regions=regions,
                exit_timeout_s=_exit_timeout_s(options) + _GRACE_S,
            )
            stack.callback(server.end)
        is_hidden = hide(server.process, key)
        run_file = RunFile(
            grpc=server.grpc,
            control=control,
            key=key,
            private=private,
        )
        stack.enter_context(run_file.written())
        server.models = _wait_until_ready(server, models, ready_timeout_s)
        server.warnings = tuple(_warnings(server, is_hidden))
        yield server


def _sink(log: Path | None) -> BinaryIO:
    return open(log or sys.stderr.fileno(), "wb", buffering=0, closefd=log is not None)


def _exit_timeout_s(options: Sequence[str]) -> float:
    said = [option.partition("=")[2] for option in options if option.startswith("--exit-timeout-secs=")]
    return float(said[-1]) if said and said[-1].isdigit() else _EXIT_TIMEOUT_S


def _warnings(server: Server, is_hidden: bool) -> Iterator[str]:
    version = server.control(_CONTROL_TIMEOUT_S).server_version()
    if tuple(map(int, version.split(".")[:2])) < _FLOOR:
        yield (
            f"tritonserver {version} lacks security fixes: let nobody but this machine reach it, or run "
            f"{_FLOOR[0]}.{_FLOOR[1]} (26.04) or later"
        )
    if not is_hidden:
        yield "the key to what the server keeps closed can be read in its command line by users of this machine"


def _command(
    installation: Installation,
    repository: Path,
    ports: Ports,
    regions: str,
) -> list[str]:
    command = [
        str(installation.program),
        f"--model-repository={repository.absolute()}",
        # Explicit: a version is loaded when somebody asks for it, never because a file changed.
        "--model-control-mode=explicit",
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


def _wait_until_ready(server: Server, models: Sequence[str], timeout_s: float) -> tuple[ServedModel, ...]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (code := server.process.poll()) is not None:
            reason = server.child.output.reason()
            raise ServerFailed(f"tritonserver exited with {code} before its models were ready: {reason}")
        ready = _ready_models(server)
        if {model.name for model in ready} >= set(models):
            return ready
        time.sleep(_POLL_S)
    reason = server.child.output.reason()
    raise ServerFailed(f"tritonserver: {', '.join(models)} not ready within {timeout_s:g} s: {reason}")


def _ready_models(server: Server) -> tuple[ServedModel, ...]:
    """What Triton's repository index calls ready; nothing while the server is still starting."""
    try:
        index = server.control(_CONTROL_TIMEOUT_S).index()
    except ServingError:
        return ()
    versions: dict[str, list[int]] = {}
    for entry in index:
        if entry.state == "READY":
            versions.setdefault(entry.model, []).append(entry.version)
    return tuple(ServedModel(name, tuple(sorted(found))) for name, found in sorted(versions.items()))
