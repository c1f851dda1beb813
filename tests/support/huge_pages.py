"""File systems of huge pages, which a test mounts for a program alone, and what Linux says of pages."""

import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

HUGE_PAGE = 2 << 20


def run_beside_huge_pages(folder: Path, size: str, program: str, *arguments: object, timeout_s: float = 300) -> str:
    """What a Python program prints that sees a tmpfs of huge pages at `folder`, in a mount namespace of its own.

    Any user may do so: the program is root in a user namespace of its own.
    """
    folder.mkdir(exist_ok=True)
    mounted = f'mount -t tmpfs -o huge=always,size={size} tmpfs "$1" && shift && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", mounted, "sh", folder]
    done = subprocess.run(
        [*map(str, command), sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_in_small_pieces(path: Path, content: bytes) -> None:
    """Write a file as ordinary programs do, so that the page cache holds it in small pages; it is on the disk."""
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(content), 65_537):
            file.write(content[start : start + 65_537])
        os.fsync(file.fileno())


def gives_huge_pages(folder: Path) -> bool:
    """Whether a file in `folder` is mapped in huge pages, if it is read through a mapping that asks for them."""
    path = folder / "tried"
    write_in_small_pieces(path, bytes(4 * HUGE_PAGE))
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            mapped.madvise(mmap.MADV_HUGEPAGE)
            assert not any(mapped[number] for number in range(0, len(mapped), mmap.PAGESIZE))
            has_huge_pages = huge_of(path) == 4 * HUGE_PAGE
    path.unlink()
    return has_huge_pages


def expect_huge(huge_pages: int, most: int, folder: Path) -> None:
    """All that can be in huge pages is, if the kernel has some to give now: memory may be in small pieces."""
    assert 0 <= huge_pages <= most
    assert huge_pages == most or not gives_huge_pages(folder)


def huge_of(path: Path) -> int:
    """Bytes of a file that this process has mapped in huge pages."""
    maps = Path("/proc/self/smaps").read_text().split(str(path))
    return sum(int(re.findall(r"FilePmdMapped: +(\d+) kB", after)[0]) << 10 for after in maps[1:])
