"""The processes of a server's Python models. Triton 2.51 does not notice when one dies."""

from collections.abc import Iterator
from pathlib import Path

import psutil

_STUB = "triton_python_backend_stub"


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
