"""How to manage a server that `tbe-serve run` started: a file that its user alone can read, while it runs."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from serving.atomic import replacing
from serving.errors import ServerFailed
from serving.files import read_file
from serving.server.access import is_loopback
from serving.server.private import PrivateFolder
from serving.strict import UNREADABLE, Strict


class RunFile(Strict, frozen=True):
    """A server's HTTP address, the key to what it keeps closed, and, where keys are trusted, the folder it serves."""

    http: str
    key: str
    private: PrivateFolder | None

    def __repr__(self) -> str:
        """Without the key: errors and logs show this."""
        return f"RunFile({self.http})"

    @contextmanager
    def written(self) -> Iterator[None]:
        """There to be found inside the block.

        Raises:
            ServerFailed: it cannot be written where nobody else reads it.
        """
        try:
            path = _path(self.http)
            _own_folder(path.parent)
            with replacing(path, mode=0o600) as file:
                file.write(msgspec.json.encode(self))
        except OSError as error:
            raise ServerFailed(
                f"{error.filename}: cannot keep the server's key there: {error.strerror}: name a folder of your own "
                "in XDG_RUNTIME_DIR or TMPDIR"
            ) from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def find_run_file(http: str) -> RunFile | None:
    """What `tbe-serve run` left for the server at this address; None where it did not, or that is another machine."""
    if not is_loopback(http.rpartition(":")[0]):
        return None
    path = _path(http)
    try:
        if _is_own(path.parent):
            return msgspec.json.decode(read_file(path), type=RunFile)
    except (OSError, *UNREADABLE):
        pass
    return None


def _path(http: str) -> Path:
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(folder) / f"tbe-serve-{os.getuid()}" / f"{http.rpartition(':')[2]}.json"


def _own_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(folder):
        raise ServerFailed(
            f"{folder}: expected a folder that nobody else can open (mode 700) to keep the server's key in: remove it"
        )


def _is_own(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
