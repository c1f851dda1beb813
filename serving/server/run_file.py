"""How to manage a server that `tbe-serve run` started: a file that its user alone can read, while it runs."""

import os
import shutil
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
from serving.server.control import UNIX
from serving.server.private import PrivateFolder
from serving.strict import UNREADABLE, Strict, is_utf8

# unix(7): of the path of a socket, with a zero byte at its end.
_LONGEST = 107


class RunFile(Strict, frozen=True):
    """A server's gRPC address, and what manages it.

    Attributes:
        control: where it takes commands; see `Control`.
        key: opens what it keeps closed.
        private: where keys are trusted, the folder that it serves.
    """

    grpc: str
    control: str
    key: str
    private: PrivateFolder | None

    def __repr__(self) -> str:
        """Without the key: errors and logs show this."""
        return f"RunFile({self.grpc})"

    @contextmanager
    def written(self) -> Iterator[None]:
        """There to be found inside the block.

        Raises:
            ServerFailed: it cannot be written where nobody else reads it.
        """
        private = self.private
        for needed in () if private is None else (private.path, private.source, private.keys):
            if not is_utf8(needed):
                raise ServerFailed(f"{needed}: expected a path in UTF-8")
        try:
            path = _path(self.grpc)
            _own_folder(path.parent)
            with replacing(path, mode=0o600) as file:
                file.write(msgspec.json.encode(self))
        except OSError as error:
            raise _no_place(error) from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def find_run_file(grpc: str) -> RunFile | None:
    """What `tbe-serve run` left for the server at this gRPC address; None where it did not, or that is elsewhere."""
    if not is_loopback(grpc.rpartition(":")[0]):
        return None
    path = _path(grpc)
    try:
        if _is_own(path.parent):
            return msgspec.json.decode(read_file(path), type=RunFile)
    except (OSError, *UNREADABLE):
        pass
    return None


@contextmanager
def control_socket() -> Iterator[str]:
    """The address of a Unix socket that its user alone can reach, for a server to take commands at.

    Raises:
        ServerFailed: there is no place for it that is its user's alone.
    """
    folder = _folder()
    try:
        _own_folder(folder)
        private = tempfile.mkdtemp(dir=folder)
    except OSError as error:
        raise _no_place(error) from error
    try:
        path = Path(private) / "control"
        if len(os.fsencode(path)) > _LONGEST:
            raise ServerFailed(f"{path}: too long for a socket: name a shorter folder in XDG_RUNTIME_DIR or TMPDIR")
        yield f"{UNIX}{path}"
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _no_place(error: OSError) -> ServerFailed:
    return ServerFailed(
        f"{error.filename}: cannot keep the server's key there: {error.strerror}: name a folder of your own "
        "in XDG_RUNTIME_DIR or TMPDIR"
    )


def _path(grpc: str) -> Path:
    return _folder() / f"{grpc.rpartition(':')[2]}.json"


def _folder() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"tbe-serve-{os.getuid()}"


def _own_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(folder):
        raise ServerFailed(
            f"{folder}: expected a folder that nobody else can open (mode 700) to keep the server's key in: remove it"
        )


def _is_own(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
