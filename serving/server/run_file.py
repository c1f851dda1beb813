"""The file that tells `tbe-serve load` and `status` how to reach a server that `tbe-serve run` started.

It exists while the server runs, and its user alone can read it, since it holds the server's key.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from serving.errors import ConfigurationError
from serving.files.reading import read_file
from serving.files.replacing import replacing
from serving.files.strict import UNREADABLE, Strict, is_utf8
from serving.server.access import is_loopback
from serving.server.private import PrivateFolder
from serving.triton.control import UNIX

# The longest path of a socket in bytes, without the zero byte at its end: unix(7).
_LONGEST = 107


class Recovery(Strict, frozen=True):
    """A model, or tritonserver, that was started anew.

    Attributes:
        model: its name; None where tritonserver was.
        why: what had happened.
        at: when, in Unix time.
    """

    model: str | None
    why: str
    at: float


class RunFile(Strict, frozen=True):
    """What is needed to switch the versions of a server, and what happened to it since it was started.

    Attributes:
        grpc: the gRPC address that clients use, "host:port".
        control: the address of its control API; see `Control`.
        key: the key of its restricted protocols.
        repository: the folder that its models are published in.
        private: the folder that it serves, if it serves signed bundles alone; otherwise None.
        process: the process id of tritonserver.
        pinned: the versions that `--serve` says, by model.
        released: the versions that releases say, by model.
        recoveries: how often a model or tritonserver was started anew.
        last_recovery: the last of them; None while there was none.
    """

    grpc: str
    control: str
    key: str
    repository: str
    private: PrivateFolder | None
    process: int
    pinned: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    released: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    recoveries: int = 0
    last_recovery: Recovery | None = None

    def __repr__(self) -> str:
        """Leaves the key out: errors and logs show this."""
        return f"RunFile({self.grpc})"

    @contextmanager
    def written(self) -> Iterator[None]:
        """Write the file; remove it when the block ends.

        Raises:
            ConfigurationError: there is no place where its user alone can read it.
        """
        private = self.private
        for needed in (self.repository, *(() if private is None else (private.path, private.source, private.keys))):
            if not is_utf8(needed):
                raise ConfigurationError(f"{needed}: expected a path in UTF-8")
        try:
            path = _path(self.grpc)
            _own_folder(path.parent)
            self._write(path)
        except OSError as error:
            raise _no_place(error) from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def rewrite(self) -> None:
        """Write it again, unless it was removed. What cannot be written is lost: the server matters more."""
        path = _path(self.grpc)
        with suppress(OSError):
            if path.exists():
                self._write(path)

    def _write(self, path: Path) -> None:
        with replacing(path, mode=0o600) as file:
            file.write(msgspec.json.encode(self))


def find_run_file(grpc: str) -> RunFile | None:
    """The file of the server at this gRPC address. None if there is none, or the address is another machine's."""
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
    """The address of a Unix socket for a server's control API, which its user alone can reach.

    Raises:
        ConfigurationError: there is no place for it that its user alone can reach.
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
            raise ConfigurationError(
                f"{path}: too long for a socket: set XDG_RUNTIME_DIR or TMPDIR to a shorter folder"
            )
        yield f"{UNIX}{path}"
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _no_place(error: OSError) -> ConfigurationError:
    return ConfigurationError(
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
        raise ConfigurationError(
            f"{folder}: expected a folder that nobody else can open (mode 700) to keep the server's key in: remove it"
        )


def _is_own(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
