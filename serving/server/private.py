"""The folder that a server serves where keys are trusted: ours alone, and nothing in it but what they signed.

Triton runs what it finds: a version's model.py, a Python package or a backend beside it, whatever config.pbtxt
names. So where others may write into the repository, Triton is given a folder of ours instead. It is filled with the
files that are expected and no others, each compared as it is copied: what is checked is what is served.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

from serving.atomic import replacing
from serving.bundle import MANIFEST, MODEL, PROGRAM, Manifest, newest, parse_manifest, versions
from serving.capture import MOST_WARM_UP_BYTES, WARM_UP
from serving.config_file import CONFIG, read_config, settings_of
from serving.digests import FileDigest, check_sha256, digest_of, read_checked
from serving.errors import BundleError, ServerFailed
from serving.files import open_file, read_file
from serving.settings import ServingSettings
from serving.signature import TRUSTED_KEYS, TrustedKeys, signature_of
from serving.strict import Strict
from serving.template import model_config, model_py
from serving.temporary import temporary_folder

_PREFIX = "tbe-serve-private-"
_BLOCK_BYTES = 1 << 20
# linux/fs.h: share another file's blocks until one of the two is written to.
_FICLONE = 0x40049409


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    """What a server serves where not everybody may decide it.

    Attributes:
        keys: a PEM file of Ed25519 public keys, one of which must have signed what is served.
        folder: where the private folder is made; the folder for temporary files where None. Copies of weights share
            the repository's blocks if this is on the same file system and that can (XFS, Btrfs).
        weights_in_place: leave weights where they are once they were compared with their digests.
        min_versions: the oldest version to serve, by model; "" for models that are not named.
    """

    keys: Path
    folder: Path | None = None
    weights_in_place: bool = False
    min_versions: Mapping[str, int] = field(default_factory=dict)


class PrivateFolder(Strict, frozen=True):
    """A private folder, and all that is needed to bring another version into it.

    Attributes:
        path: the folder; `repository` in it is what Triton is given.
        source: the repository that it is filled from.
        keys, weights_in_place, min_versions: as in `Trust`.
    """

    path: str
    source: str
    keys: str
    weights_in_place: bool
    min_versions: dict[str, int]

    @property
    def repository(self) -> Path:
        """What Triton is given."""
        return Path(self.path) / "repository"

    @property
    def environment(self) -> dict[str, str]:
        """What the server's processes need: the keys; and nothing of the source is to be imported."""
        source = Path(self.source).resolve()
        searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        kept = [each for each in searched if each and not Path(each).resolve().is_relative_to(source)]
        return {TRUSTED_KEYS: self.keys, "PYTHONPATH": os.pathsep.join(kept)}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One at a time brings a version in and has it served.

        Raises:
            ServerFailed: the folder is gone, and so is its server.
        """
        try:
            file = (Path(self.path) / "lock").open("ab")
        except OSError as error:
            raise ServerFailed(f"{self.path}: {error.strerror}: its server has ended") from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def bring(self, model: str, version: int | None = None, serving: Iterable[int] = ()) -> None:
        """Copy a version into the folder, with its model's settings, if a trusted key signed both.

        Args:
            model: its name.
            version: the one that the settings say where None: the newest, unless they name one.
            serving: versions that stay; others, which were brought in before, are removed.

        Raises:
            BundleError: the version is missing, changed, too old, or not signed as that version of that model.
            ConfigurationError: the keys or the settings cannot be read.
            ServerFailed: the folder cannot be written to.
        """
        source, target = Path(self.source) / model, self.repository / model
        trusted = TrustedKeys.read(Path(self.keys))
        settings = settings_of(read_config(source, trusted))
        chosen = version or settings.version or newest(source)
        self._check_floor(source, model, chosen)
        text = trusted.read_signed(source / str(chosen) / MANIFEST, model, str(chosen))
        manifest = parse_manifest(source / str(chosen) / MANIFEST, text)
        try:
            target.mkdir(exist_ok=True)
            self._bring_version(source / str(chosen), target / str(chosen), manifest, text)
            self._bring_settings(source, target, manifest, settings, trusted)
        except OSError as error:
            raise ServerFailed(
                f"{target}: cannot be written: {error.strerror}: name a folder with more room, --private-folder, or "
                "leave weights where they are, --trusted-weights in-place"
            ) from error
        for old in {*versions(target)} - {chosen, settings.version, *serving}:
            shutil.rmtree(target / str(old), ignore_errors=True)

    def _check_floor(self, source: Path, model: str, version: int) -> None:
        floor = self.min_versions.get(model, self.min_versions.get("", 0))
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
            (version / PROGRAM).write_bytes(read_checked(source / PROGRAM, manifest.files[PROGRAM]))
            for name in manifest.weights:
                _take_weights(source / name, version / name, manifest.files[name], in_place=self.weights_in_place)
            (version / MANIFEST).write_bytes(text)
            signature = signature_of(source / MANIFEST)
            (version / signature.name).write_bytes(read_file(signature))
            version.rename(target)

    def _bring_settings(
        self, source: Path, target: Path, manifest: Manifest, settings: ServingSettings, trusted: TrustedKeys
    ) -> None:
        _replace(target / CONFIG, model_config(target.name, manifest, settings).encode())
        if not os.path.lexists(source / WARM_UP):
            (target / WARM_UP).unlink(missing_ok=True)
            return
        _replace(target / WARM_UP, trusted.read_signed(source / WARM_UP, target.name, most_bytes=MOST_WARM_UP_BYTES))


@contextmanager
def private_folder(repository: Path, models: Iterable[str], trust: Trust) -> Iterator[PrivateFolder]:
    """A private folder with the versions of `models` that their settings say; gone afterwards.

    Raises:
        BundleError, ConfigurationError: as `PrivateFolder.bring`.
        ServerFailed: it cannot be made, or would lie in the repository.
    """
    parent = (trust.folder or Path(tempfile.gettempdir())).absolute()
    if parent.resolve().is_relative_to(repository.resolve()):
        raise ServerFailed(f"--private-folder {parent}: expected a folder outside the repository {repository}")
    with ExitStack() as stack:
        try:
            path = stack.enter_context(temporary_folder(parent, _PREFIX))
            (path / "repository").mkdir()
        except OSError as error:
            raise ServerFailed(
                f"{parent}: cannot hold a private folder: {error.strerror}: name another, --private-folder"
            ) from error
        folder = PrivateFolder(
            path=str(path),
            source=str(repository.absolute()),
            keys=str(trust.keys.absolute()),
            weights_in_place=trust.weights_in_place,
            min_versions=dict(trust.min_versions),
        )
        for model in models:
            folder.bring(model)
        yield folder


def _replace(path: Path, content: bytes) -> None:
    """Write a file that is to hold `content`, unless it does: Triton loads a model anew whose files were written."""
    if not path.exists() or path.read_bytes() != content:
        with replacing(path) as file:
            file.write(content)


def _model_py(source: Path, manifest: Manifest) -> bytes:
    """Our own, whatever lies there: a key that signs numbers signs no Python."""
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
            found = hashlib.file_digest(file, "sha256").hexdigest()
            target.symlink_to(source.resolve())
        else:
            found = _copy(file, target, size)
    check_sha256(source, found, expected)


def _copy(source: BufferedReader, target: Path, size_bytes: int) -> str:
    """Copy a file, without reading it where the file system can share its blocks; the SHA-256 of the copy."""
    with target.open("xb+") as file:
        try:
            fcntl.ioctl(file, _FICLONE, source.fileno())
        except OSError:  # another file system, or one that cannot
            sha256 = hashlib.sha256()
            while size_bytes and (block := source.read(min(size_bytes, _BLOCK_BYTES))):
                file.write(block)
                sha256.update(block)
                size_bytes -= len(block)
            return sha256.hexdigest()
        return hashlib.file_digest(file, "sha256").hexdigest()
