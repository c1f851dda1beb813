"""The live copy: the rows of a version in shared memory, where deltas change them while they are looked up.

A server has one live copy of each version that it serves with `weights-memory: live`. The processes of the model map
it, and the delta writer writes to it (serving/tables/delta_writer.py). If all of these are killed, the next server
reuses the copy. The file is on a file system of huge pages if one is mounted, or else in /dev/shm. Its layout::

    [0, 2 MiB)      the state: 64-bit numbers, and texts
    [2 MiB, …)      the weights files, in the order of their names, each from a multiple of 2 MiB on

serving/tables/live_state.py says how rows are read while they are written.
"""

import errno
import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from serving.bundle.delta import find_step
from serving.bundle.formats import Bytes
from serving.bundle.lineage import lineage_of
from serving.bundle.load import digest_file
from serving.bundle.manifest import MANIFEST, Manifest
from serving.bundle.plan import Shard
from serving.bundle.signature import TrustedKeys
from serving.bundle.tables import Table
from serving.errors import ConfigurationError, ServerUnavailable, ServingError
from serving.files import UNREADABLE, open_file
from serving.tables.huge_page_copy import (
    MOUNTS,
    acquire_copy,
    copy_checked,
    huge_page_folders,
    open_locked,
    remove_unused,
)
from serving.tables.live_state import About, State
from serving.tables.pages import HUGE_PAGE, in_huge_pages

# Environment variables: the name of the server, made of its process id and a token, which is the prefix of the names
# of its live copies; and the folder of all deltas.
LIVE_SERVER, LIVE_DELTAS = "TBE_SERVING_LIVE", "TBE_SERVING_LIVE_DELTAS"
LIVE_PREFIX = "tbe-live-"
_SMALL_PAGES = Path("/dev/shm")  # noqa: S108  a copy's own name, lock and owner are checked
# Longest wait without progress, in seconds, for deltas to be applied.
_CATCH_UP_S = 60.0
# Seconds within which the model processes of a killed server end.
_ENDING_S = 10.0


class LiveCopy:
    """A live copy, mapped.

    Args:
        path: the path of the copy.
        file: a descriptor that holds the lock on the copy. It is closed with this object.
        is_written: whether this process writes to the copy.

    Attributes:
        path: the path of the copy.
        state: the state of the copy.
        pages: the mapped memory: the whole copy if this process writes to it, or only the state.
    """

    def __init__(self, path: Path, file: int, *, is_written: bool = False) -> None:
        self.path = path
        self._file = file
        protection = mmap.PROT_READ | mmap.PROT_WRITE if is_written else mmap.PROT_READ
        self.pages: Final = mmap.mmap(file, os.fstat(file).st_size if is_written else HUGE_PAGE, prot=protection)
        self.state = State(self.pages, file)
        self._release = weakref.finalize(self, _release, file)

    @classmethod
    def take(cls, directory: Path, manifest: Manifest, lacks: str) -> "LiveCopy":
        """The live copy of a version, which is made if necessary. If another process is making it, this one waits.

        Args:
            directory: the folder of the version's bundle.
            manifest: the manifest of the bundle.
            lacks: why a copy does not fit into memory; empty if it fits.

        Raises:
            BundleError: a weights file differs from its digest, or cannot be read.
            ConfigurationError: no `tbe-serve run` applies deltas here, or the copy does not fit.
        """
        server = os.environ.get(LIVE_SERVER)
        if server is None:
            raise ConfigurationError(
                "weights-memory 'live': deltas are applied by `tbe-serve run`, which is not there: serve it so, or "
                "open it with another"
            )
        digest = digest_file(directory / MANIFEST).sha256
        about = _about(directory, manifest, digest)
        end = offsets_of(manifest)[""]
        folders = [(folder.path, "" if folder.is_hugetlbfs else lacks) for folder in huge_page_folders(MOUNTS)]
        folders.append((_SMALL_PAGES, lacks))
        folders.sort(key=lambda entry: not _abandoned(entry[0], digest))
        problems = []
        for folder, lacking in folders:
            path = folder / f"{LIVE_PREFIX}{server}-{digest[:32]}"
            fill, find = partial(_fill, directory, manifest, about), partial(_adopt_abandoned, path, about, manifest)
            try:
                return cls(path, acquire_copy(path, end, fill, lacking, find))
            except OSError as error:
                problems.append(f"{path}: {error.strerror}")
        raise ConfigurationError(
            f"weights-memory 'live': {directory} cannot be copied, which takes {end >> 20} MiB: "
            f"{'; '.join(problems)}: give it more memory, or more of it to the file system (`size=`; in a container "
            "`--shm-size`, or a volume with `medium: Memory`)"
        )

    @classmethod
    def attach(cls, path: Path) -> "LiveCopy":
        """A live copy, for writing to it.

        Raises:
            OSError: the copy no longer exists, or belongs to another user.
        """
        return cls(path, open_locked(path, os.O_RDWR, fcntl.LOCK_SH), is_written=True)

    def is_used(self) -> bool:
        """Whether another process holds the copy."""
        return not self._is_alone(lambda: None)

    def remove(self) -> bool:
        """Remove the copy, unless another process holds it. Returns whether it is removed."""
        return self._is_alone(lambda: self.path.unlink(missing_ok=True))

    def _is_alone(self, then: Callable[[], None]) -> bool:
        """Whether no other process holds the copy. If so, `then` is called while no process can take it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            then()
            return True
        except BlockingIOError:
            return False
        finally:
            fcntl.flock(self._file, fcntl.LOCK_SH)  # Linux gives up a lock that it could not change

    def wait_until_caught_up(self) -> None:
        """Wait until all deltas are applied that existed when the copy was taken.

        Raises:
            ServerUnavailable: no delta was applied for a minute.
        """
        since, changed_rows = time.monotonic(), self.state.rows
        while not self.state.is_caught_up:
            if self.state.rows != changed_rows:
                since, changed_rows = time.monotonic(), self.state.rows
            if time.monotonic() > since + _CATCH_UP_S:
                raise ServerUnavailable("no deltas were applied for a minute: is `tbe-serve run` well?")
            time.sleep(0.01)

    def close(self) -> None:
        """Release the copy. The delta writer or the server removes it later, if no model uses it again."""
        self._release()


def _release(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # the mapping keeps the file open, too
    os.close(file)


def offsets_of(manifest: Manifest) -> Mapping[str, int]:
    """The offset of each weights file in a live copy, by its name; and under "" the end of the copy."""
    offsets: dict[str, int] = {}
    start = HUGE_PAGE
    for name in sorted(manifest.weights_files):
        offsets[name] = start
        start += in_huge_pages(manifest.files[name].size_bytes)
    return offsets | {"": start}


# Rows of a shard, each as one item.
_Items = npt.NDArray[np.void]


class ShardRows:
    """The rows of a shard in a live copy."""

    def __init__(self, pages: memoryview, start: int, table: Table, shard: Shard) -> None:
        width = table.dtype.row_bytes(shard.width)
        offset = start + shard.offset_bytes
        # A row is one item, so that numpy copies it at once.
        self._rows = np.frombuffer(pages, f"V{width}", shard.row_count, offset)
        self._first, self._last = shard.rows
        self._table, self._shard = table, shard

    def part(self, ids: npt.NDArray[np.int64], rows: Bytes) -> tuple[_Items, npt.NDArray[np.int64], _Items]:
        """The part of some rows in this shard: all rows of the shard, the indices to write, and the new rows."""
        low, high = np.searchsorted(ids, (self._first, self._last))
        own_columns = self._table.shard_columns(rows[low:high], self._shard)
        columns = np.ascontiguousarray(own_columns).view(self._rows.dtype).reshape(-1)
        return self._rows, np.asarray(ids[low:high] - self._first), columns


def shard_rows(copy: LiveCopy, manifest: Manifest) -> Mapping[str, Sequence[ShardRows]]:
    """The shards of each table in a copy."""
    tables = {table.name: table for table in manifest.tables}
    offsets, pages = offsets_of(manifest), memoryview(copy.pages)
    shard_rows: dict[str, list[ShardRows]] = {name: [] for name in tables}
    for table, shards in manifest.plan.shards_by_table.items():
        for shard in shards:
            file = manifest.plan.ranks[shard.rank].weights_file
            if file is not None:
                shard_rows[table].append(ShardRows(pages, offsets[file], tables[table], shard))
    return shard_rows


def _about(directory: Path, manifest: Manifest, digest: str) -> About:
    path = directory.absolute()
    deltas = Path(os.environ[LIVE_DELTAS]) / path.parent.name / lineage_of(digest, manifest.compacted)
    return About(model=path.parent.name, version=path.name, bundle=str(path), deltas=str(deltas))


def _fill(directory: Path, manifest: Manifest, about: About, pages: mmap.mmap) -> None:
    offsets = offsets_of(manifest)
    for name in sorted(manifest.weights_files):
        copy_checked(directory / name, manifest.files[name], pages, offsets[name])
    state = State(pages, -1)
    state.begin(about, manifest.sequence)
    state.close()


def _adopt_abandoned(path: Path, about: About, manifest: Manifest) -> bool:
    """Take over a copy that a killed server left, instead of making one. Remove other unused copies.

    Only processes of the same user could write to it. It is taken over if its applied deltas still exist unchanged;
    otherwise its rows have another history. With trusted keys, a copy with applied deltas is not taken over, because
    other keys may have signed these deltas.

    Returns:
        Whether a copy was taken over.
    """
    _, _, digest = path.name.rpartition("-")
    remove_unused(_folders(), LIVE_PREFIX, but=digest)
    for abandoned in _abandoned(path.parent, digest):
        with suppress(OSError):  # it is in use, belongs to another user, or was just removed
            file = _lock_abandoned(abandoned)
            try:
                if os.fstat(file).st_size == offsets_of(manifest)[""] and _can_reuse(file, about, manifest):
                    abandoned.rename(path)
                    return True
                abandoned.unlink()
            finally:
                os.close(file)
    return False


def _lock_abandoned(path: Path) -> int:
    """Lock an unused copy. If its server has ended, first wait until the model processes have ended as well."""
    server = path.name.removeprefix(LIVE_PREFIX).partition("-")[0]
    is_gone = server.isdecimal() and not Path(f"/proc/{server}").exists()
    until = time.monotonic() + (_ENDING_S if is_gone else 0.0)
    while True:
        try:
            return open_locked(path, os.O_RDWR, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _abandoned(folder: Path, digest: str) -> list[Path]:
    return [*folder.glob(f"{LIVE_PREFIX}*-{digest[:32]}")]


def _can_reuse(file: int, about: About, manifest: Manifest) -> bool:
    """Whether a copy that a killed server left can be reused. If so, its state is reset."""
    with mmap.mmap(file, HUGE_PAGE) as pages, closing(State(pages, file)) as state:
        try:
            written = state.written
            if state.about.deltas != about.deltas or (written and TrustedKeys.of_environment() is not None):
                return False
            folder = Path(about.deltas)
            for sequence, digest in written.items():
                if find_step(folder, sequence, digest, manifest, as_last=sequence == state.sequence) is None:
                    return False
        except (*UNREADABLE, ServingError, OSError):  # another version of this package wrote it
            return False
        state.begin_again(about)
        return True


@contextmanager
def state_of(path: Path) -> Iterator[State]:
    """During the block, the state of a live copy that this process does not use.

    Raises:
        OSError: the copy no longer exists, or belongs to another user.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "is another user's", str(path))
        with mmap.mmap(file.fileno(), HUGE_PAGE, prot=mmap.PROT_READ) as pages:
            state = State(pages, file.fileno())
            try:
                yield state
            finally:
                state.close()


def live_copies(server: str) -> list[Path]:
    """The live copies of a server that are complete."""
    paths = (path for folder in _folders() for path in folder.glob(f"{LIVE_PREFIX}{server}-*"))
    return sorted(path for path in paths if not path.suffix)


def remove_unused_live_copies() -> None:
    """Remove the live copies of all servers that no process holds a lock on."""
    remove_unused(_folders(), LIVE_PREFIX)


def _folders() -> list[Path]:
    return [*(folder.path for folder in huge_page_folders(MOUNTS)), _SMALL_PAGES]
