"""A tritonserver that was started: where it is, its process, and how it is replaced and ended."""

import copy
import hashlib
import logging
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from serving.server.child_process import Child, Launch
from serving.server.health_state import HealthState
from serving.server.port_handover import PortHandover
from serving.server.private_folder import PrivateFolder
from serving.server.run_file import Recovery, RunFile, RunFileWriter
from serving.server.shared_memory import remove_regions
from serving.server.tls import expect_usable
from serving.triton.command_line import http_options, metrics_options, region_options
from serving.triton.control import UNIX, UNLOADED, Control, VersionState

# The suffix of the names of a second process's sockets, and the suffixes of two processes' shared-memory regions.
_NEXT = "+"
FIRST_REGIONS, _OTHER = "-x-", str.maketrans("xy", "yx")
_UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready, and its ready versions."""

    name: str
    versions: tuple[int, ...]


@dataclass(slots=True)
class Served:
    """The models and versions that a server serves. The object outlives the server: a new process serves the same.

    Attributes:
        since: Unix time. Weights files that were not changed after it are not verified again.
        configs: the ModelConfig of each model, as JSON.
        versions: the ready versions of each model.
    """

    since: float
    configs: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def copy(self) -> "Served":
        """A copy, which does not change with this object."""
        return replace(self, configs={**self.configs}, versions={**self.versions})

    def update(self, index: tuple[VersionState, ...], control: Control) -> None:
        """Add models that became ready, and remove models that were unloaded on request."""
        for model in {entry.model for entry in index}:
            states = [entry for entry in index if entry.model == model]
            if any(state.state == "READY" for state in states):
                self.configs[model] = control.config(model)
                self.versions[model] = _serving(states, self.versions.get(model, ()))
            elif all(state.reason == UNLOADED for state in states):
                self.configs.pop(model, None)
                self.versions.pop(model, None)


@dataclass(kw_only=True, slots=True)
class Server:
    """A running tritonserver whose models are ready.

    Attributes:
        grpc: address, "host:port".
        operations: URL of the operations port, "http://host:port".
        http: address, "host:port", or None if clients may not use HTTP.
        control_address: the address of its control API, see `Control`.
        metrics_address: the Unix socket of Triton's metrics.
        port_handover: directs connections of its gRPC port, or None if no second process can share the port.
        health: its health, as the operations port reports it.
        key: the key of its restricted protocols. Each server has a new one.
        launch: how its process is started.
        certificates: the files of certificates, authorities and keys that its process and its models read only when
            they start. Empty if a second process with renewed certificates could not take over.
        regions: prefix of the names of its processes' shared-memory regions.
        exit_timeout_s: the time after which a stopping server is killed, in seconds.
        connection_age_s: the longest time that it keeps a connection open, in seconds.
        drain_s: how long it drains before it stops, in seconds; 0 for not at all.
        repository: the model repository that its process serves.
        private: the private folder with that repository if it serves only signed bundles, or None.
        child: its current process.
        loaded_digest: the digest of `certificates` just before the process started.
        started: when its first process was started, in Unix time.
        run_file_writer: writes its run file, which other commands read.
        loading: a lock for each model. It is held while the model is loaded.
        models: its models when it became ready.
        warnings: lines to show to the operator.
    """

    grpc: str
    http: str | None
    operations: str
    control_address: str
    metrics_address: str
    port_handover: PortHandover | None = field(repr=False)
    health: HealthState = field(repr=False)
    key: str = field(repr=False)
    launch: Launch = field(repr=False)
    certificates: tuple[Path, ...]
    regions: str
    exit_timeout_s: float
    connection_age_s: float
    drain_s: float
    repository: Path
    private: PrivateFolder | None
    child: Child = field(init=False)
    loaded_digest: bytes = field(init=False, repr=False)
    started: float = field(default_factory=time.time)
    run_file_writer: RunFileWriter = field(init=False, repr=False)
    loading: Mapping[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock), repr=False)
    models: tuple[ServedModel, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def log(self) -> logging.Logger:
        """Its log."""
        return self.launch.log

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """Its current process, which `restart` replaces."""
        return self.child.process

    def control(self, timeout_s: float) -> Control:
        """The control API of this server, which loads and unloads its models."""
        return Control(address=self.control_address, key=self.key, timeout_s=timeout_s)

    def start(self, options: Sequence[str] = ()) -> None:
        """Start its process.

        Args:
            options: further options of tritonserver. Without any, it loads no model.

        Call this from a thread that outlives the process: the kernel ends it when the thread that started it ends.
        """
        at_unix = [address for address in (self.control_address, self.metrics_address) if address.startswith(UNIX)]
        for address in at_unix:
            Path(address.removeprefix(UNIX)).unlink(missing_ok=True)
        own_options = [*metrics_options(self.metrics_address), *region_options(self.regions)]
        if self.control_address in at_unix:
            own_options += http_options(self.control_address)
        if self.port_handover is not None:
            self.port_handover.hold_ipv6()
        self.loaded_digest = self.digest()
        self.child = self.launch.start([*own_options, *options])

    def digest(self) -> bytes:
        """The SHA-256 of `certificates` as they are now; empty if one of them cannot be read."""
        try:
            digests = [hashlib.sha256(certificate.read_bytes()).digest() for certificate in self.certificates]
        except OSError:
            return b""
        return hashlib.sha256(b"".join(digests)).digest()

    def expect_usable(self) -> None:
        """Read `certificates` again.

        Raises:
            ConfigurationError: they do not fit, cannot be read, or are not valid now.
        """
        if self.health.tls is not None:
            replace(self.health.tls)  # a pair that fits
        for certificate in self.certificates:
            expect_usable(certificate)

    def restart(self, options: Sequence[str] = ()) -> None:
        """Replace a process that has ended, with the same addresses and key. Arguments as for `start`."""
        self.end()
        self.health.restarts += 1
        self.health.reload_certificate()
        if self.port_handover is not None:
            self.port_handover.direct_to_next()
        self.start(options)
        self.run_file_writer.update(process=self.process.pid)

    def replacement(self) -> "Server":
        """Start a second process of this server, without models. It shares the gRPC port by the `port_handover`.

        Call this from a thread that outlives the process, as for `start`.
        """
        second = replace(
            self,
            control_address=f"{self.control_address}{_NEXT}",
            metrics_address=f"{self.metrics_address}{_NEXT}",
            regions=self.regions.translate(_OTHER),
        )
        second.run_file_writer = self.run_file_writer
        second.start()
        return second

    def adopt(self, second: "Server") -> "Server":
        """Take over the process of `second`, a `replacement` of this server. New connections go to that process.

        Returns:
            A server with the previous process, which still answers on its connections. `end` it.

        Raises:
            OSError: one of the two processes has just ended. Nothing has changed.
        """
        assert self.port_handover is not None  # noqa: S101  as for `replacement`
        before = copy.copy(self)
        self.port_handover.hand_over(self.process.pid)
        for following, present in (
            (second.control_address, self.control_address),
            (second.metrics_address, self.metrics_address),
        ):
            Path(following.removeprefix(UNIX)).rename(present.removeprefix(UNIX))
        second.control_address, second.metrics_address = self.control_address, self.metrics_address
        self.child, self.regions, self.loaded_digest = second.child, second.regions, second.loaded_digest
        self.health.reload_certificate()
        self.run_file_writer.update(process=self.process.pid)
        return before

    @property
    def run_file(self) -> RunFile:
        """The content of its run file."""
        return self.run_file_writer.content

    def note_recovery(self, model: str | None, why: str) -> None:
        """Record in the run file that a model is loaded again. `model` is None if tritonserver is started again."""
        self.run_file_writer.update(
            recoveries=self.run_file.recoveries + 1, last_recovery=Recovery(model=model, why=why, at=time.time())
        )

    def end(self) -> None:
        """Let the server answer accepted requests, and end it. Returns when it has ended."""
        self.child.end(self.exit_timeout_s)
        remove_regions(self.regions)

    def wait(self) -> int:
        """Wait until the server ends. Returns its exit code."""
        return self.process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to its process, if it still runs."""
        self.process.send_signal(number)


def _serving(states: Sequence[VersionState], before: Collection[int]) -> tuple[int, ...]:
    """The versions that serve, and those of `before` whose process died, which newer Triton releases report."""
    return tuple(
        state.version
        for state in states
        if state.state == "READY"
        or (state.version in before and state.state == _UNAVAILABLE and state.reason != UNLOADED)
    )
