"""Publish in an object store: a version of a folder's repository, or all that an export makes.

`manifest.sha256` comes first. It is created only where there is none, and says which manifest takes the number.
So one of two publishers gets the number, and one that was interrupted goes on where it stopped. manifest.json comes
last: with it, the version is there.
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
    but: Collection[Path] = (),
    progress: Progress = lambda *_: None,
) -> Iterator[str]:
    """Publish what a store lacks of a model and of its hosts' models: settings, versions, and releases last.

    A router's own versions come after those of its hosts. A release goes to the store if it is newer.

    Args:
        model: its folder, <repository>/<name>.
        store: the repository that gets it, under the same name and numbers.
        settings: whether settings that the store has are replaced.
        but: versions that are left out, by their path.
        progress: called as files are written.

    Yields:
        The URL of what was written, when it is there: of a version, of settings that were replaced, of a release.

    Raises:
        ConfigurationError: there is no such model.
        BundleError: a version cannot be read, or is damaged.
        PublishError: a number is taken by another bundle; or the store's versions have another schema.
        ServerUnavailable: the store cannot be reached, or lets nobody write.
    """
    model = Path(os.path.abspath(model))
    read_config(model)
    hosts = sorted(each for each in model.parent.iterdir() if is_host_model(each.name, model.name))
    for each in (*hosts, model):
        bundles = [open_bundle(path) for number in versions(each) if (path := each / str(number)) not in but]
        if is_there := store.read(f"{each.name}/{CONFIG}") is not None:
            with tempfile.TemporaryDirectory(prefix="tbe-store-") as folder:
                store.pull_settings(each.name, Path(folder))
                for bundle in bundles:
                    check_compatible(Path(folder) / each.name, bundle.manifest, None)
        own = [file for file in reversed(SETTINGS) if (each / file).exists()]  # signatures first: they are read last
        for file in () if is_there else own:
            store.create(f"{each.name}/{file}", read_file(each / file))
        for bundle in bundles:
            if _push_version(bundle, store, progress):
                yield f"{store.url}/{each.name}/{bundle.path.name}"
        for file in own if settings else ():
            if _update(store, f"{each.name}/{file}", each / file):
                yield f"{store.url}/{each.name}/{file}"
    for each in (*hosts, model):
        ours, theirs = read_release(each), None
        with suppress(BundleError):  # what cannot be read is replaced
            theirs = store.release(each.name)
        if ours is not None and (theirs is None or ours.sequence > theirs.sequence):
            for file in reversed(release_names(each.name)):
                _update(store, file, model.parent / file)
            yield f"{store.url}/{release_names(each.name)[0]}"


def _push_version(bundle: Bundle, store: Store, progress: Progress) -> bool:
    """Publish a version. What was interrupted goes on where it stopped. Returns False if it was there."""
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
        version: the folder that stands for it, see `staged`.

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
    """A folder that stands for a store's repository while a model is exported or released in it.

    It has the settings and releases of the model and of its hosts' models, and their versions without their files: so
    an export finds the next number, and the schema to keep. What is new or changed when the block ends goes to the
    store: bundles of hosts before their router's, and releases last.

    Args:
        url: the store's repository, such as s3://bucket/models.
        name: the model.
        progress: called as files are written.

    Raises:
        ConfigurationError: it is no URL of a store.
        BundleError, PublishError, ServerUnavailable: as `push`.
    """
    store = Store(url)
    with tempfile.TemporaryDirectory(prefix="tbe-store-") as folder:
        repository = Path(folder) / "repository"
        repository.mkdir()
        known = set()
        names = store.names()
        published = versions_in(names)
        for model, numbers in versions_in(names, TAKEN).items():
            if model != name and not is_host_model(model, name):
                continue
            store.pull_settings(model, repository)
            store.pull_release(model, repository)
            for version in numbers:
                known.add(path := repository / model / str(version))
                path.mkdir()
                if version in published.get(model, ()):
                    (path / MANIFEST).touch()
        try:
            yield repository
        except (ConfigurationError, BundleError, PublishError) as error:
            raise type(error)(str(error).replace(str(repository), store.url)) from error
        for _ in push(repository / name, store, but=known, progress=progress):
            pass


@contextmanager
def repository_at(place: str, name: str, progress: Progress = lambda *_: None) -> Iterator[Path]:
    """The folder of a repository; of one in a store, what stands for it: see `staged`."""
    if not is_url(place):
        yield Path(place)
        return
    with staged(place, name, progress) as repository:
        yield repository


def _update(store: Store, name: str, path: Path) -> bool:
    """Write a small object, if the file is there and is not what the store has. Returns whether it was written."""
    if not path.exists() or (content := read_file(path)) == store.read(name):
        return False
    store.write(name, content)
    return True
