"""The pages of a file in memory: how many there are, of which size, and how the file is read into memory.

Pages have 2 MiB if the kernel supports it, or else 4 KiB.

A lookup reads rows at random places. With pages of 4 KiB, a page that was not used recently costs a walk through the
page tables. With pages of 2 MiB, the tables of a bundle fit into the processor's TLB. The size of a page is decided
when the file is written or first read. All processes share the pages (docs/decisions/0012-memory-pages.md).

Sources of the constants: madvise(2), mincore(2), posix_fadvise(2), proc_pid_smaps(5).
"""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from serving.files import open_file

HUGE_PAGE = 2 << 20
_PAGES = HUGE_PAGE // mmap.PAGESIZE
# Bytes that are read into memory at once. The first 2 MiB are read alone, to see whether the kernel uses huge pages.
_CHUNK_BYTES = 256 << 20
# Maximum attempts to read the first page as a huge page: a lookup that touches it spoils an attempt.
_TRIES = 5
# Longest wait, in seconds, for another process that reads the same file into memory.
_TURN_S = 10.0
_POPULATE_READ = 22
# A kernel without huge pages refuses this advice. That does no harm.
_ABOUT_HUGE = {mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE}
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MOUNTS = Path("/proc/self/mountinfo")
_SMAPS = Path("/proc/self/smaps")
_HUGE = re.compile(r"^(?:FilePmdMapped|ShmemPmdMapped|Shared_Hugetlb|Private_Hugetlb): +(\d+) kB$", re.MULTILINE)
_FAILED = ctypes.c_void_p(-1).value
# Bytes of a file that are inspected together.
_LOOKED_AT_BYTES = 1 << 30


class MappedFile:
    """A file that is mapped for reading. It stays mapped as long as `bytes` is referenced.

    Args:
        path: the file, not empty. On hugetlbfs it may be longer than `size_bytes`.
        size_bytes: the number of bytes to map.
        start: the offset of the first one: a multiple of 2 MiB.
        huge: whether to ask for pages of 2 MiB. If not, a page of 4 KiB is read when a row in it is read.

    Attributes:
        path: the file.
        bytes: uint8 [size_bytes], read-only. The memory is the file's pages; nothing is copied.
        huge: as the argument. It may be set later; the next `chunks` asks for huge pages then.

    Raises:
        OSError: the file cannot be opened or mapped.
    """

    def __init__(self, path: Path, size_bytes: int, *, huge: bool, start: int = 0) -> None:
        self.path = path
        self.huge = huge
        self._is_locked = False
        with path.open("rb") as file:
            # hugetlbfs maps whole pages.
            mapped_bytes = min(in_huge_pages(size_bytes), os.fstat(file.fileno()).st_size - start)
            mapped = mmap.mmap(file.fileno(), mapped_bytes, prot=mmap.PROT_READ, offset=start)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)[:size_bytes]
        self._advise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_RANDOM)

    def read_row_by_row(self) -> None:
        """From now on, read pages only when they are needed. Pages in memory stay until the memory is needed."""
        self.huge = False
        self._advise(mmap.MADV_NOHUGEPAGE)
        self._advise(mmap.MADV_RANDOM)

    def chunks(self, coming: Callable[[int], None] = lambda _: None) -> Iterator[npt.NDArray[np.uint8]]:
        """The file in chunks of uint8. A chunk is read into memory when it is yielded, in huge pages where possible.

        Pages in memory may be small, because another program wrote or read them. They are dropped and read again,
        unless a process uses them. Processes take turns, so that none keeps pages that another one drops.

        Args:
            coming: called before each chunk is read, with the offset of the end of the chunk, in bytes.

        Raises:
            OSError: the file cannot be read.
        """
        can_be_huge, huge = self.huge and not self._is_locked, 0
        start = 0
        while start < self.bytes.size:
            stop = min(start + (_CHUNK_BYTES if start else HUGE_PAGE), self.bytes.size)
            whole = stop // HUGE_PAGE * HUGE_PAGE - start  # the end of a file may be shorter than a page
            coming(stop)
            if self.huge:  # chunk by chunk, so that the rest of a file that was read row by row continues to be
                self._advise(mmap.MADV_NORMAL, start, stop)
                self._advise(mmap.MADV_HUGEPAGE, start, stop)
            with self._turn() as file:
                self.populate(start, stop)
                if can_be_huge and self.huge_bytes() - huge < whole:
                    for _ in range(1 if start else _TRIES):
                        self._give_up(file, start, stop)
                        self.populate(start, stop)
                        if self.huge_bytes() - huge >= whole:
                            break
                    can_be_huge = start > 0 or self.huge_bytes() >= whole > 0
                huge = self.huge_bytes() if can_be_huge else 0
            yield self.bytes[start:stop]
            start = stop

    def lock(self) -> None:
        """Read the file into memory and lock its pages there.

        Raises:
            OSError: the file is larger than the process may lock (RLIMIT_MEMLOCK), or cannot be read.
        """
        for _ in self.chunks():
            pass
        self._is_locked = True
        if _LIBC.mlock(self.bytes.ctypes.data, self.bytes.size):
            raise OSError(code := ctypes.get_errno(), os.strerror(code), str(self.path))

    def huge_bytes(self) -> int:
        """The bytes of the file that this process has mapped in huge pages."""
        return min(huge_bytes_at(self.bytes.ctypes.data), self.bytes.size)

    def populate(self, start: int = 0, stop: int | None = None) -> None:
        """Read bytes [start, stop) into memory, in pages of any size.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            self._advise(_POPULATE_READ, start, stop)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._advise(mmap.MADV_WILLNEED, start, stop)  # before Linux 5.14

    def why_small(self) -> str:
        """Why pages are small: what this machine lacks for huge pages."""
        setting = _TRANSPARENT.read_text() if _TRANSPARENT.exists() else "[never]"
        if "[never]" in setting:
            return f"transparent huge pages are off: write madvise to {_TRANSPARENT}"
        kind = _file_system_of(self.path)
        return (
            f"{kind} on Linux {os.uname().release} has no huge pages for files, or another process uses small ones "
            "of this file: ext4 has them since Linux 6.16, XFS since 5.18"
        )

    def _give_up(self, file: int, start: int, stop: int) -> None:
        """Drop bytes [start, stop) from memory. Lookups that touch them read them again, mostly as huge pages."""
        os.fdatasync(file)  # pages that are not on the disk cannot be dropped
        for page in range(start, stop, HUGE_PAGE):  # one by one, so that a lookup between the two calls is unlikely
            size = min(HUGE_PAGE, stop - page)
            self._advise(mmap.MADV_DONTNEED, page, page + size)
            os.posix_fadvise(file, page, size, os.POSIX_FADV_DONTNEED)

    def _advise(self, advice: int, start: int = 0, stop: int | None = None) -> None:
        size = (self.bytes.size if stop is None else stop) - start
        # By ctypes: `mmap.madvise` holds Python's lock, which would stop other threads.
        if _LIBC.madvise(self.bytes.ctypes.data + start, size, advice) and advice not in _ABOUT_HUGE:
            raise OSError(code := ctypes.get_errno(), os.strerror(code), str(self.path))

    @contextmanager
    def _turn(self) -> Iterator[int]:
        """Wait until no other process reads the file into memory, `_TURN_S` at most. Yields a descriptor of it."""
        with self.path.open("rb") as file:
            end = time.monotonic() + _TURN_S
            while time.monotonic() < end:
                with suppress(OSError):  # not every file system has locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.01)
            yield file.fileno()


def leave_out_of_memory(path: Path) -> None:
    """Drop the pages of a file from memory, except those that a process uses. The file stays on the disk."""
    with suppress(OSError), path.open("rb") as file:  # the file may have been removed
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Cached(NamedTuple):
    """The bytes of a file in the page cache, as whole pages: all of them, and those in pages of 2 MiB."""

    size: int
    huge: int


def cached(path: Path) -> Cached | None:
    """How much of a file is in the page cache. Nothing is read from the disk.

    The result is None if it is unknown: the file does not exist, or this process neither owns it nor may write to it,
    for which Linux would report that all of it is in memory.
    """
    try:
        with open_file(path, follow=True) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() and not os.access(path, os.W_OK, effective_ids=True):
                return None
            starts = range(0, status.st_size, _LOOKED_AT_BYTES)
            parts = [_cached(file.fileno(), start, min(_LOOKED_AT_BYTES, status.st_size - start)) for start in starts]
            return Cached(sum(part.size for part in parts), sum(part.huge for part in parts))
    except OSError:
        return None


def in_huge_pages(size_bytes: int) -> int:
    """The bytes that a file of `size_bytes` takes on a file system of huge pages: whole pages of 2 MiB."""
    return -(-size_bytes // HUGE_PAGE) * HUGE_PAGE


def huge_bytes_at(address: int) -> int:
    """The bytes of the mapping at `address` that this process has in huge pages; 0 if there is no such mapping."""
    first = f"{address:x}-"
    smaps = _SMAPS.read_text(errors="surrogateescape")
    start = 0 if smaps.startswith(first) else smaps.find("\n" + first)
    return huge_bytes_of(smaps[start : smaps.find("\nVmFlags:", start)]) if start >= 0 else 0


def huge_bytes_of(smaps: str) -> int:
    """The bytes of files in huge pages, including tmpfs and hugetlbfs, from the text of smaps or smaps_rollup."""
    return sum(int(kib) << 10 for kib in _HUGE.findall(smaps))


def _file_system_of(path: Path) -> str:
    """The kind of file system that a file is on, such as "ext4"."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _MOUNTS.read_text(errors="surrogateescape").splitlines():
        where, _, what = line.partition(" - ")
        if where.split(" ")[2] == number:
            return what.split(" ")[0]
    return "its file system"


def _cached(file: int, start: int, size_bytes: int) -> Cached:
    pages = -(-size_bytes // mmap.PAGESIZE)
    states = ctypes.create_string_buffer(pages)
    address = _LIBC.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file, start)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), "cannot be mapped")
    try:
        if _LIBC.mincore(address, size_bytes, states):
            raise OSError(ctypes.get_errno(), "mincore")
        # The lowest bit of each byte says whether that page is in memory.
        is_resident = np.frombuffer(memoryview(states).cast("B"), np.uint8) & 1
        windows = is_resident[: pages // _PAGES * _PAGES].reshape(-1, _PAGES)
        for window in np.flatnonzero(windows.all(axis=1)).tolist():
            ctypes.string_at(address + window * HUGE_PAGE, 1)  # touching a byte maps its page: all of a huge one
        return Cached(int(is_resident.sum()) * mmap.PAGESIZE, huge_bytes_at(address) if windows.any() else 0)
    finally:
        _LIBC.munmap(address, size_bytes)
