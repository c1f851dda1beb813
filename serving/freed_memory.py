"""How much freed memory a process keeps.

glibc returns the memory of a large array to Linux as soon as it is freed. The next large array then takes a page
fault for every 4 KiB, which is half of the time of 512 samples of DLRM-v2. `serving.server.child_process` preloads
tcmalloc into the processes of models if it is installed. tcmalloc keeps freed memory, and so does glibc after
mallopt(3). Both return too little of it to Linux. This module returns what exceeds a limit.
"""

import ctypes
import os
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# Parameters of mallopt(3), and glibc's maximum for the threshold below which freed memory can be kept.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST_BYTES = -1, -3, 32 << 20
# The property of gperftools' malloc_extension_c.h with the number of free bytes. ReleaseToSystem returns whole runs
# of pages, and deducts any excess from later calls, so that several calls may be needed.
_FREE, _MOST_CALLS = b"tcmalloc.pageheap_free_bytes", 1000
# Largest number of bytes that are kept.
KEPT_BYTES = 64 << 20


class _Mallinfo2(ctypes.Structure):
    """The result of mallinfo2(3), since glibc 2.33: ten numbers."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


# The indices of the numbers of bytes in use: in separate mappings (hblkhd), and in heaps (uordblks).
_IN_MAPPINGS, _IN_HEAPS = 4, 7


class FreedMemory:
    """Makes malloc keep about `KEPT_BYTES` of freed memory for later allocations: glibc's or tcmalloc, no other.

    glibc keeps free memory at the end of its heap, up to a threshold. A small object after it keeps all of it.
    """

    def __init__(self) -> None:
        self._count: Any = getattr(_LIBC, "MallocExtension_GetNumericProperty", None)
        self._mallinfo2: Any = None if self._count else getattr(_LIBC, "mallinfo2", None)
        if self._mallinfo2 is not None:
            self._mallinfo2.restype = _Mallinfo2
            _LIBC.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
            _LIBC.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
            self._least = self._unused()

    def give_back(self) -> None:
        """Return free memory beyond `KEPT_BYTES` to Linux."""
        if self._count is not None:
            free = ctypes.c_size_t()
            for _ in range(_MOST_CALLS):
                self._count(_FREE, ctypes.byref(free))
                if free.value <= KEPT_BYTES:
                    break
                _LIBC.MallocExtension_ReleaseToSystem(ctypes.c_size_t(free.value - KEPT_BYTES))
        elif self._mallinfo2 is not None:
            unused = self._unused()
            if unused > self._least + KEPT_BYTES:
                _LIBC.malloc_trim(0)
                self._least = self._unused()
            self._least = min(self._least, unused)

    def _unused(self) -> int:
        """Bytes of this process's private memory that are not in use by malloc: freed, or not malloc's."""
        numbers: list[int] = self._mallinfo2().numbers
        resident, shared = map(int, Path("/proc/self/statm").read_bytes().split()[1:3])
        return (resident - shared) * _PAGE_BYTES - numbers[_IN_HEAPS] - numbers[_IN_MAPPINGS]
