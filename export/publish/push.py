"""Publish in an object store: the versions of a local repository, or the result of an export.

`manifest.sha256` is written first, and only if it does not exist. It reserves the version's number for one manifest:
of two publishers only one gets the number, and an interrupted push can be resumed. manifest.json is written last, and
publishes the version.
"""

import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from export.errors import PublishError
from export.publish.draft import check_compatible
from serving.bundle.load import Bundle, open_bundle, verify_digests, versions
from serving.bundle.manifest import MANIFEST
from serving.bundle.parse import parse_manifest
from serving.bundle.plan import is_host_model
from serving.bundle.release import read_release
from serving.bundle.signature import signature_of
from serving.errors import BundleError, ConfigurationError
from serving.files import is_url, read_file
from serving.model.config_file import CONFIG, read_config
from serving.store import SETTINGS, TAKEN, Progress, Store, release_names, versions_in


def push(
    model: Path,
    store: Store,
    *,
    settings: bool = False,
    exclude: Collection[Path] = (),
    progress: Progress = lambda *_: None,
) -> Iterator[str]:
    """Publish the settings, versions and releases of a model and of its hosts' models that a store lacks.

    Hosts are published before their router, and releases last. A release replaces an older one in the store.

    Args:
        model: its folder, <repository>/<name>.
        store: the repository to publish in, under the same name and numbers.
        settings: whether settings in the store are replaced.
        exclude: paths of versions that are not pushed.
        progress: called as files are written.

    Yields:
        The URL of each version, replaced settings file and release, after it was written.

    Raises:
        ConfigurationError: there is no such model.
        BundleError: a version cannot be read, or is damaged.
        PublishError: a number is taken by another bundle; or the store's versions have another schema.
        ServerUnavailable: the store cannot be reached, or refuses writes.
    """
    model = Path(os.path.abspath(model))
    read_config(model)
    hosts = sorted(folder for folder in model.parent.iterdir() if is_host_model(folder.name, model.name))
    for folder in (*hosts, model):
        bundles = [open_bundle(path) for number in versions(folder) if (path := folder / str(number)) not in exclude]
        if has_model := store.read(f"{folder.name}/{CONFIG}") is not None:
            with tempfile.TemporaryDirectory(prefix="tbe-store-") as temporary:
                store.pull_settings(folder.name, Path(temporary))
                for bundle in bundles:
                    check_compatible(Path(temporary) / folder.name, bundle.manifest, None)
        # Readers read a signature after its file, so it is written first.
        settings_files = [file for file in reversed(SETTINGS) if (folder / file).exists()]
        for file in () if has_model else settings_files:
            store.create(f"{folder.name}/{file}", read_file(folder / file))
        for bundle in bundles:
            if _push_version(bundle, store, progress):
                yield f"{store.url}/{folder.name}/{bundle.path.name}"
        for file in settings_files if settings else ():
            if _update(store, f"{folder.name}/{file}", folder / file):
                yield f"{store.url}/{folder.name}/{file}"
    for folder in (*hosts, model):
        local, stored = read_release(folder), None
        with suppress(BundleError):  # what cannot be read is replaced
            stored = store.release(folder.name)
        if local is not None and (stored is None or local.sequence > stored.sequence):
            for file in reversed(release_names(folder.name)):
                _update(store, file, model.parent / file)
            yield f"{store.url}/{release_names(folder.name)[0]}"


def _push_version(bundle: Bundle, store: Store, progress: Progress) -> bool:
    """Publish a version, or resume an interrupted push. Returns False if the version was published before."""
    name = f"{bundle.path.parent.name}/{bundle.path.name}"
    url, digest = f"{store.url}/{name}", bundle.digest.encode()
    if store.create(f"{name}/{TAKEN}", digest) != digest:
        raise PublishError(
            f"{url}: is taken by another bundle, published or on its way: versions are never changed: pick another"
        )
    if store.size(f"{name}/{MANIFEST}") is not None:
        return False
    verify_digests(bundle)
    for file, expected in bundle.manifest.files.items():
        progress(file, 0, expected.size_bytes)
        if store.size(f"{name}/{file}") != expected.size_bytes:
            store.write(f"{name}/{file}", bundle.path / file)
        progress(file, expected.size_bytes, expected.size_bytes)
    signature = signature_of(bundle.path / MANIFEST)
    _update(store, f"{name}/{signature.name}", signature)
    store.write(f"{name}/{MANIFEST}", read_file(bundle.path / MANIFEST))
    return True


def check_stored(store: Store, version: Path) -> None:
    """Check a version in a store: its manifest, and every file by its size and digest.

    Args:
        store: its repository.
        version: its folder in a staged repository, see `staged`.

    Raises:
        BundleError: it is damaged.
        ServerUnavailable: the store cannot be reached, or refuses reads.
    """
    name = f"{version.parent.name}/{version.name}"
    manifest = parse_manifest(version / MANIFEST, store.read(f"{name}/{MANIFEST}") or b"")
    for file, expected in manifest.files.items():
        store.check(f"{name}/{file}", expected)


@contextmanager
def staged(url: str, name: str, progress: Progress = lambda *_: None) -> Iterator[Path]:
    """A local repository to export to or release in, whose changes are pushed to a store when the block ends.

    It has the settings and releases of the model and of its hosts' models, and their versions without files: enough
    for an export to find the next number and the schema to keep. Bundles of hosts are pushed before their router's,
    and releases last.

    Args:
        url: the store's repository, such as s3://bucket/models.
        name: the model.
        progress: called as files are written.

    Raises:
        ConfigurationError: `url` is not the URL of a store.
        BundleError, PublishError, ServerUnavailable: as `push`.
    """
    store = Store(url)
    with tempfile.TemporaryDirectory(prefix="tbe-store-") as folder:
        repository = Path(folder) / "repository"
        repository.mkdir()
        existing = set()
        names = store.names()
        published = versions_in(names)
        for model, numbers in versions_in(names, TAKEN).items():
            if model != name and not is_host_model(model, name):
                continue
            store.pull_settings(model, repository)
            store.pull_release(model, repository)
            for version in numbers:
                existing.add(path := repository / model / str(version))
                path.mkdir()
                if version in published.get(model, ()):
                    (path / MANIFEST).touch()
        try:
            yield repository
        except (ConfigurationError, BundleError, PublishError) as error:
            raise type(error)(str(error).replace(str(repository), store.url)) from error
        for _ in push(repository / name, store, exclude=existing, progress=progress):
            pass


@contextmanager
def repository_at(repository_or_url: str, name: str, progress: Progress = lambda *_: None) -> Iterator[Path]:
    """The folder of a repository. For a repository in a store, a staged one, see `staged`."""
    if not is_url(repository_or_url):
        yield Path(repository_or_url)
        return
    with staged(repository_or_url, name, progress) as repository:
        yield repository


def _update(store: Store, name: str, path: Path) -> bool:
    """Write a small object if its file exists and differs from the store's. Returns whether it was written."""
    if not path.exists() or (content := read_file(path)) == store.read(name):
        return False
    store.write(name, content)
    return True
