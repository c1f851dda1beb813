"""Write a version beside the repository, then rename it into place, so that it is published atomically.

Triton takes every folder of a repository for a model, even a hidden one. So a draft is written beside the repository,
on the same file system. It is locked while its export runs. The next export removes the drafts of killed exports.
"""

import errno
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from export.errors import PublishError
from serving.bundle.load import versions
from serving.bundle.manifest import MANIFEST, Manifest
from serving.bundle.plan import MOST_VERSION, is_model_name
from serving.bundle.signature import sign
from serving.errors import ConfigurationError
from serving.files import is_url, leave_out_of_cache, sync_folder, sync_tree, temporary_folder
from serving.model.config_file import CONFIG, model_config, parameters_of, read_config, settings_of
from serving.model.settings import ServingSettings
from serving.tables.pages import HUGE_PAGE

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Draft:
    """A version that is being written.

    Attributes:
        repository: the model repository.
        name: the model's name.
        version: the version's number. None: the next free one.
        manifest: the version's manifest. Its parity and files are not used.
        settings: how to serve the model. None: the model's settings, or the defaults for a new model.
        signing_key: signs the version and the settings of a new model. None: nothing is signed.
        root: the temporary folder.
    """

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
        """Sync the files written so far to the disk while the block runs."""
        with ThreadPoolExecutor(1) as pool:
            synced = pool.submit(sync_tree, self.path)
            yield
            synced.result()

    def publish(self) -> Path:
        """Rename the draft to its version.

        Returns:
            The bundle's path.

        Raises:
            PublishError: the version exists, or the model's other versions have another schema.
        """
        model = self.repository / self.name
        if not model.exists() and (published := self._publish_model(model)):
            return published
        check_compatible(model, self.manifest, self.settings)
        sync_tree(self.path)
        leave_out_of_cache(self.path, HUGE_PAGE)
        while True:
            version = self.version or next_version(model)
            bundle = model / str(version)
            self._sign(self.path, version)
            if _rename(self.path, bundle):
                sync_folder(model)
                return bundle
            if self.version is not None:
                raise PublishError(_exists(bundle))

    def _publish_model(self, model: Path) -> Path | None:
        """Rename a new model with this version into place. Returns None if the model appeared meanwhile."""
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
        sync_tree(draft)
        leave_out_of_cache(draft / str(version), HUGE_PAGE)
        if not _rename(draft, model):
            (draft / str(version)).rename(self.path)
            return None
        sync_folder(self.repository)
        return model / str(version)

    def _sign(self, path: Path, version: int) -> None:
        """Sign the draft as `version`, which its signature names. The number is known only when it is published."""
        if self.signing_key is not None:
            sign(path / MANIFEST, (path / MANIFEST).read_bytes(), self.signing_key, self.name, version)
            sync_folder(path)


@contextmanager
def draft(
    repository: Path,
    name: str,
    version: int | None,
    manifest: Manifest,
    settings: ServingSettings | None,
    signing_key: Ed25519PrivateKey | None = None,
) -> Iterator[Draft]:
    """Make a folder for the files of a new version. It is removed when the block ends, unless it was published.

    The repository is made if it is missing. Arguments are the attributes of Draft.

    Raises:
        ConfigurationError: the name or version cannot be used.
        PublishError: the version exists; the model's other versions have another schema or settings; no draft can
            be made beside the repository; or the disk is full.
    """
    if is_url(repository):
        raise ConfigurationError(
            f"{repository}: expected a folder, got a URL: `with export.staged(URL, {name!r}) as …`"
        )
    repository = repository.absolute()
    _check_target(repository, name, version)
    if (model := repository / name).exists():
        check_compatible(model, manifest, settings)
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


def _check_target(repository: Path, name: str, version: int | None) -> None:
    """Refuse a name or version that cannot be published, or already exists."""
    if not is_model_name(name):
        raise ConfigurationError(
            f"name: expected at most 128 letters, digits, '_', '-' and '.', not '-' or '.' first, got {name!r}"
        )
    if version is not None and not 1 <= version <= MOST_VERSION:
        raise ConfigurationError(f"version: expected 1 to {MOST_VERSION}, got {version}")
    if version is not None and (bundle := repository / name / str(version)).exists():
        raise PublishError(_exists(bundle))


def _exists(bundle: Path) -> str:
    return f"{bundle}: exists; published versions are never changed: pick another version"


def next_version(model: Path) -> int:
    """The number of a model's next version: one more than the newest, or 1.

    Args:
        model: the model's folder, <repository>/<name>.
    """
    return max(versions(model), default=0) + 1


def _rename(source: Path, target: Path) -> bool:
    """Rename a folder. Returns False if the target exists."""
    try:
        source.rename(target)
    except (FileExistsError, NotADirectoryError):
        return False
    except OSError as error:
        if target.exists():  # ENOTEMPTY has no subclass of OSError
            return False
        raise PublishError(f"{target}: cannot be published: {error.strerror}") from error
    return True


def check_compatible(model: Path, manifest: Manifest, settings: ServingSettings | None) -> None:
    """Refuse a new version whose schema or settings differ from those of the published versions.

    Args:
        model: the published model's folder.
        manifest: the new version's manifest.
        settings: how to serve the new version. None: the model's settings.

    Raises:
        PublishError: features, dims, weights, dtypes of ids or output, or settings differ.
        ConfigurationError: the model's config.pbtxt cannot be read.
    """
    config = read_config(model)
    served = settings_of(config)
    parameters = parameters_of(config)
    if parameters.get("schema_digest") != manifest.schema_digest:
        features = ",".join(feature.name for feature in manifest.features)
        raise PublishError(
            f"{model / CONFIG}: expected the schema of the versions already there (features "
            f"{parameters.get('features')}, dims {parameters.get('dims')}), "
            f"got features {features}, dims {','.join(str(t.dim) for t in manifest.feature_tables)}, "
            f"{manifest.id_dtype.value} ids, {manifest.output_dtype.value} out, "
            f"{'weighted' if manifest.weighted else 'unweighted'}: "
            "clients would break; publish under another name"
        )
    if settings is not None and settings != served:
        new, old = asdict(settings), asdict(served)
        differ = ", ".join(f"{name} {old[name]}, not {new[name]}" for name in old if old[name] != new[name])
        raise PublishError(
            f"{model / CONFIG}: expected the settings that the model is served with: {differ}: "
            f"publish without settings, then `tbe-serve configure {model}`"
        )
