"""The process of a tritonserver: how it is started, as often as need be, and how it ends."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from serving.server.output import Output

# mallopt(3): what requests took is kept for the next ones, up to so much. Given back each time, it is asked for anew
# page by page, which large requests feel; Triton's own pool would keep any size for ever.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}


@dataclass(frozen=True, slots=True)
class Child:
    """A tritonserver that was started."""

    process: subprocess.Popen[bytes]
    output: Output

    def end(self, timeout_s: float) -> None:
        """Ask it to finish what it has accepted and end; wait until it has, and leave nothing of it behind."""
        if self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        # A server that was killed leaves its models' processes, which notice, but may hang and hold their memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.output.drain()


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a tritonserver is started.

    Attributes:
        command, environment: its own; the environment beside ours.
        folder: where it runs, and a model's Python looks for modules first; here where None.
        shm_bytes: most shared memory of an instance.
        sink: takes what it says.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    shm_bytes: int
    sink: BinaryIO
    folder: Path | None = None

    def start(self, options: Sequence[str] = ()) -> Child:
        """One more process, with further options."""
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
    """Ask the kernel for SIGTERM when the parent ends (prctl(2), PR_SET_PDEATHSIG), and set what outlives execve(2).

    Triton's Python backend makes a file in /dev/shm as large as it takes, and never smaller: without a limit on the
    size of files a few hostile requests fill it. A file that may not grow is an error to it, as long as the signal
    for that is ignored. It waits for no model's process that died by itself: where SIGCHLD is ignored, the kernel
    forgets those. And when we are gone, nobody reads what it says: it has to answer what it accepted all the same.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    for number in (signal.SIGXFSZ, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (shm_bytes if most < 0 else min(shm_bytes, most), most))
