"""Size and SHA-256 of a bundle's files: what they were, and whether they still are."""

import hashlib
import os
import stat
from pathlib import Path

from serving.errors import BundleError
from serving.strict import Strict


class FileDigest(Strict, frozen=True):
    """Size and SHA-256 of a file of the bundle."""

    size_bytes: int
    sha256: str


def digest_file(path: Path) -> FileDigest:
    """Size and SHA-256 of the file at `path`."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(size_bytes=os.fstat(file.fileno()).st_size, sha256=sha256)


def check_size(path: Path, expected: FileDigest) -> None:
    """Refuse a file that is missing, has another size or is none; reads nothing of it.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}: publish the bundle again") from error
    if not stat.S_ISREG(found.st_mode):
        raise BundleError(f"{path}: expected a file, got something else: publish the bundle again")
    if found.st_size != expected.size_bytes:
        raise BundleError(
            f"{path}: expected {expected.size_bytes} bytes, got {found.st_size}: publish the bundle again"
        )


def check_digest(path: Path, expected: FileDigest) -> None:
    """Read all of a file, and refuse it where its SHA-256 differs.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    try:
        found = digest_file(path).sha256
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}: publish the bundle again") from error
    _check_sha256(path, found, expected)


def read_checked(path: Path, expected: FileDigest) -> bytes:
    """The bytes of a file, exactly those whose SHA-256 was compared.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    content = read_file(path)
    _check_sha256(path, hashlib.sha256(content).hexdigest(), expected)
    return content


def read_file(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        BundleError: it cannot be read, or is a pipe or folder.
    """
    try:
        # A pipe that nobody writes to would be waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BundleError(f"{path}: expected a file, got something else: publish the bundle again")
            return file.read()
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}: is {path.parent} a bundle?") from error


def _check_sha256(path: Path, found: str, expected: FileDigest) -> None:
    if found != expected.sha256:
        raise BundleError(
            f"{path}: expected SHA-256 {expected.sha256[:12]}…, got {found[:12]}…: the file changed after export; "
            "publish the bundle again"
        )
