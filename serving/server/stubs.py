"""The processes of a server's Python models. Triton 2.51 does not notice when one dies."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_STUB = "triton_python_backend_stub"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where shm_open(3) puts it


@dataclass(frozen=True, slots=True)
class Stub:
    """A process that answers for one instance of a version; `region` is the shared memory it has with the server."""

    model: str
    version: int
    region: Path


def living_stubs(server: psutil.Process) -> Iterator[Stub]:
    """The processes that answer."""
    for child in server.children():
        try:
            command = child.cmdline()  # nothing, for one that died and was not waited for
        except psutil.Error:
            continue
        if command and Path(command[0]).name == _STUB:
            version = Path(command[1]).parent  # …/<model>/<version>/model.py
            yield Stub(version.parent.name, int(version.name), _SHARED_MEMORY / command[2])
