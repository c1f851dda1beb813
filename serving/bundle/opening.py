"""Open a bundle: read its manifest, and check its files."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from serving.bundle.digests import check_digest, check_size
from serving.bundle.manifest import MANIFEST, Manifest
from serving.bundle.parse import parse_manifest
from serving.errors import BundleError, ConfigurationError
from serving.files.reading import read_file

if TYPE_CHECKING:  # a client need not have cryptography
    from serving.bundle.signature import TrustedKeys


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk. Its manifest was read and checked.

    Attributes:
        path: <model>/<version>.
        digest: SHA-256, in hex, of its manifest.json.
    """

    path: Path
    manifest: Manifest
    digest: str


def versions(model: Path) -> list[int]:
    """The versions of a model, oldest first; none where there is no model.

    Args:
        model: its folder, <repository>/<name>.
    """
    return sorted(int(entry.name) for entry in model.glob("[0-9]*") if entry.name.isdecimal())


def newest(model: Path) -> int:
    """The newest version of a model.

    Args:
        model: its folder, <repository>/<name>.

    Raises:
        BundleError: it has no version.
    """
    found = versions(model)
    if not found:
        raise BundleError(f"{model}: expected versions made by tbe-export, found none")
    return found[-1]


def check_published(model: Path, wanted: Iterable[int]) -> None:
    """Refuse versions that are not published.

    Args:
        model: the model's folder, <repository>/<name>.
        wanted: its versions.

    Raises:
        ConfigurationError: naming the version that is missing, and those that are there.
    """
    there = [version for version in reversed(versions(model)) if (model / str(version) / MANIFEST).exists()]
    if missing := sorted({*wanted} - {*there}):
        raise ConfigurationError(f"{model}: expected one of versions {there}, got {missing[0]}")


def open_bundle(path: Path, trusted: "TrustedKeys | None" = None) -> Bundle:
    """Read the manifest of a bundle, and check its files without reading the weights.

    Every file must be there with its size. All files but the weights and the maps of ids must have their digests. The
    time taken does not depend on the size of the tables. `verify_digests` reads all files.

    Args:
        path: the bundle, <model>/<version>.
        trusted: one of these keys must have signed the bundle as that version of that model. None: anybody may have
            made it.

    Raises:
        BundleError: naming the file or key that is missing, unknown, inconsistent or too new.
    """
    file = path / MANIFEST
    text = _read_anybodys(file) if trusted is None else trusted.read_version(file)
    manifest = parse_manifest(file, text)
    for name, digest in manifest.files.items():
        is_mapped = name in manifest.mapped_files
        check_size(path / name, digest, follow=is_mapped)
        if not is_mapped:
            check_digest(path / name, digest)
    return Bundle(path, manifest, hashlib.sha256(text).hexdigest())


def _read_anybodys(manifest: Path) -> bytes:
    try:
        return read_file(manifest)
    except OSError as error:
        raise BundleError(f"{manifest}: cannot be read: {error.strerror}: is {manifest.parent} a bundle?") from error


def verify_digests(bundle: Bundle, *, but: Collection[str] = ()) -> None:
    """Read every file of `bundle`, but for those called `but`, and compare its SHA-256.

    Raises:
        BundleError: naming the first file that differs.
    """
    for name, digest in bundle.manifest.files.items():
        if name not in but:
            check_digest(bundle.path / name, digest, follow=name in bundle.manifest.mapped_files)


def weights_changed_since(bundle: Bundle, moment: float) -> bool:
    """Whether a file of weights, or the maps of ids, were changed, moved or replaced at `moment` or later.

    Args:
        bundle: an open bundle.
        moment: seconds of Unix time, compared with the files' ctime.
    """
    return any((bundle.path / name).stat().st_ctime >= moment for name in bundle.manifest.mapped_files)
