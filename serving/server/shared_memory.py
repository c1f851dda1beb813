"""What a server shares with its Python models: files in /dev/shm, named so that none outlives the server.

A server that is killed leaves its own there, up to a gigabyte for each instance; a /dev/shm may outlive a container.
"""

import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from serving.errors import ServerFailed

_FOLDER = Path("/dev/shm")  # noqa: S108  # where shm_open(3) puts them
_NAME, _LOCK = "tbe-serving-", ".lock"


@contextmanager
def region_prefix() -> Iterator[str]:
    """How the names of a server's regions begin. They are removed at the end, and those of servers that are no more.

    Whether a server lives is told by a lock on a file beside them: servers that share a /dev/shm need not see each
    other's processes, such as in containers of one pod.

    Raises:
        ServerFailed: nothing can be written there.
    """
    for path in _FOLDER.glob(f"{_NAME}*{_LOCK}"):
        with suppress(OSError):  # another has it, or was quicker to remove it
            if path.lstat().st_uid == os.getuid():  # everybody may write there
                with _locked(path):
                    _remove(path)
    path = _FOLDER / f"{_NAME}{secrets.token_hex(8)}{_LOCK}"
    with ExitStack() as stack:
        try:
            draft = path.with_suffix(".draft")
            stack.enter_context(_locked(draft, os.O_CREAT | os.O_EXCL))
            draft.rename(path)  # which nobody sees unlocked, and takes for one of a server that has ended
        except OSError as error:
            raise ServerFailed(f"{path}: cannot be made: {error.strerror}: tritonserver needs it") from error
        stack.callback(_remove, path)
        yield path.name.removesuffix(_LOCK)


@contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[None]:
    """Hold the lock of a file, which stays with this process. OSError where another holds it."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def remove_regions(prefix: str) -> None:
    """Remove the regions of a server that has ended, whose prefix another goes on with."""
    for region in set(_FOLDER.glob(f"{glob.escape(prefix)}*")) - {_FOLDER / f"{prefix}{_LOCK}"}:
        region.unlink(missing_ok=True)


def _remove(lock: Path) -> None:
    """A server's regions, and last the file that tells of them."""
    remove_regions(lock.name.removesuffix(_LOCK))
    lock.unlink(missing_ok=True)
