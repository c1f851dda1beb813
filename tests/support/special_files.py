"""What may lie in place of a file, made at a path."""

import os
import socket
from collections.abc import Callable
from pathlib import Path


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_DIRECTORY)  # its own name may be too long for a socket
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


def link(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(b"{}")
    path.symlink_to("elsewhere")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS = (pipe, listener, link, endless, huge, Path.mkdir)


def put(path: Path, kind: Callable[[Path], None]) -> Path:
    """`kind` at `path`, whatever lay there."""
    path.unlink(missing_ok=True)
    kind(path)
    return path
