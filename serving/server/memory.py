"""The memory of a process and of files, as Linux says: proc_pid_smaps(5), proc_pid_maps(5) and mincore(2)."""

import ctypes
import mmap
import os
import re
from pathlib import Path

import numpy as np

from serving.files.reading import open_file
from serving.files.strict import Strict

_WEIGHTS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*/weights\.\d+\.bin$", re.MULTILINE)
_CHUNK_BYTES = 1 << 30
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_FAILED = ctypes.c_void_p(-1).value


class ProcessMemory(Strict, frozen=True):
    """The memory of a process, in bytes.

    Attributes:
        resident: what is in memory of all that it uses, shared pages included.
        share: the same, with a page that N processes use counted as 1/N of it (PSS). The shares of all processes add
            up to what they use together.
        mapped: the files of weights that it has mapped, in memory or not.
    """

    resident: int
    share: int
    mapped: int


def process_memory(pid: int) -> ProcessMemory | None:
    """The memory of a process; None if it has ended, or is not ours to look at."""
    process = Path("/proc") / str(pid)
    try:
        rollup = (process / "smaps_rollup").read_text()
        maps = (process / "maps").read_text()
    except OSError:
        return None
    kib = {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", rollup, re.MULTILINE)}
    return ProcessMemory(
        resident=kib["Rss"] << 10,
        share=kib["Pss"] << 10,
        mapped=sum(int(end, 16) - int(start, 16) for start, end in _WEIGHTS.findall(maps)),
    )


def cached_bytes(path: Path) -> int | None:
    """How many bytes of a file are in the page cache, in whole pages.

    None if that cannot be told: it is gone, or neither ours nor ours to write to. Linux then says that all are.
    """
    try:
        with open_file(path, follow=True) as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() and not os.access(path, os.W_OK, effective_ids=True):
                return None
            starts = range(0, found.st_size, _CHUNK_BYTES)
            return sum(_cached(file.fileno(), start, min(_CHUNK_BYTES, found.st_size - start)) for start in starts)
    except OSError:
        return None


def _cached(file: int, start: int, size_bytes: int) -> int:
    pages = -(-size_bytes // mmap.PAGESIZE)
    states = ctypes.create_string_buffer(pages)
    address = _LIBC.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file, start)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), "cannot be mapped")
    try:
        if _LIBC.mincore(address, size_bytes, states):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        _LIBC.munmap(address, size_bytes)
    # The lowest bit of each byte says whether that page is in memory.
    return int((np.frombuffer(memoryview(states).cast("B"), np.uint8) & 1).sum()) * mmap.PAGESIZE
