"""Temporary folders. Those that a killed process left are removed when the next one is made."""

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent` that only its user can open. It is removed when the block ends.

    It is locked while it is in use. Folders of that prefix that nobody has locked are removed first.

    Raises:
        OSError: nothing can be written in `parent`.
    """
    _remove_abandoned(parent, prefix)
    root, lock = _locked_folder(parent, prefix)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
        os.close(lock)


def _locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        root = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        with suppress(FileNotFoundError):
            lock = _open_folder(root)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if root.exists():
                return root, lock
            os.close(lock)
        # Another process removed it as abandoned before it was locked: make another.


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for root in parent.glob(glob.escape(prefix) + "*"):
        try:
            lock = _open_folder(root)
        except OSError:
            continue  # it was just removed, or belongs to another user
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # it is in use
        else:
            shutil.rmtree(root, ignore_errors=True)
        finally:
            os.close(lock)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
