"""The memory of processes and files, compared with what others say of it."""

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import psutil

from serving.server.memory import cached_bytes, process_memory

MAPS_AND_WAITS = """
import mmap, sys, time
with open(sys.argv[1], "rb") as file:
    tables = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    tables[0]
print("mapped", flush=True)
time.sleep(600)
"""


def test_the_memory_of_a_process_is_what_psutil_says(tmp_path: Path) -> None:
    weights = tmp_path / "weights.0.bin"
    weights.write_bytes(bytes(3 * mmap.PAGESIZE + 1))
    command = [sys.executable, "-c", MAPS_AND_WAITS, str(weights)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "mapped\n"
            memory, theirs = process_memory(process.pid), psutil.Process(process.pid).memory_full_info()
            assert memory is not None
            assert memory.mapped == 4 * mmap.PAGESIZE
            # Whoever starts or ends in between shares some of its pages.
            assert abs(memory.share - theirs.pss) < theirs.pss / 2
            assert memory.share <= memory.resident
        finally:
            process.kill()
    assert process_memory(process.pid) is None


def test_what_is_cached_of_a_file_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "weights.0.bin"
    size = (1 << 30) + (64 << 20)  # more than is looked at at once; a hole, of which nothing is in memory
    with path.open("wb+") as file:
        file.truncate(size)
        assert cached_bytes(path) == 0
        for start in (0, size - 4 * mmap.PAGESIZE):
            with mmap.mmap(file.fileno(), 4 * mmap.PAGESIZE, offset=start) as pages:
                pages.madvise(mmap.MADV_RANDOM)
                lock(pages)
                assert 4 * mmap.PAGESIZE <= (cached_bytes(path) or 0) < size // 2
    path.write_bytes(b"")
    assert cached_bytes(path) == 0
    path.unlink()
    assert cached_bytes(path) is None


def lock(pages: mmap.mmap) -> None:
    """Read pages, and keep them in memory."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    if ctypes.CDLL(None, use_errno=True).mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(pages))):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def test_a_file_of_somebody_else_is_not_guessed_at() -> None:
    path = Path("/etc/passwd")  # everybody may read it, root alone may write to it
    user = os.geteuid()
    assert (cached_bytes(path) is None) == (user != 0)
    if user == 0:
        os.seteuid(65534)
        try:
            assert cached_bytes(path) is None
        finally:
            os.seteuid(user)
