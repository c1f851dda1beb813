"""Size and SHA-256 of a bundle's files, and checks that files still have them."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.errors import BundleError
from serving.files.reading import open_file, read_file
from serving.files.strict import Strict


class FileDigest(Strict, frozen=True):
    """Size and SHA-256 of a file of a bundle. `sha256` is in hex."""

    size_bytes: int
    sha256: str


def digest_of(content: bytes) -> FileDigest:
    """Size and SHA-256 of a file that holds `content`."""
    return FileDigest(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def digest_file(path: Path, *, follow: bool = False) -> FileDigest:
    """Size and SHA-256 of the file at `path`.

    Raises:
        OSError: as `serving.files.reading.open_file`.
    """
    with open_file(path, follow=follow) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(size_bytes=os.fstat(file.fileno()).st_size, sha256=sha256)


def check_size(path: Path, expected: FileDigest, *, follow: bool = False) -> None:
    """Refuse a file that is missing, is no regular file, or has another size. Its content is not read.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    with _reading(path), open_file(path, follow=follow) as file:
        found = os.fstat(file.fileno()).st_size
    if found != expected.size_bytes:
        raise BundleError(f"{path}: expected {expected.size_bytes} bytes, got {found}: publish the bundle again")


def check_digest(path: Path, expected: FileDigest, *, follow: bool = False) -> None:
    """Read all of a file, and refuse it if its SHA-256 differs.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    with _reading(path):
        found = digest_file(path, follow=follow).sha256
    check_sha256(path, found, expected)


def read_checked(path: Path, expected: FileDigest) -> bytes:
    """The bytes of a file. Exactly these bytes were compared with `expected`.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    check_size(path, expected)
    with _reading(path):
        content = read_file(path, expected.size_bytes)
    check_sha256(path, digest_of(content).sha256, expected)
    return content


def check_sha256(path: Path, found: str, expected: FileDigest) -> None:
    """Refuse a file whose SHA-256 `found` is not the expected one.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    if found != expected.sha256:
        raise BundleError(
            f"{path}: expected SHA-256 {expected.sha256[:12]}…, got {found[:12]}…: the file changed after export; "
            "publish the bundle again"
        )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Say which file of a bundle cannot be read."""
    try:
        yield
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}: publish the bundle again") from error
