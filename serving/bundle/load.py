"""Open a bundle: read its manifest, and compare its files with their digests.

`tbe-export prune` removes no bundle that a process holds.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from serving.bundle.lineage import lineage_of
from serving.bundle.manifest import MANIFEST, FileDigest, Manifest
from serving.bundle.parse import parse_manifest
from serving.bundle.plan import FIRST_WEIGHTS, HostBundle, path_of
from serving.errors import BundleError, ConfigurationError
from serving.files import as_text, open_file, read_file


def digest_of(content: bytes) -> FileDigest:
    """Size and SHA-256 of a file that holds `content`."""
    return FileDigest(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def digest_file(path: Path, *, follow: bool = False) -> FileDigest:
    """Size and SHA-256 of the file at `path`.

    Raises:
        OSError: as for `serving.files.open_file`.
    """
    with open_file(path, follow=follow) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(size_bytes=os.fstat(file.fileno()).st_size, sha256=sha256)


def check_size(path: Path, expected: FileDigest, *, follow: bool = False) -> None:
    """Refuse a file that is missing, is not a regular file, or has another size. Its content is not read.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    with _reading(path), open_file(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
    if size != expected.size_bytes:
        raise BundleError(f"{path}: expected {expected.size_bytes} bytes, got {size}: publish the bundle again")


def check_digest(path: Path, expected: FileDigest, *, follow: bool = False) -> None:
    """Read all of a file, and refuse it if its SHA-256 differs.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    with _reading(path):
        sha256 = digest_file(path, follow=follow).sha256
    check_sha256(path, sha256, expected)


def read_checked(path: Path, expected: FileDigest) -> bytes:
    """The bytes of a file, which were compared with `expected`.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    check_size(path, expected)
    with _reading(path):
        content = read_file(path, expected.size_bytes)
    check_sha256(path, digest_of(content).sha256, expected)
    return content


def check_sha256(path: Path | str, sha256: str, expected: FileDigest) -> None:
    """Refuse a file whose SHA-256 `sha256` is not the expected one.

    Raises:
        BundleError: naming the file, what was expected and what came.
    """
    if sha256 != expected.sha256:
        raise BundleError(
            f"{path}: expected SHA-256 {expected.sha256[:12]}…, got {sha256[:12]}…: the file changed after export; "
            "publish the bundle again"
        )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """During the block, turn an OSError into an error that names the file of the bundle."""
    try:
        yield
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}: publish the bundle again") from error


def weights_path(directory: Path, manifest: Manifest, rank: int) -> Path:
    """The path of the file with the bytes of a rank. It may not exist: a host's bundle may be on that host only.

    Args:
        directory: the folder of the bundle.
        manifest: its manifest.
        rank: the number of the rank.

    Returns:
        The bundle's own file; for a rank on another host, the file of the host's bundle in the same repository.
    """
    host_rank = manifest.plan.ranks[rank]
    if host_rank.weights_file is not None:
        return directory / host_rank.weights_file
    host = next(host for host in manifest.hosts if host.host == host_rank.host)
    return path_of(directory, host) / FIRST_WEIGHTS


def weights_paths(directory: Path, manifest: Manifest) -> dict[int, Path]:
    """`weights_path` of every rank, by its number."""
    return {rank: weights_path(directory, manifest, rank) for rank in range(len(manifest.plan.ranks))}


if TYPE_CHECKING:  # clients may lack cryptography
    from serving.bundle.signature import TrustedKeys


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk whose manifest was read and checked.

    Attributes:
        path: <model>/<version>.
        digest: SHA-256, in hex, of its manifest.json.
    """

    path: Path
    manifest: Manifest
    digest: str

    @property
    def lineage(self) -> str:
        """The name of its lineage."""
        return lineage_of(self.digest, self.manifest.compacted)

    def _repr_html_(self) -> str:
        """Its path and tables, as notebooks show them."""
        return f"<p>{escape(as_text(str(self.path)))}</p>{self.manifest._repr_html_()}"


def versions(model: Path) -> list[int]:
    """The versions of a model, oldest first; empty if the model does not exist.

    Args:
        model: the model's folder, <repository>/<name>.
    """
    return sorted(int(entry.name) for entry in model.glob("[0-9]*") if entry.name.isdecimal())


def newest(model: Path) -> int:
    """The newest version of a model.

    Args:
        model: the model's folder, <repository>/<name>.

    Raises:
        BundleError: the model has no version.
    """
    published = versions(model)
    if not published:
        raise BundleError(f"{model}: expected versions made by tbe-export, found none")
    return published[-1]


def check_published(model: Path, requested: Iterable[int]) -> None:
    """Refuse versions that are not published.

    Args:
        model: the model's folder, <repository>/<name>.
        requested: its versions.

    Raises:
        ConfigurationError: naming the missing version and the published ones.
    """
    published = [version for version in reversed(versions(model)) if (model / str(version) / MANIFEST).exists()]
    if missing := sorted({*requested} - {*published}):
        raise ConfigurationError(f"{model}: expected one of versions {published}, got {missing[0]}")


def open_bundle(path: Path, trusted: "TrustedKeys | None" = None) -> Bundle:
    """Read the manifest of a bundle, and check its files. Weights files are not read.

    Every file must exist with its size, and all but the weights files and the file of id maps must have their
    digests. `verify_digests` compares these two kinds, which takes time in proportion to the size of the tables.

    Args:
        path: the folder of the bundle, <model>/<version>.
        trusted: one of these keys must have signed the bundle as this version of this model. None: no signature is
            needed.

    Raises:
        BundleError: naming the file or key that is missing, unknown, inconsistent or too new.
    """
    file = path / MANIFEST
    text = _read_untrusted(file) if trusted is None else trusted.read_version(file)
    manifest = parse_manifest(file, text)
    for name, digest in manifest.files.items():
        is_mapped = name in manifest.mapped_files
        check_size(path / name, digest, follow=is_mapped)
        if not is_mapped:
            check_digest(path / name, digest)
    return Bundle(path, manifest, hashlib.sha256(text).hexdigest())


def open_host(router: Bundle, host: HostBundle, trusted: "TrustedKeys | None") -> Bundle:
    """The bundle of a router's host, in the router's repository.

    Args:
        router: the router's bundle.
        host: an entry of its manifest.
        trusted: as in `open_bundle`.

    Raises:
        BundleError: as for `open_bundle`, or the bundle is not the one that the router names.
    """
    bundle = open_bundle(path_of(router.path, host), trusted)
    if bundle.digest != host.manifest:
        raise BundleError(
            f"{bundle.path}: expected the bundle with SHA-256 {host.manifest} of its manifest, which {router.path} "
            f"names, got {bundle.digest}: export both again"
        )
    return bundle


def _read_untrusted(manifest: Path) -> bytes:
    try:
        return read_file(manifest)
    except OSError as error:
        raise _no_bundle(manifest.parent, error) from error


def _no_bundle(path: Path, error: OSError) -> BundleError:
    """The error for a path without a readable manifest. It names the versions that are in the folder or beside it."""
    where = f"{path / MANIFEST}: cannot be read: {error.strerror}"
    if not isinstance(error, FileNotFoundError):
        return BundleError(where)
    if inside := versions(path):
        return BundleError(f"{where}: expected a version of this model, such as {path / str(inside[-1])}")
    if beside := [version for version in reversed(versions(path.parent)) if str(version) != path.name]:
        return BundleError(f"{where}: expected one of versions {beside}")
    return BundleError(f"{where}: expected a version that tbe-export made, REPOSITORY/NAME/VERSION")


def verify_digests(bundle: Bundle, *, but: Collection[str] = ()) -> None:
    """Read every file of a bundle except those named in `but`, and compare its SHA-256.

    Raises:
        BundleError: naming the first file that differs.
    """
    for name, digest in bundle.manifest.files.items():
        if name not in but:
            check_digest(bundle.path / name, digest, follow=name in bundle.manifest.mapped_files)


def weights_changed_since(bundle: Bundle, moment: float) -> bool:
    """Whether a weights file or the file of id maps was changed, moved or replaced at `moment` or later.

    Args:
        bundle: an open bundle.
        moment: Unix time in seconds. It is compared with the ctime of the files.
    """
    return any((bundle.path / name).stat().st_ctime >= moment for name in bundle.manifest.mapped_files)


def hold(path: Path) -> int:
    """Hold a shared lock on the bundle at `path`, which marks it as in use.

    Returns:
        A file descriptor. The bundle is in use until the descriptor is closed, or the process ends.

    Raises:
        BundleError: no bundle exists at `path`.
    """
    try:
        with open_file(path / MANIFEST) as file:
            descriptor = os.dup(file.fileno())
    except OSError as error:
        raise _no_bundle(path, error) from error
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


@contextmanager
def in_use(path: Path) -> Iterator[bool]:
    """Whether a process holds the bundle at `path`. If not, no process can begin to hold it during the block."""
    try:
        file = open_file(path / MANIFEST)
    except OSError as error:
        # A missing bundle is not in use. A bundle that this process may not read can be.
        yield isinstance(error, PermissionError)
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield True
        else:
            yield False


def remove_version(version: Path) -> bool:
    """Remove a version, unless a process has it open. It is renamed first, so that it disappears at once.

    Returns:
        Whether it was removed.

    Raises:
        OSError: it cannot be removed.
    """
    repository = version.parent.parent
    with in_use(version) as used:
        if used:
            return False
        # As for drafts: Triton takes every folder inside the repository for a model.
        trash = Path(tempfile.mkdtemp(dir=repository.parent, prefix=f".{repository.name}.draft-"))
        version.rename(trash / "version")
    shutil.rmtree(trash, ignore_errors=True)  # the next export removes leftovers
    return True
