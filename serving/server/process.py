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
from pathlib import Path
from typing import BinaryIO

from serving.errors import ServingError, TritonserverFailed
from serving.ranks.shared_copy import remove_unused_copies
from serving.server.access import Access
from serving.server.child import Child, Launch, signals_deferred
from serving.server.models import Pins, ServedModel, check_pins, find_models
from serving.server.oom_kills import OomKills
from serving.server.ports import Endpoints, Ports, free_endpoints
from serving.server.private import PrivateFolder, Trust, private_folder
from serving.server.run_file import KeptRunFile, Recovery, RunFile
from serving.server.shared_memory import is_open, region_prefix, remove_regions
from serving.server.switch import switch
from serving.triton.control import UNIX, Control
from serving.triton.installation import find_tritonserver
from serving.triton.options import exit_timeout_of, model_options, serving_options
from serving.triton.releases import oldest_secure, release_of
from serving.triton.secret import erase_from_command_line

SHM_BYTES = 1 << 30
_POLL_S = 0.05
_CONTROL_TIMEOUT_S = 5.0
# A server that was told to stop is killed so long after its own exit timeout.
_GRACE_S = 15.0


@dataclass(kw_only=True, slots=True)
class Server:
    """A running tritonserver whose models are ready.

    Attributes:
        grpc, metrics: addresses, "host:port".
        http: address, "host:port"; None where clients may not use HTTP.
        control_address: the address of its control API; see `Control`.
        key: the key of its restricted protocols; each server has a new one.
        launch: how its process is started.
        child: its present process.
        regions: prefix of the names of its shared-memory regions.
        exit_timeout_s: how long it may take to stop, in seconds.
        repository: the model repository that its process serves.
        private: the private folder with that repository, if it serves signed bundles alone; otherwise None.
        started: when its first process was started, in Unix time.
        kept: the file that says to other commands what they know of it.
        loading: locks, by model. Who loads a model holds its lock.
        models: its models when it became ready.
        warnings: lines for whoever runs it.
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
    repository: Path
    private: PrivateFolder | None
    started: float = field(default_factory=time.time)
    kept: KeptRunFile = field(init=False, repr=False)
    loading: Mapping[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock), repr=False)
    models: tuple[ServedModel, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """Its present process; `start_anew` puts another in its place."""
        return self.child.process

    def control(self, timeout_s: float) -> Control:
        """The control API of this server, which loads and unloads its models."""
        return Control(address=self.control_address, key=self.key, timeout_s=timeout_s)

    def start_anew(self) -> None:
        """Start another process in place of one that has ended: same addresses, same key, no model loaded yet.

        Call this from the main thread: the kernel ends the process when the thread that started it ends.
        """
        self.end()
        remove_regions(self.regions)
        if self.control_address.startswith(UNIX):
            Path(self.control_address.removeprefix(UNIX)).unlink(missing_ok=True)
        self.child = self.launch.start()
        self.kept.note(process=self.process.pid)

    @property
    def run_file(self) -> RunFile:
        """What other commands know of it."""
        return self.kept.content

    def note_recovery(self, model: str | None, why: str) -> None:
        """Note that a model, or tritonserver where that is None, is started anew."""
        self.kept.note(
            recoveries=self.run_file.recoveries + 1, last_recovery=Recovery(model=model, why=why, at=time.time())
        )

    def end(self) -> None:
        """Ask it to finish what it has accepted and end; wait until it has."""
        self.child.end(self.exit_timeout_s)

    def wait(self) -> int:
        """Wait until the server ends; its exit code."""
        return self.process.wait()

    def signal(self, number: int) -> None:
        """Pass a signal on. Does nothing to a server that has ended."""
        self.process.send_signal(number)


@contextlib.contextmanager
def run_server(
    repository: Path,
    ports: Ports,
    *,
    models: Sequence[str] | None = None,
    pins: Pins | None = None,
    access: Access | None = None,
    trust: Trust | None = None,
    ready_timeout_s: float = 120.0,
    log: Path | None = None,
    shm_bytes: int = SHM_BYTES,
    options: Sequence[str] = (),
) -> Iterator[Server]:
    """Start a tritonserver on `repository`, wait until its models are ready, and stop it afterwards.

    The server is stopped, too, when this process dies.

    Args:
        repository: a model repository with models made by tbe-export.
        ports: the ports to listen on.
        models: the models to load. None: all that tbe-export made.
        pins: the versions to serve, by model. Others are served as their config.pbtxt says.
        access: who may reach it. None: this machine alone, without TLS.
        trust: whose signatures count, and how signed bundles are served. None: unsigned bundles are served too.
        ready_timeout_s: how long the models may take to load, in seconds.
        log: the file for the server's log. None: stderr.
        shm_bytes: most shared memory of an instance, for the requests that it answers together. It is enforced as
            the kernel's limit on the size of files (RLIMIT_FSIZE).
        options: further options of tritonserver, such as "--log-info=true".

    Raises:
        TritonserverFailed: no tritonserver was found, it ended, or its models were not ready in time.
        ConfigurationError: an argument cannot be used, a pinned version is not there, or a port is taken.
        BundleError: a bundle is not signed by a trusted key.
    """
    models, pins = models or find_models(repository), pins or {}
    check_pins(repository, models, pins)
    access = access or Access()
    key = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        private = None if trust is None else stack.enter_context(private_folder(repository, models, trust, pins))
        served = private.repository if private else repository
        installation = find_tritonserver(stack)
        endpoints = stack.enter_context(free_endpoints(access, ports))
        regions = stack.enter_context(region_prefix())
        launch = Launch(
            command=[
                str(installation.program),
                *serving_options(served, regions, installation.backends),
                *endpoints.options,
                *access.options(key),
                *options,
            ],
            environment=installation.environment | (private.environment if private else {}),
            folder=Path(private.path) if private else None,
            shm_bytes=shm_bytes,
            sink=stack.enter_context(_sink(log)),
        )
        unpinned = [model for model in models if model not in pins]
        timeout_s = exit_timeout_of(options) + _GRACE_S
        server = stack.enter_context(_started(launch, unpinned, endpoints, key, regions, timeout_s, served, private))
        content = RunFile(
            grpc=server.grpc,
            control=endpoints.control,
            key=key,
            repository=str(repository.absolute()),
            private=private,
            process=server.process.pid,
            pinned=dict(pins),
        )
        server.kept = stack.enter_context(KeptRunFile(content).kept())
        _make_ready(server, unpinned, pins, ready_timeout_s)
        yield server


@contextlib.contextmanager
def _started(
    launch: Launch,
    models: Sequence[str],
    endpoints: Endpoints,
    key: str,
    regions: str,
    exit_timeout_s: float,
    repository: Path,
    private: PrivateFolder | None,
) -> Iterator[Server]:
    """A server that loads `models`, which are not ready yet. It is stopped at the end."""
    with contextlib.ExitStack() as stack:
        with signals_deferred():
            server = Server(
                grpc=endpoints.grpc,
                http=endpoints.http,
                metrics=endpoints.metrics,
                control_address=endpoints.control,
                key=key,
                launch=launch,
                child=launch.start(model_options(models)),
                regions=regions,
                exit_timeout_s=exit_timeout_s,
                repository=repository,
                private=private,
            )
            # Triton may have no time to end all models by themselves, so that the last one would remove its copies.
            stack.callback(remove_unused_copies)
            stack.callback(server.end)
        if models:  # with none, there is no sign that it has copied its options before it answers
            erase_from_command_line(server.process, key)
        yield server


def _make_ready(server: Server, models: Sequence[str], pins: Pins, timeout_s: float) -> None:
    """Wait until the `models` that it loads by itself are ready, and load pinned versions."""
    _wait_until_ready(server, models, timeout_s)
    is_erased = erase_from_command_line(server.process, server.key, has_started=True)
    _load_pins(server, pins, timeout_s)
    server.models = _ready_models(server) or ()
    server.warnings = tuple(_warnings(server, is_erased))


def _sink(log: Path | None) -> BinaryIO:
    if log is None:
        return open(sys.stderr.fileno(), "wb", buffering=0, closefd=False)
    return open(log, "wb", buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600))


def _warnings(server: Server, is_erased: bool) -> Iterator[str]:
    version = server.control(_CONTROL_TIMEOUT_S).server_version()
    if not release_of(version).is_secure:
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
    """Wait until the server answers, and these models are ready."""
    deadline = time.monotonic() + timeout_s
    oom_kills = OomKills()
    while time.monotonic() < deadline:
        if (code := server.process.poll()) is not None:
            reason = server.child.output.reason() + oom_kills.said()
            raise TritonserverFailed(f"tritonserver exited with {code} before its models were ready: {reason}")
        ready = _ready_models(server)
        if ready is not None and {model.name for model in ready} >= set(models):
            return
        time.sleep(_POLL_S)
    reason = server.child.output.reason() + oom_kills.said()
    raise TritonserverFailed(f"tritonserver: {', '.join(models)} not ready within {timeout_s:g} s: {reason}")


def _load_pins(server: Server, pins: Pins, timeout_s: float) -> None:
    """Load pinned versions. Triton can be told to only once it answers."""
    for model, versions in pins.items():
        try:
            switch(server.control(timeout_s), model, versions, private=server.private, repository=server.repository)
        except ServingError as error:
            raise TritonserverFailed(f"{model}: cannot serve {', '.join(map(str, versions))}: {error}") from error


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
