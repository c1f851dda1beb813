"""The processes of a server's Python models. Triton 2.51 does not notice when one dies."""

from collections.abc import Iterator
from pathlib import Path

import psutil

_STUB = "triton_python_backend_stub"
_REGION = "triton_python_backend_shm_region_"


def living_stubs(server: psutil.Process) -> Iterator[tuple[str, int]]:
    """The model and version of each process that answers."""
    for child in server.children():
        try:
            command = child.cmdline()
        except psutil.Error:
            continue  # it died, and was not waited for
        if command and Path(command[0]).name == _STUB:
            version = Path(command[1]).parent  # …/<model>/<version>/model.py
            yield version.parent.name, int(version.name)


def shared_regions(server: psutil.Process) -> list[Path]:
    """The files in /dev/shm that a server shares with its Python models."""
    paths = [Path(each.path) for each in server.memory_maps()]
    return [path for path in paths if path.name.startswith(_REGION)]
