"""The memory that a server shares with its Python models: files in /dev/shm, removed when the server has ended.

A killed server leaves its files there, up to a gigabyte for each instance, and /dev/shm may outlive a container. So
the files of each server have their own prefix, and the next server removes the files that earlier ones left.
"""

import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from serving.errors import TritonserverFailed

_FOLDER = Path("/dev/shm")  # noqa: S108  # where shm_open(3) puts them
_NAME, _LOCK = "tbe-serving-", ".lock"


@contextmanager
def region_prefix() -> Iterator[str]:
    """A new prefix for the names of a server's regions.

    Regions with that prefix are removed when the block ends. Regions of servers that have ended are removed when it
    begins. A running server holds a lock on a file beside its regions, because servers that share /dev/shm, such as
    the containers of a pod, may not see each other's processes.

    Raises:
        TritonserverFailed: /dev/shm cannot be written to.
    """
    for path in _FOLDER.glob(f"{_NAME}*{_LOCK}"):
        with suppress(OSError):  # its server runs, or another one is removing it
            if path.lstat().st_uid == os.getuid():  # all users may write to /dev/shm
                with _locked(path):
                    _remove(path)
    path = _FOLDER / f"{_NAME}{secrets.token_hex(8)}{_LOCK}"
    with ExitStack() as stack:
        try:
            draft = path.with_suffix(".draft")
            stack.enter_context(_locked(draft, os.O_CREAT | os.O_EXCL))
            draft.rename(path)  # only now, locked: another server would remove an unlocked one
        except OSError as error:
            raise TritonserverFailed(f"{path}: cannot be made: {error.strerror}: tritonserver needs it") from error
        stack.callback(_remove, path)
        yield path.name.removesuffix(_LOCK)


@contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[None]:
    """Hold the lock of a file during the block. Raises OSError if another process holds it."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def remove_regions(prefix: str) -> None:
    """Remove the regions of a server that has ended, but not the lock file: the next process has the same prefix."""
    for region in set(_FOLDER.glob(f"{glob.escape(prefix)}*")) - {_FOLDER / f"{prefix}{_LOCK}"}:
        region.unlink(missing_ok=True)


def is_open(prefix: str) -> bool:
    """Whether users other than the server's own can open one of its regions."""
    return any(region.stat().st_mode & 0o077 for region in _FOLDER.glob(f"{glob.escape(prefix)}*"))


def _remove(lock: Path) -> None:
    """Remove a server's regions, and then its lock file."""
    remove_regions(lock.name.removesuffix(_LOCK))
    lock.unlink(missing_ok=True)
