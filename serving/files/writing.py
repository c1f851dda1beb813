"""Write files and folders that exist as a whole, or not at all."""

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent` that only its user can open. It is removed when the block ends.

    It is locked while it is in use. Folders with that prefix that no process has locked are removed first.

    Raises:
        OSError: `parent` cannot be written to.
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
        # Another process took it for abandoned, and removed it before it was locked. Make another.


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


@contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A new file that replaces `path` when the block ends. If the block fails, the new file is removed.

    Raises:
        OSError: it cannot be written.
    """
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(draft, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        raise
