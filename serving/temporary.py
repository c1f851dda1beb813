"""Folders that are removed at the end; those that somebody killed left, by whoever makes the next."""

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
    """A new folder in `parent` that its user alone can open, gone afterwards.

    It is locked while it is in use: folders of that prefix that nobody has locked are removed first.

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
        # Another took it for abandoned before it was locked: once more.


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for root in parent.glob(glob.escape(prefix) + "*"):
        try:
            lock = _open_folder(root)
        except OSError:
            continue  # its own user just removed it, or it is another's
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
