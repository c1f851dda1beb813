"""Run a real tritonserver: start it, wait until its models are ready, stop it."""

import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from serving.bundle.delta import deltas_folder
from serving.errors import ServingError, TritonserverFailed
from serving.server.launch.access import Access
from serving.server.launch.child import Child, Launch, signals_deferred
from serving.server.launch.live import LiveCopies
from serving.server.launch.operations import Condition, operations_port
from serving.server.launch.ports import Endpoints, Ports, free_endpoints
from serving.server.launch.private import PrivateFolder, Trust, private_folder
from serving.server.launch.run_file import KeptRunFile, Recovery, RunFile
from serving.server.launch.shared_memory import is_open, region_prefix, remove_regions
from serving.server.models import Pins, ServedModel, check_pins, find_models
from serving.server.versions import switch
from serving.tables.shared_copy import remove_unused_copies
from serving.triton.command_line import erase_from_command_line, exit_timeout_of, model_options, serving_options
from serving.triton.control import UNIX, Control, metrics_page
from serving.triton.installation import find_tritonserver, oldest_secure, triton_release

SHM_BYTES = 1 << 30
_POLL_S = 0.05
_CONTROL_TIMEOUT_S = 5.0
# Seconds after a stopping server's own exit timeout until it is killed.
_GRACE_S = 15.0


@dataclass(kw_only=True, slots=True)
class Server:
    """A running tritonserver whose models are ready.

    Attributes:
        grpc: address, "host:port".
        operations: URL of the operations port, "http://host:port".
        http: address, "host:port". None: clients may not use HTTP.
        control_address: the address of its control API, see `Control`.
        metrics_address: the Unix socket of Triton's metrics.
        condition: what the operations port says of it.
        key: the key of its restricted protocols. Each server has a new one.
        launch: how its process is started.
        child: its present process.
        regions: prefix of the names of its shared-memory regions.
        exit_timeout_s: longest time to stop, in seconds. It is killed then.
        repository: the model repository that its process serves.
        private: the private folder with that repository, if it serves only signed bundles. Otherwise None.
        started: when its first process was started, in Unix time.
        kept: its run file, which other commands read.
        loading: a lock for each model. It is held while the model is loaded.
        models: its models when it became ready.
        warnings: lines to show to the operator.
    """

    grpc: str
    http: str | None
    operations: str
    control_address: str
    metrics_address: str
    condition: Condition = field(repr=False)
    key: str = field(repr=False)
    launch: Launch = field(repr=False)
    child: Child
    regions: str
    exit_timeout_s: float
    repository: Path
    private: PrivateFolder | None
    started: float = field(default_factory=time.time)
    kept: KeptRunFile = field(init=False, repr=False)
    loading: Mapping[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock), repr=False)
    models: tuple[ServedModel, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """Its present process. `start_anew` replaces it."""
        return self.child.process

    def control(self, timeout_s: float) -> Control:
        """The control API of this server, which loads and unloads its models."""
        return Control(address=self.control_address, key=self.key, timeout_s=timeout_s)

    def start_anew(self) -> None:
        """Replace a process that has ended. The new one has the same addresses and key, and no model loaded yet.

        Call this from a thread that outlives the process: the kernel ends it when the thread that started it ends.
        """
        self.end()
        remove_regions(self.regions)
        for address in (self.control_address, self.metrics_address):
            if address.startswith(UNIX):
                Path(address.removeprefix(UNIX)).unlink(missing_ok=True)
        self.condition.restarts += 1
        self.condition.note_start()
        self.child = self.launch.start()
        self.kept.note(process=self.process.pid)

    @property
    def run_file(self) -> RunFile:
        """The content of its run file."""
        return self.kept.content

    def note_recovery(self, model: str | None, why: str) -> None:
        """Record in the run file that a model is loaded again. `model` is None if tritonserver is started again."""
        self.kept.note(
            recoveries=self.run_file.recoveries + 1, last_recovery=Recovery(model=model, why=why, at=time.time())
        )

    def end(self) -> None:
        """Let it answer the requests that it accepted, and end. Returns when it has ended."""
        self.child.end(self.exit_timeout_s)

    def wait(self) -> int:
        """Wait until the server ends. Returns its exit code."""
        return self.process.wait()

    def signal(self, number: int) -> None:
        """Send it a signal. Nothing happens if it has ended."""
        self.process.send_signal(number)


@contextlib.contextmanager
def run_server(
    repository: Path,
    ports: Ports,
    *,
    models: Sequence[str] | None = None,
    pins: Pins | None = None,
    hosts: Mapping[str, Mapping[str, str]] | None = None,
    access: Access | None = None,
    trust: Trust | None = None,
    deltas: Path | None = None,
    ready_timeout_s: float = 120.0,
    log: Path | None = None,
    shm_bytes: int = SHM_BYTES,
    options: Sequence[str] = (),
) -> Iterator[Server]:
    """Start a tritonserver on `repository`, wait until its models are ready, and stop it afterwards.

    The server is also stopped if this process dies.

    Args:
        repository: a model repository with models made by tbe-export.
        ports: the ports to listen on.
        models: the models to load. None: all that tbe-export made.
        pins: the versions to serve, by model. Other models are served as their config.pbtxt says.
        hosts: by router, the addresses of its hosts in place of those in config.pbtxt, by the host's number.
        access: who may reach it. None: only this machine, without TLS.
        trust: which signatures are trusted, and how signed bundles are served. None: unsigned bundles are served too.
        ready_timeout_s: longest time to load the models, in seconds.
        deltas: the folder of the models' deltas. None: REPOSITORY.deltas.
        log: the file for the server's log. None: stderr.
        shm_bytes: most bytes of shared memory of an instance, for the requests that it answers together. The kernel's
            limit on the size of files enforces it (RLIMIT_FSIZE).
        options: further options of tritonserver, such as "--log-info=true".

    Raises:
        TritonserverFailed: no tritonserver was found, it ended, or its models were not ready in time.
        ConfigurationError: an argument cannot be used, a pinned version is not there, or a port is taken.
        BundleError: a bundle is not signed by a trusted key.
    """
    models, pins, hosts = models or find_models(repository), pins or {}, hosts or {}
    check_pins(repository, models, pins)
    access = access or Access()
    key = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        private = None if trust is None else stack.enter_context(private_folder(repository, models, trust, pins))
        served = private.repository if private else repository
        installation = find_tritonserver(stack)
        endpoints = stack.enter_context(free_endpoints(access, ports))
        environment = installation.environment | (private.environment if private else {})
        sink = stack.enter_context(_sink(log))
        copies = LiveCopies((deltas or deltas_folder(repository)).absolute(), environment, sink)
        stack.enter_context(copies.kept())
        condition = Condition(tls=access.tls, copies=copies)
        scrape = partial(metrics_page, endpoints.metrics, _CONTROL_TIMEOUT_S)
        stack.enter_context(operations_port(endpoints.listener, condition, scrape, access))
        regions = stack.enter_context(region_prefix())
        launch = Launch(
            command=[
                str(installation.program),
                *serving_options(served, regions, installation.backends),
                *endpoints.options,
                *access.options(key),
                *options,
            ],
            environment=environment | copies.environment,
            folder=Path(private.path) if private else None,
            shm_bytes=shm_bytes,
            sink=sink,
        )
        # What is served otherwise than config.pbtxt says, Triton can be told to load only once it answers.
        told = {**dict.fromkeys(hosts, ()), **pins}
        untold = [model for model in models if model not in told]
        timeout_s = exit_timeout_of(options) + _GRACE_S
        server = stack.enter_context(
            _started(launch, untold, endpoints, condition, key, regions, timeout_s, served, private)
        )
        content = RunFile(
            grpc=server.grpc,
            control=endpoints.control,
            key=key,
            repository=str(repository.absolute()),
            private=private,
            process=server.process.pid,
            pinned=dict(pins),
            hosts={router: dict(addresses) for router, addresses in hosts.items()},
        )
        server.kept = stack.enter_context(KeptRunFile(content).kept())
        _make_ready(server, untold, told, ready_timeout_s)
        yield server


@contextlib.contextmanager
def _started(
    launch: Launch,
    models: Sequence[str],
    endpoints: Endpoints,
    condition: Condition,
    key: str,
    regions: str,
    exit_timeout_s: float,
    repository: Path,
    private: PrivateFolder | None,
) -> Iterator[Server]:
    """A server that loads `models`. They are not ready yet. It is stopped when the block ends."""
    with contextlib.ExitStack() as stack:
        with signals_deferred():
            server = Server(
                grpc=endpoints.grpc,
                http=endpoints.http,
                operations=endpoints.operations,
                control_address=endpoints.control,
                metrics_address=endpoints.metrics,
                condition=condition,
                key=key,
                launch=launch,
                child=launch.start(model_options(models)),
                regions=regions,
                exit_timeout_s=exit_timeout_s,
                repository=repository,
                private=private,
            )
            # The last process that uses a copy removes it when it ends. Killed by Triton, it cannot.
            stack.callback(remove_unused_copies)
            stack.callback(server.end)
        if models:  # loading them shows that it has copied its options. Without one, only its first answer does
            erase_from_command_line(server.process, key)
        yield server


def _make_ready(server: Server, models: Sequence[str], told: Pins, timeout_s: float) -> None:
    """Wait until `models`, which it loads by itself, are ready. Then load those that it has to be told."""
    _wait_until_ready(server, models, timeout_s)
    is_erased = erase_from_command_line(server.process, server.key, has_started=True)
    _load_told(server, told, timeout_s)
    server.models = _ready_models(server) or ()
    server.condition.server = None
    server.warnings = tuple(_warnings(server, is_erased))


def _sink(log: Path | None) -> BinaryIO:
    if log is None:
        return open(sys.stderr.fileno(), "wb", buffering=0, closefd=False)
    return open(log, "wb", buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600))


def _warnings(server: Server, is_erased: bool) -> Iterator[str]:
    version = server.control(_CONTROL_TIMEOUT_S).server_version()
    if not triton_release(version).is_secure:
        secure = oldest_secure()
        yield (
            f"tritonserver {version} lacks security fixes: let nobody but this machine reach it, or run "
            f"{'.'.join(map(str, secure.version))} ({secure.container}) or later"
        )
    if is_open(server.regions):
        yield "users of this machine can read requests and rows in /dev/shm: a sandbox forbids seccomp(2) here"
    if not is_erased:
        yield "the key to what the server keeps closed can be read in its command line by users of this machine"


def _wait_until_ready(server: Server, models: Sequence[str], timeout_s: float) -> None:
    """Wait until the server listens wherever it says, and `models` are ready."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (code := server.process.poll()) is not None:
            reason = server.child.output.reason()
            raise TritonserverFailed(f"tritonserver exited with {code} before its models were ready: {reason}")
        ready = _ready_models(server)
        if ready is not None and {model.name for model in ready} >= set(models) and _has_metrics(server):
            return
        time.sleep(_POLL_S)
    reason = server.child.output.reason()
    raise TritonserverFailed(f"tritonserver: {', '.join(models)} not ready within {timeout_s:g} s: {reason}")


def _has_metrics(server: Server) -> bool:
    """Whether there are metrics. Triton opens them last: models can be ready before."""
    return Path(server.metrics_address.removeprefix(UNIX)).exists()


def _load_told(server: Server, told: Pins, timeout_s: float) -> None:
    """Load these versions; of a model without any, those that config.pbtxt says."""
    for model, versions in told.items():
        try:
            switch(
                server.control(timeout_s),
                model,
                versions,
                private=server.private,
                repository=server.repository,
                hosts=server.run_file.hosts.get(model),
            )
        except ServingError as error:
            what = f" {', '.join(map(str, versions))}" if versions else ""
            raise TritonserverFailed(f"{model}: cannot serve{what}: {error}") from error


def _ready_models(server: Server) -> tuple[ServedModel, ...] | None:
    """The models with a ready version. None while the server is still starting."""
    try:
        index = server.control(_CONTROL_TIMEOUT_S).index()
    except ServingError:
        return None
    versions: dict[str, list[int]] = {}
    for entry in index:
        if entry.state == "READY":
            versions.setdefault(entry.model, []).append(entry.version)
    return tuple(ServedModel(name, tuple(sorted(found))) for name, found in sorted(versions.items()))
