"""The run file: it tells `tbe-serve load` and `status` how to reach a server that `tbe-serve run` started.

It exists while the server runs. Only the server's user can read it, because it has the server's key.

Each server has a file of its own, and holds a lock on it. The name is the server's port and a token, because servers
may have the same port and the same folder for temporary files: in several network namespaces, or at several addresses
of this machine.
"""

import fcntl
import os
import secrets
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

from serving.errors import ConfigurationError
from serving.files import UNREADABLE, Strict, is_utf8, open_file, replacing, temporary_folder
from serving.server.access import EVERYWHERE, LOOPBACK, is_loopback
from serving.server.private_folder import PrivateFolder
from serving.triton.control import UNIX

# Maximum bytes of the path of a socket: 108 (unix(7)), minus the zero byte at its end and the suffix of a second
# process.
_LONGEST = 106
_END = ".json"


class Recovery(Strict, frozen=True):
    """A model that was loaded again, or tritonserver started again.

    Attributes:
        model: the model's name, or None for tritonserver.
        why: the reason.
        at: the time of it, in Unix time.
    """

    model: str | None
    why: str
    at: float


def _network() -> int:
    """The network namespace of this process: namespaces(7)."""
    return os.stat("/proc/self/ns/net").st_ino


class RunFile(Strict, frozen=True):
    """The content of a run file: how to reach the server, what it serves, and what happened since it was started.

    Attributes:
        grpc: the gRPC address that clients use, "host:port".
        control: the address of its control API, see `Control`.
        metrics: the address of tritonserver's metrics, "unix:/path".
        key: the key of its restricted protocols.
        repository: the folder that its models are published in.
        private: the private folder that it serves if it serves only signed bundles, or None.
        process: the process id of tritonserver.
        network: the network namespace of its addresses.
        pinned: the versions that `--serve` names, by model.
        released: the versions that release files name, by model.
        hosts: addresses of hosts, in place of the addresses in config.pbtxt, by router.
        recoveries: how often a model was loaded again or tritonserver started again.
        last_recovery: the last recovery, or None.
        drains_until: when a draining server stops at the latest, in Unix time; None if it does not drain.
    """

    grpc: str
    control: str
    metrics: str
    key: str
    repository: str
    private: PrivateFolder | None
    process: int
    network: int = msgspec.field(default_factory=_network)
    pinned: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    released: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    hosts: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)
    recoveries: int = 0
    last_recovery: Recovery | None = None
    drains_until: float | None = None

    def __repr__(self) -> str:
        """All but the key, because errors and logs show this text."""
        return f"RunFile({self.grpc})"


class RunFileWriter:
    """The run file of a running server, as the process that started the server writes it.

    Args:
        content: its first content.

    Attributes:
        content: its present content.
    """

    def __init__(self, content: RunFile) -> None:
        self.content = content
        self._path = _folder() / f"{_port_of(content.grpc)}-{secrets.token_hex(8)}{_END}"
        self._locked = ExitStack()
        self._writing = threading.Lock()
        self._has_ended = False

    def update(self, **changes: Any) -> None:
        """Change attributes of the content. If the file cannot be written, the server continues without it."""
        with self._writing, suppress(OSError, ConfigurationError):
            self.content = msgspec.structs.replace(self.content, **changes)
            if not self._has_ended:
                self._write()

    def restore(self) -> None:
        """Write the file again if it was removed."""
        if not self._path.exists():
            self.update()

    def _write(self) -> None:
        _own_folder(self._path.parent)
        with ExitStack() as stack:
            with replacing(self._path, mode=0o600) as file:
                file.write(msgspec.json.encode(self.content))
                mine = stack.enter_context(open(os.dup(file.fileno()), "rb"))
                fcntl.flock(mine, fcntl.LOCK_EX)  # before it has its name: unlocked, it would be removed
            self._locked.close()
            self._locked = stack.pop_all()

    @contextmanager
    def published(self) -> Iterator["RunFileWriter"]:
        """Write the file, and remove it when the block ends. Files of servers that were killed are removed, too.

        Raises:
            ConfigurationError: no folder was found that only this user can read.
        """
        content = self.content
        private = content.private
        for needed in (
            content.repository,
            *(() if private is None else (private.path, private.source, private.keys)),
        ):
            if not is_utf8(needed):
                raise ConfigurationError(f"{needed}: expected a path in UTF-8")
        try:
            with self._writing:
                self._write()
            for other in self._path.parent.glob(f"*{_END}"):
                with suppress(OSError), open_file(other) as file:
                    if not _is_held(file, other):
                        other.unlink()
        except OSError as error:
            raise _no_place(error) from error
        try:
            yield self
        finally:
            with self._writing:
                self._has_ended = True
                self._path.unlink(missing_ok=True)
                self._locked.close()


def find_run_file(grpc: str) -> RunFile | None:
    """The run file of the server at this gRPC address, in the network namespace of this process.

    The address must be a loopback address. It finds a server that listens on that address or on all addresses, and a
    server that listens on another address if no other server has that port.

    Returns:
        The run file, or None if no server is found or the address is not a loopback address.
    """
    host = grpc.rpartition(":")[0]
    if not is_loopback(host):
        return None
    network = _network()
    runs = {
        run.grpc.rpartition(":")[0]: run
        for run in _living()
        if (_port_of(run.grpc), run.network) == (_port_of(grpc), network)
    }
    for address in (LOOPBACK if host == "localhost" else host, EVERYWHERE):
        if address in runs:
            return runs[address]
    elsewhere = [run for host, run in runs.items() if not is_loopback(host)]
    return elsewhere[0] if len(elsewhere) == 1 else None


def _living() -> Iterator[RunFile]:
    """The run files of this user's running servers."""
    folder = _folder()
    with suppress(OSError):
        for path in folder.glob(f"*{_END}") if _is_own(folder) else ():
            with suppress(OSError, *UNREADABLE), open_file(path) as file:
                if _is_held(file, path):
                    yield msgspec.json.decode(file.read(), type=RunFile)


def _is_held(file: BufferedReader, path: Path) -> bool:
    """Whether a server holds the lock of a file. A file that its server just replaced counts as held."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return not os.path.samestat(os.fstat(file.fileno()), path.lstat())


@contextmanager
def unix_socket(name: str) -> Iterator[str]:
    """The address of a Unix socket for a server to listen on. Only the server's user can reach it.

    Raises:
        ConfigurationError: no folder was found that only this user can open, or its path is too long.
    """
    folder = _folder()
    with ExitStack() as stack:
        try:
            _own_folder(folder)
            private = stack.enter_context(temporary_folder(folder, "run-"))
        except OSError as error:
            raise _no_place(error) from error
        path = private / name
        if len(os.fsencode(path)) > _LONGEST:
            raise ConfigurationError(
                f"{path}: too long for a socket: set XDG_RUNTIME_DIR or TMPDIR to a shorter folder"
            )
        yield f"{UNIX}{path}"


def _no_place(error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"{error.filename}: cannot keep the server's key there: {error.strerror}: name a folder of your own "
        "in XDG_RUNTIME_DIR or TMPDIR"
    )


def _port_of(grpc: str) -> str:
    return grpc.rpartition(":")[2]


def _folder() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"tbe-serve-{os.getuid()}"


def _own_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(folder):
        raise ConfigurationError(
            f"{folder}: expected a folder that only its user can open (mode 700), for the server's key: remove it"
        )


def _is_own(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
