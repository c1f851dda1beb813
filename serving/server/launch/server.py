"""A tritonserver that was started: where it is, its process, and how it is replaced and ended."""

import logging
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serving.server.launch.child import Child, Launch
from serving.server.launch.operations import Condition
from serving.server.launch.private import PrivateFolder
from serving.server.launch.run_file import KeptRunFile, Recovery, RunFile
from serving.server.launch.shared_memory import remove_regions
from serving.triton.control import UNIX, Control


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready, and its ready versions."""

    name: str
    versions: tuple[int, ...]


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
    def log(self) -> logging.Logger:
        """Its log."""
        return self.launch.log

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """Its present process. `start_anew` replaces it."""
        return self.child.process

    def control(self, timeout_s: float) -> Control:
        """The control API of this server, which loads and unloads its models."""
        return Control(address=self.control_address, key=self.key, timeout_s=timeout_s)

    def start_anew(self, options: Sequence[str] = ()) -> None:
        """Replace a process that has ended. The new one has the same addresses and key.

        Args:
            options: further options of tritonserver. Without any, it loads no model.

        Call this from a thread that outlives the process: the kernel ends it when the thread that started it ends.
        """
        self.end()
        remove_regions(self.regions)
        for address in (self.control_address, self.metrics_address):
            if address.startswith(UNIX):
                Path(address.removeprefix(UNIX)).unlink(missing_ok=True)
        self.condition.restarts += 1
        self.condition.note_start()
        self.child = self.launch.start(options)
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
