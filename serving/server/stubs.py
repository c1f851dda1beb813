"""The processes of a server's Python models. Triton 2.51 does not notice when one dies."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from serving.presence import BUSY

_STUB = "triton_python_backend_stub"


@dataclass(frozen=True, slots=True)
class Stub:
    """A process that answers for a version of a model."""

    model: str
    version: int
    process: psutil.Process

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        with suppress(psutil.Error):
            self.process.kill()

    def is_busy(self) -> bool:
        """Whether it says that it answers somebody now."""
        return _proc(self.process, "comm").strip() == BUSY

    def page_reads(self) -> int:
        """How often it waited for the disk: major faults, the tenth field after the name in proc_pid_stat(5)."""
        fields = _proc(self.process, "stat").rpartition(")")[2].split()
        return int(fields[9]) if fields else 0


def living_stubs(server: int) -> Iterator[Stub]:
    """Those of the tritonserver with this process id that have not ended."""
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
            version = Path(command[1]).parent  # …/<model>/<version>/model.py
            yield Stub(version.parent.name, int(version.name), child)


def _proc(process: psutil.Process, name: str) -> str:
    """A file of proc(5); empty when the process has ended."""
    try:
        return (Path("/proc") / str(process.pid) / name).read_text()
    except OSError:
        return ""
