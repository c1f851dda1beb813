"""How much of a file the page cache holds, and in pages of which size: mincore(2), proc_pid_smaps(5)."""

import ctypes
import mmap
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serving.files import open_file

HUGE_PAGE = 2 << 20
_PAGES = HUGE_PAGE // mmap.PAGESIZE
_CHUNK_BYTES = 1 << 30
_SMAPS = Path("/proc/self/smaps")
_HUGE = re.compile(r"^(?:FilePmdMapped|ShmemPmdMapped|Shared_Hugetlb|Private_Hugetlb): +(\d+) kB$", re.MULTILINE)
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_FAILED = ctypes.c_void_p(-1).value


class Cached(NamedTuple):
    """Bytes of a file that are in the page cache, in whole pages: all of them, and those in pages of 2 MiB."""

    size: int
    huge: int


def cached(path: Path) -> Cached | None:
    """How much of a file is in the page cache. Nothing is read from the disk.

    None if it is not known: the file is gone, or this process neither owns it nor may write to it. Linux would then
    say that all of it is in memory.
    """
    try:
        with open_file(path, follow=True) as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() and not os.access(path, os.W_OK, effective_ids=True):
                return None
            starts = range(0, found.st_size, _CHUNK_BYTES)
            parts = [_cached(file.fileno(), start, min(_CHUNK_BYTES, found.st_size - start)) for start in starts]
            return Cached(sum(each.size for each in parts), sum(each.huge for each in parts))
    except OSError:
        return None


def in_huge_pages(size_bytes: int) -> int:
    """Bytes that a file of `size_bytes` takes on a file system of huge pages: whole pages of 2 MiB."""
    return -(-size_bytes // HUGE_PAGE) * HUGE_PAGE


def huge_bytes_at(address: int) -> int:
    """Bytes of the mapping at `address` that this process has in huge pages. 0 if there is no such mapping."""
    first = f"{address:x}-"
    said = _SMAPS.read_text()
    at = 0 if said.startswith(first) else said.find("\n" + first)
    return huge_bytes_of(said[at : said.find("\nVmFlags:", at)]) if at >= 0 else 0


def huge_bytes_of(smaps: str) -> int:
    """Bytes in huge pages of files, on a tmpfs or hugetlbfs too, by the text of smaps or smaps_rollup."""
    return sum(int(kib) << 10 for kib in _HUGE.findall(smaps))


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
        there = np.frombuffer(memoryview(states).cast("B"), np.uint8) & 1
        windows = there[: pages // _PAGES * _PAGES].reshape(-1, _PAGES)
        for window in np.flatnonzero(windows.all(axis=1)).tolist():
            ctypes.string_at(address + window * HUGE_PAGE, 1)  # touching a byte maps its page: all of a huge one
        return Cached(int(there.sum()) * mmap.PAGESIZE, huge_bytes_at(address) if windows.any() else 0)
    finally:
        _LIBC.munmap(address, size_bytes)
