"""The processes of a server's Python models. Triton calls such a process a stub.

Run with Triton 24.10, which does not notice that a stub died. The source of 26.04 was read: its stubs have the same
name and arguments.

Busy or idle: the name of a stub's main thread (`ps -o comm`) says whether it is answering requests now
(`serving.backend.own_process`). `tbe-serve run` reads it while it stops, because tritonserver may wait for requests
that it has lost. A name needs no file, and disappears with its process.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

IDLE, BUSY = "tbe-idle", "tbe-busy"

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
