"""The pages of mapped files, beside what the kernel itself says of them."""

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from serving.tables import pages
from serving.tables.pages import HUGE_PAGE, MappedFile
from tests.support.huge_pages import expect_huge, huge_of, write_in_small_pieces


@pytest.mark.parametrize("size", [1, mmap.PAGESIZE, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 7 * HUGE_PAGE + 12_345])
@pytest.mark.parametrize("huge", [True, False])
def test_chunks_of_a_file_join_to_its_bytes(
    size: int, huge: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_CHUNK_BYTES", 2 * HUGE_PAGE)
    content = np.random.default_rng(0).bytes(size)
    write_in_small_pieces(path := tmp_path / "weights.0.bin", content)
    file = MappedFile(path, size, huge=huge)
    assert b"".join(chunk.tobytes() for chunk in file.chunks()) == content
    assert file.bytes.tobytes() == content
    assert file.huge_bytes() == huge_of(path)


def test_unused_small_pages_become_huge_where_the_kernel_can(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(5 * HUGE_PAGE + 1)
    write_in_small_pieces(path := tmp_path / "weights.0.bin", content)
    file = MappedFile(path, len(content), huge=True)
    assert b"".join(chunk.tobytes() for chunk in file.chunks()) == content
    assert huge_of(path) == file.huge_bytes()
    expect_huge(file.huge_bytes(), 5 * HUGE_PAGE, tmp_path)
    assert any(word in file.why_small() for word in ("transparent huge pages are off", "Linux"))


def test_small_pages_in_use_are_read_correctly(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(5 * HUGE_PAGE)
    write_in_small_pieces(path := tmp_path / "weights.0.bin", content)
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as used:
        before = bytes(used)
        file = MappedFile(path, len(content), huge=True)
        assert b"".join(chunk.tobytes() for chunk in file.chunks()) == before == bytes(used) == content


def test_a_file_that_stays_locked_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_TURN_S", 0.05)
    write_in_small_pieces(path := tmp_path / "weights.0.bin", bytes(100))
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert sum(chunk.size for chunk in MappedFile(path, 100, huge=True).chunks()) == 100


def test_a_truncated_file_is_an_error_and_no_bus_error(tmp_path: Path) -> None:
    write_in_small_pieces(path := tmp_path / "weights.0.bin", bytes(3 * HUGE_PAGE))
    file = MappedFile(path, 3 * HUGE_PAGE, huge=True)
    os.truncate(path, mmap.PAGESIZE)
    with pytest.raises(OSError, match=str(path)):
        list(file.chunks())
