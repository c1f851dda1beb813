"""What is in memory of a file, compared with what others say of it."""

import ctypes
import mmap
import os
from pathlib import Path

from serving.tables.pages import Cached, cached
from tests.support.huge_pages import HUGE_PAGE, expect_huge, huge_of, write_in_small_pieces


def size_of(path: Path) -> int:
    pages = cached(path)
    assert pages is not None
    return pages.size


def test_small_and_huge_pages_of_a_file_are_distinguished(tmp_path: Path) -> None:
    write_in_small_pieces(path := tmp_path / "weights.0.bin", bytes(3 * HUGE_PAGE + 100))
    whole = 3 * HUGE_PAGE + mmap.PAGESIZE
    assert cached(path) == Cached(whole, 0)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert size_of(path) < whole
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            pages.madvise(mmap.MADV_HUGEPAGE)
            assert not any(pages[number] for number in range(0, len(pages), mmap.PAGESIZE))
            assert cached(path) == Cached(whole, huge_of(path))
            expect_huge(huge_of(path), 3 * HUGE_PAGE, tmp_path)


def test_cached_pages_of_a_file_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "weights.0.bin"
    size = (1 << 30) + (64 << 20)  # more than is looked at at once; a hole, of which nothing is in memory
    with path.open("wb+") as file:
        file.truncate(size)
        assert size_of(path) == 0
        for start in (0, size - 4 * mmap.PAGESIZE):
            with mmap.mmap(file.fileno(), 4 * mmap.PAGESIZE, offset=start) as pages:
                pages.madvise(mmap.MADV_RANDOM)
                lock(pages)
                assert 4 * mmap.PAGESIZE <= size_of(path) < size // 2
    path.write_bytes(b"")
    assert size_of(path) == 0
    path.unlink()
    assert cached(path) is None


def lock(pages: mmap.mmap) -> None:
    """Read pages, and keep them in memory."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    if ctypes.CDLL(None, use_errno=True).mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(pages))):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def test_pages_of_another_users_file_are_unknown() -> None:
    path = Path("/etc/passwd")  # everybody may read it, root alone may write to it
    user = os.geteuid()
    assert (cached(path) is None) == (user != 0)
    if user == 0:
        os.seteuid(65534)
        try:
            assert cached(path) is None
        finally:
            os.seteuid(user)
