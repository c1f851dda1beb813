"""Size and SHA-256 of a bundle's files: what they were, and whether they still are."""

import hashlib
import os
from pathlib import Path

from serving.errors import BundleError
from serving.files import open_file, read_file
from serving.strict import Strict


class FileDigest(Strict, frozen=True):
    """Size and SHA-256 of a file of the bundle."""

    size_bytes: int
    sha256: str


def digest_of(content: bytes) -> FileDigest:
    """Size and SHA-256 of a file that holds `content`."""
    return FileDigest(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def digest_file(path: Path, *, follow: bool = False) -> FileDigest:
    """Size and SHA-256 of the file at `path`; OSError as `serving.files.open_file`."""
    with open_file(path, follow=follow) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(size_bytes=os.fstat(file.fileno()).st_size, sha256=sha256)


def check_size(path: Path, expected: FileDigest, *, follow: bool = False) -> None:
    """Refuse a file that is missing, has another size or is none; reads nothing of it.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    try:
        with open_file(path, follow=follow) as file:
            found = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}: publish the bundle again") from error
    if found != expected.size_bytes:
        raise BundleError(f"{path}: expected {expected.size_bytes} bytes, got {found}: publish the bundle again")


def check_digest(path: Path, expected: FileDigest, *, follow: bool = False) -> None:
    """Read all of a file, and refuse it where its SHA-256 differs.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    try:
        found = digest_file(path, follow=follow).sha256
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}: publish the bundle again") from error
    check_sha256(path, found, expected)


def read_checked(path: Path, expected: FileDigest) -> bytes:
    """The bytes of a file, exactly those whose SHA-256 was compared.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    check_size(path, expected)
    try:
        content = read_file(path, expected.size_bytes)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}: publish the bundle again") from error
    check_sha256(path, digest_of(content).sha256, expected)
    return content


def check_sha256(path: Path, found: str, expected: FileDigest) -> None:
    """Refuse a file whose SHA-256, `found`, is not what was expected.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    if found != expected.sha256:
        raise BundleError(
            f"{path}: expected SHA-256 {expected.sha256[:12]}…, got {found[:12]}…: the file changed after export; "
            "publish the bundle again"
        )
