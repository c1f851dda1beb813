"""Write a version beside the repository, then rename it into place: whole or not at all.

Triton takes every folder of a repository for a model, hidden ones too, so a draft must lie outside: beside
the repository, on the same file system. A draft is locked while its export lives; whoever exports next
removes the ones that a killed export left.
"""

import errno
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from export.errors import PublishError
from export.model_config import check_model
from serving.bundle import MANIFEST, Manifest, versions
from serving.config_file import CONFIG
from serving.settings import ServingSettings
from serving.signature import sign
from serving.template import model_config
from serving.temporary import temporary_folder

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
# Triton's versions are int64.
_MOST_VERSION = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Draft:
    """A version being written. `path` is where its files go."""

    repository: Path
    name: str
    version: int | None
    manifest: Manifest
    settings: ServingSettings | None
    signing_key: Ed25519PrivateKey | None
    root: Path

    @property
    def path(self) -> Path:
        """The folder that becomes the version."""
        return self.root / "version"

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Push what is already written to the disk while something else is done."""
        with ThreadPoolExecutor(1) as pool:
            synced = pool.submit(_sync, self.path)
            yield
            synced.result()

    def publish(self) -> Path:
        """Rename the draft to its version; to the next free one where none was asked for.

        Returns:
            The bundle's path.

        Raises:
            PublishError: the version exists, or the model's other versions have another contract.
        """
        model = self.repository / self.name
        if not model.exists() and (published := self._publish_model(model)):
            return published
        check_model(model, self.manifest, self.settings)
        _sync(self.path)
        while True:
            version = self.version or _next_version(model)
            bundle = model / str(version)
            self._sign(self.path, version)
            if _rename(self.path, bundle):
                _sync_folder(model)
                return bundle
            if self.version is not None:
                raise PublishError(f"{bundle}: exists; published versions are never changed: pick another version")

    def _publish_model(self, model: Path) -> Path | None:
        """Rename a whole new model into place; None where somebody else just did."""
        draft = self.root / "model"
        version = self.version or 1
        draft.mkdir()
        settings = self.settings or ServingSettings()
        config = model_config(self.name, self.manifest, settings).encode()
        (draft / CONFIG).write_bytes(config)
        if self.signing_key is not None:
            sign(draft / CONFIG, config, self.signing_key, self.name)
        self.path.rename(draft / str(version))
        self._sign(draft / str(version), version)
        _sync(draft)
        if not _rename(draft, model):
            (draft / str(version)).rename(self.path)
            return None
        _sync_folder(self.repository)
        return model / str(version)

    def _sign(self, path: Path, version: int) -> None:
        """Sign what would be this version: a signature is of one version, and its number is known only now."""
        if self.signing_key is not None:
            sign(path / MANIFEST, (path / MANIFEST).read_bytes(), self.signing_key, self.name, version)
            _sync_folder(path)


@contextmanager
def draft(
    repository: Path,
    name: str,
    version: int | None,
    manifest: Manifest,
    settings: ServingSettings | None,
    signing_key: Ed25519PrivateKey | None = None,
) -> Iterator[Draft]:
    """A folder for the files of a new version, gone afterwards unless it was published.

    Args:
        repository: the model repository; made if it is missing.
        name: the model's name.
        version: the version's number, or None for the next free one.
        manifest: what the version will hold; its parity and files do not matter.
        settings: how the model is to be served; as it is, or by default, where None.
        signing_key: signs the version, and the settings of a new model; nothing is signed where None.

    Raises:
        PublishError: the name or version cannot be used, the version exists, the model's other versions have
            another contract or settings, no draft can be made beside the repository on its file system, or the
            disk is full.
    """
    if not _NAME.fullmatch(name):
        raise PublishError(
            f"name: expected at most 128 letters, digits, '_', '-' and '.', not '-' or '.' first, got {name!r}"
        )
    if version is not None and not 1 <= version <= _MOST_VERSION:
        raise PublishError(f"version: expected 1 to {_MOST_VERSION}, got {version}")
    repository = repository.absolute()
    if version is not None and (bundle := repository / name / str(version)).exists():
        raise PublishError(f"{bundle}: exists; published versions are never changed: pick another version")
    if (model := repository / name).exists():
        check_model(model, manifest, settings)
    with ExitStack() as stack:
        try:
            repository.mkdir(parents=True, exist_ok=True)
            root = stack.enter_context(temporary_folder(repository.parent, f".{repository.name}.draft-"))
        except OSError as error:
            raise PublishError(f"{repository}: cannot write in it and beside it: {error.strerror}") from error
        if root.stat().st_dev != repository.stat().st_dev:
            raise PublishError(
                f"{repository}: is the root of a file system, so that nothing beside it can be renamed into it: "
                "make the repository a folder of it"
            )
        try:
            new = Draft(repository, name, version, manifest, settings, signing_key, root)
            new.path.mkdir()
            yield new
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise PublishError(
                f"{root}: the draft cannot be written: {error.strerror}: make room beside the repository"
            ) from error


def _next_version(model: Path) -> int:
    return max(versions(model), default=0) + 1


def _rename(source: Path, target: Path) -> bool:
    """Rename a folder; False where the target is taken."""
    try:
        source.rename(target)
    except (FileExistsError, NotADirectoryError):
        return False
    except OSError as error:
        if target.exists():  # ENOTEMPTY has no exception of its own
            return False
        raise PublishError(f"{target}: cannot be published: {error.strerror}") from error
    return True


def _sync(root: Path) -> None:
    """Push every file and folder under `root` to the disk, so that a rename never outlives its contents."""
    for folder, _, names in os.walk(root):
        for name in names:
            with (Path(folder) / name).open("rb") as file:
                os.fsync(file.fileno())
        _sync_folder(Path(folder))


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
