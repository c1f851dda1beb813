"""The processes of a server's Python models. Triton calls such a process a stub.

Run with Triton 24.10, which does not notice that a stub died. The source of 26.04 was read: its stubs have the same
name and arguments.

Busy or idle: the name of a stub's main thread (`ps -o comm`) says whether it is answering requests now.
`tbe-serve run` reads it while it stops, because tritonserver may wait for requests that it has lost. A name needs no
file, and disappears with its process.

End: a stub of Triton 2.51 goes on when its tritonserver is killed. `tbe-serve run` ends the stubs that a server left.
But it may be killed too. So a stub also ends itself when its parent ends.
"""

import ctypes
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

IDLE, BUSY = "tbe-idle", "tbe-busy"

_PR_SET_NAME = 15  # prctl(2)
_LIBC = ctypes.CDLL(None)


def show(name: str) -> None:
    """Name the calling thread IDLE or BUSY. It must be the main thread."""
    _LIBC.prctl(_PR_SET_NAME, name.encode())


@cache
def end_with_parent() -> None:
    """From now on, kill this process when its parent ends. A thread sleeps until then.

    Nothing is done if Linux is older than 5.3, which has pidfd_open(2), or if a sandbox forbids that call.
    """
    try:
        parent = os.pidfd_open(os.getppid())
    except OSError:
        return
    threading.Thread(target=_wait, args=(parent,), name="parent", daemon=True).start()


def _wait(parent: int) -> None:
    ended = select.poll()
    ended.register(parent, select.POLLIN)
    ended.poll()
    os.kill(os.getpid(), signal.SIGKILL)


_STUB = "triton_python_backend_stub"


@dataclass(frozen=True, slots=True)
class Stub:
    """The process of one instance of a model's version. `bundle` is the version's folder."""

    model: str
    version: int
    process: psutil.Process
    bundle: Path

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        with suppress(psutil.Error):
            self.process.kill()

    def is_busy(self) -> bool:
        """Whether it is answering a request, by the name of its main thread."""
        return _proc(self.process, "comm").strip() == BUSY

    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP stopped it. A stop by a debugger does not count: proc_pid_stat(5)."""
        return _proc(self.process, "stat").rpartition(")")[2].split()[:1] == ["T"]

    def page_reads(self) -> int:
        """How often it waited for the disk: its major faults, the tenth field after the name in proc_pid_stat(5)."""
        fields = _proc(self.process, "stat").rpartition(")")[2].split()
        return int(fields[9]) if fields else 0


def living_stubs(server: int) -> Iterator[Stub]:
    """The running stubs of the tritonserver with process id `server`."""
    try:
        children = psutil.Process(server).children()
    except psutil.Error:
        return  # it has ended itself
    for child in children:
        try:
            command = child.cmdline()
        except psutil.Error:
            continue  # it died
        if command and Path(command[0]).name == _STUB:
            bundle = Path(command[1]).parent  # …/<model>/<version>/model.py
            yield Stub(bundle.parent.name, int(bundle.name), child, bundle)


def _proc(process: psutil.Process, name: str) -> str:
    """A file of proc(5); empty when the process has ended."""
    try:
        return (Path("/proc") / str(process.pid) / name).read_text()
    except OSError:
        return ""
