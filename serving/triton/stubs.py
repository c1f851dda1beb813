"""The processes of a server's Python models. Triton calls such a process a stub.

Run with Triton 24.10, which does not notice that a stub died. The source of 26.04 was read: its stubs have the same
name and arguments.

Busy or idle: a stub has a byte in memory that says whether it is answering requests now
(`serving.backend.process_health`). `tbe-serve run` reads it while it stops, because tritonserver may wait for
requests that it has lost. It is read through proc(5), is no file of a file system, and disappears with its process.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# The name that memfd_create(2) gives the memory of that byte.
BUSY = "tbe-busy"

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
        """Whether it is answering a request. False of a process that has ended, or that belongs to another user."""
        opened = Path("/proc") / str(self.process.pid) / "fd"
        with suppress(OSError):
            for link in opened.iterdir():
                with suppress(FileNotFoundError):  # it was closed meanwhile
                    if os.readlink(link).startswith(f"/memfd:{BUSY} "):
                        return any(link.read_bytes())
        return False

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
        return (Path("/proc") / str(process.pid) / name).read_text(errors="surrogateescape")
    except OSError:
        return ""
