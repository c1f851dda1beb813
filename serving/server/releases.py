"""The releases of the models of a repository, as they are read again and again."""

import time
from collections.abc import Iterable
from pathlib import Path

from serving.bundle.release import Release, read_release, release_of
from serving.bundle.signature import TrustedKeys
from serving.errors import BundleError
from serving.server.models import Pins

# A release and its signature are two files. One that is refused may be being written: it is read again after this.
_SETTLED_S = 1.0


class ReleaseFile:
    """The release of one model. An older one than was read before is refused.

    Args:
        model: its folder in the repository, which is not the private folder.
        keys: a PEM file with keys, of which one must have signed the release. None: nobody need have.

    Attributes:
        model: the model's name.
        newest: the newest release that was read; None while there was none.
    """

    def __init__(self, model: Path, keys: Path | None) -> None:
        self.model = model.name
        self.newest: Release | None = None
        self._folder, self._keys = model, keys

    def read(self) -> None:
        """Read the file, and set `newest`.

        Raises:
            BundleError: it cannot be read, is gone, is not signed, or is older than one that was read before.
            ConfigurationError: the keys cannot be read.
        """
        try:
            self._read()
        except BundleError:
            time.sleep(_SETTLED_S)
            self._read()

    def _read(self) -> None:
        trusted = None if self._keys is None else TrustedKeys.read(self._keys)
        found, before = read_release(self._folder, trusted), self.newest
        if before is not None and found != before:
            path = release_of(self._folder)
            if found is None:
                raise BundleError(f"{path}: is gone: release again, `tbe-export release`")
            if found.sequence <= before.sequence:
                raise BundleError(
                    f"{path}: expected a sequence above {before.sequence}, got {found.sequence}: it is older than "
                    "the present one, somebody put it back: release again, `tbe-export release`"
                )
        self.newest = found


def read_releases(repository: Path, models: Iterable[str], keys: Path | None) -> tuple[ReleaseFile, ...]:
    """The releases of `models`.

    Raises:
        BundleError: one cannot be read, or is not signed.
        ConfigurationError: the keys cannot be read.
    """
    files = tuple(ReleaseFile(repository.absolute() / model, keys) for model in models)
    for file in files:
        file.read()
    return files


def released_versions(files: Iterable[ReleaseFile]) -> Pins:
    """The versions that releases say, by model."""
    return {file.model: file.newest.versions for file in files if file.newest is not None}
