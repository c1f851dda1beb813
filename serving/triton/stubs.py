"""The processes of a server's Python models, which Triton calls stubs.

Tested with Triton 24.10, which does not notice that a stub died. According to its source, the stubs of 26.04 have the
same name and arguments.

A stub has a byte in memory that says whether it is answering requests (`serving.backend.process_health`). A stopping
`tbe-serve run` reads it through proc(5), because tritonserver may wait for requests that it has lost. The byte is not
in a file, and disappears with its process.
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
    """The process of an instance of a model's version. `bundle` is the version's folder."""

    model: str
    version: int
    process: psutil.Process
    bundle: Path

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        with suppress(psutil.Error):
            self.process.kill()

    def is_busy(self) -> bool:
        """Whether it is answering a request; False if the process has ended or belongs to another user."""
        opened = Path("/proc") / str(self.process.pid) / "fd"
        with suppress(OSError):
            for link in opened.iterdir():
                with suppress(FileNotFoundError):  # it was closed meanwhile
                    if os.readlink(link).startswith(f"/memfd:{BUSY} "):
                        return any(link.read_bytes())
        return False

    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP stopped the process. Debuggers do not count: proc_pid_stat(5)."""
        return _stat(self.process).rpartition(")")[2].split()[:1] == ["T"]

    def page_reads(self) -> int:
        """How often the process waited for the disk: its major faults, proc_pid_stat(5)."""
        fields = _stat(self.process).rpartition(")")[2].split()
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


def _stat(process: psutil.Process) -> str:
    """The file of proc_pid_stat(5); empty when the process has ended."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text(errors="surrogateescape")
    except OSError:
        return ""
