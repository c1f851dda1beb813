"""The process of a tritonserver: how it is started and ended."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from serving.server.file_modes import make_private_files
from serving.triton.output import Output

# mallopt(3): the server keeps so much memory of past requests for the next ones. Memory that it gives back has to be
# mapped again page by page, which slows large requests. Triton's own pool would keep any size for ever.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}

# How long processes that were killed are waited for, and how often it is looked for them, in seconds.
_KILLED_S, _LOOKS_S = 2.0, 0.01


@dataclass(frozen=True, slots=True)
class Child:
    """A tritonserver that was started: its process, and what it says."""

    process: subprocess.Popen[bytes]
    output: Output

    def end(self, timeout_s: float) -> None:
        """Have it answer what it accepted, and end. After `timeout_s` kill it and the processes of its models.

        All are gone then, and what they held, but for one that the kernel cannot end yet.
        """
        if self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        # Processes of models outlive a server that was killed, and keep their memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _await_group(self.process.pid)
        self.output.drain()


def _await_group(group: int) -> None:
    """Wait until no process of a group that was killed is left. Nobody may ask how one ended: it is a zombie then."""
    end = time.monotonic() + _KILLED_S
    while time.monotonic() < end and any(map(partial(_is_in, group), Path("/proc").glob("[0-9]*/stat"))):
        time.sleep(_LOOKS_S)


def _is_in(group: int, stat: Path) -> bool:
    """Whether a process that has not ended is of a group, by its file /proc/PID/stat of proc(5)."""
    try:
        state, _, of_group, *_ = stat.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False
    return int(of_group) == group and state not in "ZX"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a tritonserver is started.

    Attributes:
        command: the program and its options.
        environment: variables that it gets beside ours.
        shm_bytes: most shared memory of an instance.
        sink: takes its log.
        folder: its working directory, where a model's Python looks for modules first. None: ours.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    shm_bytes: int
    sink: BinaryIO
    folder: Path | None = None

    def start(self, options: Sequence[str] = ()) -> Child:
        """Start a process, with further options."""
        process = subprocess.Popen(
            [*self.command, *options],
            env={**_MALLOC, **os.environ, **self.environment},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C in the terminal is ours to pass on, once
            preexec_fn=partial(_in_child, self.shm_bytes),
        )
        return Child(process, Output(cast(BinaryIO, process.stdout), self.sink))


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Handle SIGINT and SIGTERM when the block ends. A handler that raises would lose a new process."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
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
    """Set what a tritonserver keeps across execve(2), in the child process before that.

    * SIGTERM when its parent ends: prctl(2), PR_SET_PDEATHSIG.
    * A limit on the size of files. The Python backend's file in /dev/shm grows and never shrinks, so without a limit
      a few hostile requests fill /dev/shm. With SIGXFSZ ignored, a file that may not grow is an error to it.
    * SIGCHLD ignored. The server does not wait for models' processes that die; so the kernel removes them.
    * SIGPIPE ignored. When we have ended, nobody reads its log, and it still has to answer what it accepted.
    * What it and its models make is their user's alone. Requests and rows are in the memory that they share.
    """
    make_private_files()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    for number in (signal.SIGXFSZ, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (shm_bytes if most < 0 else min(shm_bytes, most), most))
