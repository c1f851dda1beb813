"""The private folder: a model repository with signed bundles only.

Triton runs the code that it finds in a repository: model.py, a Python package or a backend beside it, anything that
config.pbtxt names. If others can write to the repository, Triton gets a private folder instead. Only the expected
files are copied to it, and each is compared with its digest while it is copied. So the bytes that are served are the
bytes that were checked.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

from serving.arguments import check_arguments
from serving.bundle.load import check_sha256, digest_of, newest, read_checked, versions
from serving.bundle.manifest import MANIFEST, MODEL, FileDigest, Manifest
from serving.bundle.parse import parse_manifest
from serving.bundle.signature import TRUSTED_KEYS, TrustedKeys, signature_of
from serving.errors import BundleError, ConfigurationError, TritonserverFailed
from serving.files import Strict, locked_file, make_content, open_file, read_file, temporary_folder
from serving.model.config_file import CONFIG, Pins, model_config, model_py, read_config, settings_of
from serving.model.settings import ServingSettings
from serving.requests.captured import MOST_WARM_UP_BYTES, WARM_UP

_PREFIX = "tbe-serve-private-"
_BLOCK_BYTES = 1 << 20
# linux/fs.h: share another file's blocks until one of the two is written to.
_FICLONE = 0x40049409


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    """Which signatures are trusted, and how signed bundles are served.

    Attributes:
        keys: a PEM file of Ed25519 public keys. One of them must have signed each bundle that is served.
        folder: where the private folder is made. None stands for the folder for temporary files. If the folder is on
            the repository's file system, copies of weights files share its blocks where supported (XFS, Btrfs).
        weights_in_place: whether weights files stay in the repository after they were compared with their digests.
            Every user who can write to them later is trusted then.
        min_versions: the oldest version to serve, by model. "*" stands for models without an entry.
    """

    keys: Path
    folder: Path | None = None
    weights_in_place: bool = False
    min_versions: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_arguments(self)


class PrivateFolder(Strict, frozen=True):
    """A private folder, and what is needed to copy more versions into it.

    Attributes:
        path: the folder.
        source: the repository that bundles are copied from.
        keys, weights_in_place, min_versions: as in `Trust`.
    """

    path: str
    source: str
    keys: str
    weights_in_place: bool
    min_versions: dict[str, int]

    @property
    def repository(self) -> Path:
        """The model repository in the folder, which Triton serves."""
        return Path(self.path) / "repository"

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the server's processes: the keys, and PYTHONPATH without folders of the source repository."""
        source = Path(self.source).resolve()
        searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        folders = [folder for folder in searched if folder and not Path(folder).resolve().is_relative_to(source)]
        return {TRUSTED_KEYS: self.keys, "PYTHONPATH": os.pathsep.join(folders)}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from copying a version and loading it at the same time.

        Raises:
            TritonserverFailed: the folder is gone: its server has ended.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(locked_file(Path(self.path) / "lock"))
            except OSError as error:
                raise TritonserverFailed(f"{self.path}: {error.strerror}: its server has ended") from error
            yield

    def bring(self, model: str, version: int | None, serving: Iterable[int]) -> None:
        """Copy a version and its model's settings into the folder, if a trusted key signed both.

        Args:
            model: the name of the model.
            version: the version. None stands for the version that the settings name, or else the newest.
            serving: versions to keep in the folder. Other copied versions are removed.

        Raises:
            BundleError: the version is missing, changed, too old, or not signed as that version of that model.
            ConfigurationError: the keys or the settings cannot be read, or the folder cannot be written to.
        """
        source, target = Path(self.source) / model, self.repository / model
        trusted = TrustedKeys.read(Path(self.keys))
        settings = settings_of(read_config(source, trusted))
        chosen = version or settings.version or newest(source)
        self._check_floor(source, model, chosen)
        text = trusted.read_version(source / str(chosen) / MANIFEST)
        manifest = parse_manifest(source / str(chosen) / MANIFEST, text)
        try:
            target.mkdir(exist_ok=True)
            for old in {*versions(target)} - {chosen, settings.version, *serving}:
                shutil.rmtree(target / str(old), ignore_errors=True)  # first: the new version needs the disk space
            self._bring_version(source / str(chosen), target / str(chosen), manifest, text)
            self._bring_settings(source, target, manifest, settings, trusted)
        except OSError as error:
            raise ConfigurationError(
                f"{target}: cannot be written: {error.strerror}: name a folder with more room, --private-folder, or "
                "leave weights where they are, --trusted-weights in-place"
            ) from error

    def _check_floor(self, source: Path, model: str, version: int) -> None:
        floor = self.min_versions.get(model, self.min_versions.get("*", 0))
        if version < floor:
            raise BundleError(f"{source}: expected version {floor} or newer, as --min-version says, got {version}")

    def _bring_version(self, source: Path, target: Path, manifest: Manifest, text: bytes) -> None:
        if target.exists():
            if (target / MANIFEST).read_bytes() != text:
                raise BundleError(f"{source}: is not what is served as that version: publish it as another")
            return
        with tempfile.TemporaryDirectory(dir=self.path) as draft:
            version = Path(draft) / "version"
            version.mkdir()
            (version / MODEL).write_bytes(_model_py(source, manifest))
            for name in manifest.files.keys() - manifest.mapped_files - {MODEL}:
                (version / name).write_bytes(read_checked(source / name, manifest.files[name]))
            for name in manifest.mapped_files:
                _take_weights(source / name, version / name, manifest.files[name], in_place=self.weights_in_place)
            (version / MANIFEST).write_bytes(text)
            signature = signature_of(source / MANIFEST)
            (version / signature.name).write_bytes(read_file(signature))
            version.rename(target)

    def _bring_settings(
        self, source: Path, target: Path, manifest: Manifest, settings: ServingSettings, trusted: TrustedKeys
    ) -> None:
        # Unchanged files are not written: Triton reloads a model if one of its files was written.
        make_content(target / CONFIG, model_config(target.name, manifest, settings).encode())
        if not os.path.lexists(source / WARM_UP):
            (target / WARM_UP).unlink(missing_ok=True)
            return
        make_content(
            target / WARM_UP, trusted.read_signed(source / WARM_UP, target.name, most_bytes=MOST_WARM_UP_BYTES)
        )


@contextmanager
def private_folder(
    repository: Path, models: Collection[str], trust: Trust, pins: Pins | None = None
) -> Iterator[PrivateFolder]:
    """A private folder with the versions of `models` that are pinned, or that their settings name.

    It is removed when the block ends.

    Raises:
        BundleError: as `PrivateFolder.bring`.
        ConfigurationError: as `PrivateFolder.bring`; or the folder cannot be made, or would be inside the repository;
            or `trust.min_versions` names a model that is not served.
    """
    if unknown := trust.min_versions.keys() - {"*", *models}:
        raise ConfigurationError(
            f"--min-version {min(unknown)}: expected one of the models that are served, {', '.join(sorted(models))}"
        )
    parent = (trust.folder or Path(tempfile.gettempdir())).absolute()
    if parent.resolve().is_relative_to(repository.resolve()):
        raise ConfigurationError(f"--private-folder {parent}: expected a folder outside the repository {repository}")
    with ExitStack() as stack:
        try:
            path = stack.enter_context(temporary_folder(parent, _PREFIX))
            (path / "repository").mkdir()
        except OSError as error:
            raise ConfigurationError(
                f"{parent}: cannot hold a private folder: {error.strerror}: name another, --private-folder"
            ) from error
        folder = PrivateFolder(
            path=str(path),
            source=str(repository.absolute()),
            keys=str(trust.keys.absolute()),
            weights_in_place=trust.weights_in_place,
            min_versions=dict(trust.min_versions),
        )
        pins = pins or {}
        for model in models:
            for version in pins.get(model, (None,)):
                folder.bring(model, version, serving=pins.get(model, ()))
        yield folder


def _model_py(source: Path, manifest: Manifest) -> bytes:
    """Our own model.py, which is the one that the manifest expects. Signatures are trusted for data, not for code."""
    text = model_py().encode()
    if digest_of(text) != manifest.files[MODEL]:
        raise BundleError(
            f"{source / MODEL}: expected the {MODEL} of this tbe-serving, got another, signed: export it again"
        )
    return text


def _take_weights(source: Path, target: Path, expected: FileDigest, *, in_place: bool) -> None:
    try:
        file = open_file(source)
    except OSError as error:
        raise BundleError(f"{source}: cannot be read: {error.strerror}: publish the bundle again") from error
    with file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.size_bytes:
            raise BundleError(f"{source}: expected {expected.size_bytes} bytes, got {size}: publish the bundle again")
        if in_place:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            target.symlink_to(source.resolve())
        else:
            digest = _copy(file, target, size)
    check_sha256(source, digest, expected)


def _copy(source: BufferedReader, target: Path, size_bytes: int) -> str:
    """Copy a file, sharing its blocks if the file system can. Returns the SHA-256 of the copy."""
    with target.open("xb+") as file:
        try:
            fcntl.ioctl(file, _FICLONE, source.fileno())
        except OSError:  # it is on another file system, or on one without shared blocks
            sha256 = hashlib.sha256()
            while size_bytes and (block := source.read(min(size_bytes, _BLOCK_BYTES))):
                file.write(block)
                sha256.update(block)
                size_bytes -= len(block)
            return sha256.hexdigest()
        return hashlib.file_digest(file, "sha256").hexdigest()
