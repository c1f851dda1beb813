"""One copy of a weights file for all processes of a machine, on a file system of huge pages.

It serves machines whose other file systems have no huge pages. The name of a copy is the digest of its file. Every
process that uses a copy holds a lock on it. The last process to release the copy removes it.

If all users of a copy were killed, the copy stays. It is removed when the next copy is taken, or when `tbe-serve run`
ends. It is not used again, because it may have changed since it was compared with its digest.
"""

import errno
import fcntl
import hashlib
import mmap
import os
import re
import resource
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from serving.bundle.load import check_sha256
from serving.bundle.manifest import FileDigest
from serving.errors import BundleError, ConfigurationError
from serving.files import open_file
from serving.tables.pages import HUGE_PAGE, in_huge_pages

MOUNTS = Path("/proc/self/mountinfo")
# The name of a copy: this prefix, and the SHA-256 of the file.
COPY_PREFIX = "tbe-weights-"
_PARTIAL = ".partial"
_STEP_BYTES = 16 << 20
# Seconds between checks for a copy that another process makes.
_WAIT_S = 0.05
# What to do if memory is short.
_MORE = "give it more (`sysctl vm.nr_hugepages`, `size=`, the container's limit), or unload what else is served"
_KINDS_OF_TMPFS = {"huge=always", "huge=within_size"}


class HugeFolder(NamedTuple):
    """The mount point of a file system of huge pages. hugetlbfs has reserved pages; a tmpfs takes ordinary memory."""

    path: Path
    is_hugetlbfs: bool


class SharedCopies:
    """The copies that this process uses.

    Args:
        lacks: why more copies on a tmpfs do not fit into memory; empty if they fit.

    Raises:
        ConfigurationError: no file system of huge pages is mounted where this process may write.
    """

    def __init__(self, *, lacks: str = "") -> None:
        self._lacks = lacks
        self._folders = list(huge_page_folders(MOUNTS))
        if not self._folders:
            raise ConfigurationError(
                "weights-memory 'huge': no hugetlbfs, and no tmpfs with huge=, is mounted where this process may "
                "write: mount one (`mount -t tmpfs -o huge=always,size=… tmpfs /mnt/huge`), or in Kubernetes a "
                "volume with `medium: HugePages-2Mi`; or set 'mapped'"
            )
        self._locks: list[int] = []
        weakref.finalize(self, release_copies, self._locks)

    def take(self, path: Path, digest: FileDigest) -> Path:
        """The copy of a file, which is made if necessary. If another process is making it, this one waits.

        Args:
            path: the file.
            digest: its size and SHA-256, which are checked while the copy is made.

        Returns:
            The path of the copy. It exists until `close`, or the end of the process.

        Raises:
            BundleError: the file differs from its digest, or cannot be read.
            ConfigurationError: the copy does not fit. The message names the folders and the pages that it takes.
        """
        remove_unused((folder.path for folder in self._folders), COPY_PREFIX)
        problems = []
        for folder in self._folders:
            copy = folder.path / f"{COPY_PREFIX}{digest.sha256}"
            try:
                lacks = "" if folder.is_hugetlbfs else self._lacks
                size_bytes = in_huge_pages(digest.size_bytes)
                self._locks.append(acquire_copy(copy, size_bytes, partial(copy_checked, path, digest), lacks))
            except OSError as error:
                more = f": {_MORE}" if error.errno in (errno.ENOSPC, errno.ENOMEM) else ""
                problems.append(f"{copy}: {error.strerror}{more}")
            else:
                return copy
        pages = in_huge_pages(digest.size_bytes) // HUGE_PAGE
        raise ConfigurationError(
            f"weights-memory 'huge': {path} cannot be copied, which takes {pages} pages of 2 MiB: "
            f"{'; '.join(problems)}"
        )

    def close(self) -> None:
        """Release all copies. Copies that no other process uses are removed."""
        release_copies(self._locks)


def huge_page_folders(mounts: Path) -> Iterator[HugeFolder]:
    """The mount points of file systems of huge pages that this process may write to; hugetlbfs first.

    A mount point that another file system covers is left out.

    Args:
        mounts: /proc/self/mountinfo, in the format of proc(5).
    """
    folders: list[HugeFolder] = []
    for line in mounts.read_text(errors="surrogateescape").splitlines():
        where, _, what = line.partition(" - ")
        kind, _, options = what.split(" ", 2)
        _, _, device, _, encoded, *_ = where.split(" ")
        folder = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), encoded))  # space, tab, newline, \
        mount_options = {*options.split(",")}
        is_hugetlbfs = kind == "hugetlbfs" and bool(mount_options & {"pagesize=2M", "pagesize=2048K"})
        is_huge = is_hugetlbfs or (kind == "tmpfs" and bool(mount_options & _KINDS_OF_TMPFS))
        if is_huge and os.access(folder, os.W_OK) and _is_on(folder, device):
            folders.append(HugeFolder(folder, is_hugetlbfs))
    yield from sorted(folders, key=lambda folder: not folder.is_hugetlbfs)


def _is_on(folder: Path, device: str) -> bool:
    number = os.stat(folder).st_dev
    return device == f"{os.major(number)}:{os.minor(number)}"


def acquire_copy(
    copy: Path,
    size_bytes: int,
    fill: Callable[[mmap.mmap], None],
    lacks: str,
    find: Callable[[], bool] = lambda: False,
) -> int:
    """A descriptor of a copy, which is made if necessary. The descriptor holds the lock on the copy.

    Args:
        copy: the path of the copy.
        size_bytes: its size: whole huge pages.
        fill: fills a new copy, whose bytes are zeros.
        lacks: why a new copy does not fit into memory; empty if it fits.
        find: called before a new copy is made. Returns whether it moved an existing copy to that path.

    Raises:
        OSError: the copy cannot be made, or another file has its path.
        BundleError: `fill` raised it.
    """
    draft = copy.with_name(copy.name + _PARTIAL)
    while True:
        try:
            return _expect_size(open_locked(copy, os.O_RDONLY, fcntl.LOCK_SH), size_bytes)
        except FileNotFoundError:
            pass
        try:
            file = open_locked(draft, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:  # another process finished it, or failed
            continue
        except BlockingIOError:  # another process makes it, and keeps its lock on the finished copy
            time.sleep(_WAIT_S)
            continue
        try:
            if copy.exists() or find():
                draft.unlink()
                continue
            if lacks:
                raise OSError(errno.ENOMEM, lacks)
            with _files_of_any_size():
                os.ftruncate(file, 0)  # a draft that a killed process left may have bytes
                os.ftruncate(file, size_bytes)
                os.posix_fallocate(file, 0, size_bytes)  # or a page without memory is a bus error
            with mmap.mmap(file, size_bytes) as pages:  # hugetlbfs takes no write(2)
                fill(pages)
            draft.rename(copy)
            fcntl.flock(file, fcntl.LOCK_SH)
            if _is_at(file, copy):  # otherwise another process took it for unused and removed it
                return os.dup(file)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)


@contextmanager
def _files_of_any_size() -> Iterator[None]:
    """During the block, lift the limit on the size of files, which a model's process has for its shared memory."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits[1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _expect_size(file: int, size_bytes: int) -> int:
    """Return the descriptor if its file has the size of a copy. Otherwise close it and raise OSError."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_size != size_bytes:
        os.close(file)
        raise OSError(errno.EINVAL, "is no copy of it: remove it")
    return file


def open_locked(path: Path, flags: int, lock: int) -> int:
    """Open a file and lock it.

    Raises:
        FileNotFoundError: it does not exist, or was removed or renamed before it was locked.
        PermissionError: it belongs to another user, who may have written anything to it.
    """
    # Without O_NONBLOCK, opening a FIFO would wait for a writer. It changes nothing for files.
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if os.fstat(file).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "is another user's: remove it", str(path))
        fcntl.flock(file, lock)
        if not _is_at(file, path):
            raise FileNotFoundError(path)
    except BaseException:
        os.close(file)
        raise
    return file


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def copy_checked(source: Path, digest: FileDigest, pages: mmap.mmap, offset: int = 0) -> None:
    """Copy a file to `pages` from `offset` on, and compare the copied bytes with its digest.

    Raises:
        BundleError: the file differs, or cannot be read.
    """
    sha256, start = hashlib.sha256(), offset
    try:
        original = open_file(source, follow=True)
    except OSError as error:
        raise BundleError(f"{source}: cannot be read: {error.strerror}: publish the bundle again") from error
    with original:
        while data := original.read(min(_STEP_BYTES, offset + digest.size_bytes - start)):
            sha256.update(data)
            pages[start : start + len(data)] = data
            start += len(data)
    check_sha256(source, sha256.hexdigest(), digest)


def remove_unused_copies() -> None:
    """Remove the copies that no process holds a lock on."""
    remove_unused((folder.path for folder in huge_page_folders(MOUNTS)), COPY_PREFIX)


def remove_unused(folders: Iterable[Path], prefix: str, *, but: str | None = None) -> None:
    """Remove the copies of some folders that no process holds a lock on.

    Args:
        folders: the folders of the copies.
        prefix: the prefix of their names.
        but: copies whose names end with this are kept.
    """
    for copy in (copy for folder in folders for copy in folder.glob(f"{prefix}*")):
        if but is not None and copy.name.endswith(but):
            continue
        with suppress(OSError):  # it is locked, belongs to another user, is a folder, or was just removed
            file = open_locked(copy, os.O_RDONLY, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                copy.unlink()
            finally:
                os.close(file)


def release_copies(locks: list[int]) -> None:
    """Release copies, and remove those that no other process holds."""
    while locks:
        file = locks.pop()
        with suppress(OSError):  # others hold it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(os.readlink(f"/proc/self/fd/{file}")).unlink()
        os.close(file)
