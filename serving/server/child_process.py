"""The process of a tritonserver: how it is started and ended."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from serving.log import Output

# Sets the properties of a process, and executes a program in it. `preexec_fn` would run Python between fork(2) and
# execve(2), beside what gRPC and other threads left there. A child died of it by SIGSEGV.
SETUP_COMMAND = (sys.executable, "-I", "-S", str(Path(__file__).with_name("process_setup.py")))

# Freed memory is kept for later requests. Memory that is returned to Linux must be mapped again page by page, which
# slows large requests. Triton's own pool would keep any size for ever. glibc keeps this much, mallopt(3):
GLIBC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
# tcmalloc, which gives back ten times as fast as by default, keeps about as much after a burst.
# https://gperftools.github.io/gperftools/tcmalloc.html
_TCMALLOC = {"TCMALLOC_RELEASE_RATE": "10", "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": "0"}
_TCMALLOC_NAMES = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
# The library folders of Debian, of Triton's images and of other distributions.
_LIBRARIES = (f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/lib64", "/usr/lib")

# Longest wait for killed processes to end, and the pause between checks, in seconds.
_KILLED_S, _CHECK_PERIOD_S = 2.0, 0.01


@dataclass(frozen=True, slots=True)
class Child:
    """A tritonserver that was started: its process, and its log."""

    process: subprocess.Popen[bytes]
    output: Output

    def why(self, code: int) -> str:
        """Why it ended with a code: the signal, or the code and what it said."""
        return signal.Signals(-code).name if code < 0 else f"{code}: {self.output.reason()}"

    def end(self, timeout_s: float) -> None:
        """Let it answer the requests that it accepted, and end. After `timeout_s`, kill it.

        The processes of its models are killed, too. All processes are gone when this returns, except one that the
        kernel cannot end yet.
        """
        if self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        # The processes of its models outlive a server that was killed, and keep their memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _await_group(self.process.pid)
        self.output.drain()


def malloc_environment(libraries: Sequence[str] = _LIBRARIES) -> dict[str, str]:
    """Environment variables for the memory of a server and its models: tcmalloc if it is there, or else glibc's.

    Args:
        libraries: the folders in which to look for tcmalloc.
    """
    every = (Path(folder, name) for folder in libraries for name in _TCMALLOC_NAMES)
    library = next((path for path in every if path.exists()), None)
    return GLIBC if library is None else _TCMALLOC | {"LD_PRELOAD": str(library)}


def _await_group(group: int) -> None:
    """Wait until all processes of a killed group have ended. Zombies have: their parent has not read their status."""
    end = time.monotonic() + _KILLED_S
    while time.monotonic() < end and any(map(partial(_is_in, group), Path("/proc").glob("[0-9]*/stat"))):
        time.sleep(_CHECK_PERIOD_S)


def _is_in(group: int, stat: Path) -> bool:
    """Whether a process is in a group and has not ended, by its file /proc/PID/stat, see proc(5)."""
    try:
        state, _, of_group, *_ = stat.read_text(errors="surrogateescape").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False
    return int(of_group) == group and state not in "ZX"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a tritonserver is started.

    Attributes:
        command: the program and its options.
        environment: environment variables that it gets in addition to ours.
        shm_bytes: maximum bytes of shared memory of an instance.
        log: gets the output of the process.
        folder: its working directory, where a model's Python looks for modules first. None stands for our own.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    shm_bytes: int
    log: logging.Logger
    folder: Path | None = None

    def start(self, options: Sequence[str] = ()) -> Child:
        """Start a process, with further options."""
        process = subprocess.Popen(
            [*SETUP_COMMAND, str(os.getpid()), str(self.shm_bytes), *self.command, *options],
            env={**malloc_environment(), **os.environ, **self.environment},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # or it would get a Ctrl-C twice: from the terminal and from us
        )
        return Child(process, Output(cast(BinaryIO, process.stdout), self.log))


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Handle SIGINT and SIGTERM when the block ends. Earlier, a handler that raises could lose a new process."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for signal_number, handler in handlers.items():
            signal.signal(signal_number, handler)
    for number in received:
        signal.raise_signal(number)
