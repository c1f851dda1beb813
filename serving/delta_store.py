"""Deltas in an object store: the same files under the same names as in a folder, such as s3://bucket/models.deltas/….

A local folder has copies of the deltas that this machine needs. A publisher creates each delta under a new number,
its signature first. A server fetches the deltas after the last one in its folder. If a delta is removed from the
store or replaced there, the local copy is also removed or replaced. Size, time and ETag identify a delta's content.
"""

import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from serving.bundle.lineage import (
    Step,
    delta_path,
    files_in,
    files_of,
    needed_files,
    reached,
    squashed_names,
    step_of,
    step_of_file,
    steps_in,
)
from serving.bundle.load import open_bundle, versions
from serving.errors import BundleError, ConfigurationError, ServerUnavailable
from serving.files import is_url, replacing
from serving.model.config_file import OURS, read_config, settings_of
from serving.model.settings import WeightsMemory
from serving.store import Store

# The time of this file is when a lineage was last complete here.
_READ = ".read"
# Files that are fetched at once, and bytes of a file that are written at once.
_AT_ONCE, _BLOCK_BYTES = 8, 1 << 20


class LiveLineage(NamedTuple):
    """A lineage of a model, and the number of the last delta in the rows of its first local version."""

    model: str
    name: str
    since: int


class _FileState(NamedTuple):
    """What identifies the content of a file under its name.

    Attributes:
        size: the size in bytes.
        time_us: Unix time in microseconds. Below the second, it is made of the ETag, because S3 lists whole seconds.
    """

    size: int
    time_us: int


class DeltaStore(Store):
    """The deltas of models in an object store, and the local copies of them.

    Args:
        url: such as s3://bucket/models.deltas.

    Attributes:
        folder: the local copies, laid out as in any folder of deltas.

    Raises:
        ConfigurationError: as for `Store`, or the user has no home for the folder.
    """

    def __init__(self, url: str) -> None:
        self.folder = (cache_of(url) / "deltas").absolute()
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if url.startswith("file://"):
            with suppress(OSError):  # the next line reports a missing folder
                Path(url.removeprefix("file://")).mkdir(exist_ok=True)
        super().__init__(url)

    def bring(self, model: str, lineage: str, after: int, *, all_files: bool = False) -> set[str]:
        """Make the local deltas of a lineage after the number `after` equal to the store's.

        Deltas that a squashed delta has replaced in the store stay here, because a live copy may need the next of
        them.

        Args:
            model, lineage, after: the deltas of this lineage after this number.
            all_files: also fetch the deltas that a squashed delta replaces.

        Returns:
            The names of the files that were fetched or removed.

        Raises:
            BundleError: a file was fetched incompletely.
            ServerUnavailable: the store cannot be reached, or refuses access.
            ConfigurationError: the folder cannot be written to.
        """
        folder = self.folder / model / lineage
        with _writing(folder):
            # List local files first: another process may publish meanwhile, and write its copy here.
            local = {name: _state_of(folder / name) for name in files_in(folder) if _is_after(name, after)}
            stored = self._listed(model, lineage, after)
            needed = {*stored} if all_files else {*needed_files(stored, after)}
            new = sorted(name for name in needed if local.get(name) != stored[name])
            removed = local.keys() - stored.keys() - squashed_names(local, stored)
            changed = {name for name in local.keys() & stored.keys() if local[name] != stored[name]}
            for name in removed | (changed - {*new}):
                (folder / name).unlink(missing_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
            for end in (".sig", ".safetensors"):  # a delta without its signature would be refused for a while
                self._fetch(folder, {name: stored[name] for name in new if name.endswith(end)})
            (folder / _READ).touch()
        return {*new} | removed

    def _fetch(self, folder: Path, files: Mapping[str, _FileState]) -> None:
        """Fetch some files of a lineage, several at once."""

        def fetch(name: str) -> None:
            _put(folder / name, self._blocks(folder / name, files[name].size), files[name])

        if files:
            with ThreadPool(_AT_ONCE) as pool:  # its threads do not delay the end of the process
                pool.map(fetch, files)

    def last_read(self, lineage: LiveLineage) -> float | None:
        """When a lineage was last complete here, in Unix time, or None if it never was."""
        with suppress(OSError):
            return (self.folder / lineage.model / lineage.name / _READ).stat().st_mtime
        return None

    def refresh(self, lineage: LiveLineage) -> None:
        """Fetch the missing deltas of a lineage. Of the local deltas, only the last one is compared with the store's.

        Raises:
            As for `bring`.
        """
        folder = self.folder / lineage.model / lineage.name
        with _writing(folder):
            last = reached(steps_in(folder), lineage.since)
        changed = self.bring(lineage.model, lineage.name, max(last - 1, lineage.since))
        # If the last delta was replaced, earlier deltas may have been replaced with it.
        if last > lineage.since and any(int(name[:12]) == last for name in changed):
            self.bring(lineage.model, lineage.name, lineage.since)

    def refresh_all(self, model: Path) -> None:
        """Fetch the missing and the replaced deltas of a model's lineages. `model` is its folder in a repository.

        Raises:
            As for `bring` and `lineages`.
        """
        for lineage in lineages(model):
            self.bring(lineage.model, lineage.name, lineage.since)

    def add(self, files: Sequence[tuple[Path, bytes]]) -> bool:
        """Publish a delta: its signature, if any, then the delta. Copies are kept here.

        Args:
            files: their local paths and contents; the delta is the last.

        Returns:
            True if the delta was published, False if the store already has a delta with this number.

        Raises:
            ServerUnavailable: the store cannot be reached, or refuses access.
            OSError: the folder cannot be written to.
        """
        *signatures, (path, content) = files
        model, lineage, _ = path.relative_to(self.folder).parts
        for signature, signed in signatures:
            self.write(f"{model}/{lineage}/{signature.name}", signed)
        name = f"{model}/{lineage}/{path.name}"
        with self._asking(name):
            try:
                self._obstore.put(self._store, name, content, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                # The delta may be ours: the answer to a first attempt can get lost.
                if bytes(self._obstore.get(self._store, name).bytes()) != content:
                    with suppress(self._obstore.exceptions.BaseError, OSError):  # a leftover signature does no harm
                        for signature, _ in signatures:
                            self._obstore.delete(self._store, f"{model}/{lineage}/{signature.name}")
                    return False
        with suppress(ServerUnavailable):  # it is published, and missing copies are fetched later
            listed = self._listed(model, lineage, int(path.name[:12]) - 1)
            for file, file_content in files:
                if file.name in listed:  # otherwise it was just removed
                    _put(file, [file_content], listed[file.name])
        return True

    def steps(self, model: str, lineage: str) -> list[Step]:
        """The deltas of a lineage that the store has, in order.

        Raises:
            ServerUnavailable: the store cannot be reached, or refuses access.
        """
        return sorted(filter(None, map(step_of, self._listed(model, lineage, 0))))

    def remove(self, model: str, lineage: str, steps: Collection[Step]) -> None:
        """Remove deltas and their signatures, here and in the store.

        Raises:
            ServerUnavailable: the store cannot be reached, or refuses access.
            ConfigurationError: the folder cannot be written to.
        """
        for name in files_of(self._listed(model, lineage, 0), steps):
            with self._asking(f"{model}/{lineage}/{name}"):
                self._obstore.delete(self._store, f"{model}/{lineage}/{name}")
            with _writing(self.folder):
                (self.folder / model / lineage / name).unlink(missing_ok=True)

    def _listed(self, model: str, lineage: str, after: int) -> dict[str, _FileState]:
        """The files of the deltas of a lineage after a number, by name."""
        prefix = f"{model}/{lineage}"
        files = {}
        with self._asking(prefix):
            last = delta_path(Path(prefix), after).as_posix()
            for entry in (entry for part in self._obstore.list(self._small, prefix, offset=last) for entry in part):
                name = entry["path"].rpartition("/")[2]
                if entry["path"] == f"{prefix}/{name}" and _is_after(name, after):
                    tag = zlib.crc32(str(entry["e_tag"]).encode()) % 1_000_000
                    seconds = int(entry["last_modified"].timestamp())
                    files[name] = _FileState(entry["size"], seconds * 1_000_000 + tag)
        return files

    def _blocks(self, path: Path, size: int) -> Iterator[bytes]:
        """The content of a file in the store, by its path here and its bytes."""
        name = path.relative_to(self.folder).as_posix()
        store = self._small if size <= _BLOCK_BYTES else self._store
        with self._asking(name):
            yield from self._obstore.get(store, name).stream(min_chunk_size=_BLOCK_BYTES)


def store_of(deltas: Path | str | None) -> DeltaStore | None:
    """The store of deltas if `deltas` is a URL, or None.

    Raises:
        ConfigurationError: as for `DeltaStore`.
    """
    return DeltaStore(str(deltas)) if deltas is not None and is_url(deltas) else None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """During the block, turn an OSError into an error that names the file of the cache."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename or folder}: cannot be written: {error.strerror or error}: XDG_CACHE_HOME names another "
            "place for what a store has"
        ) from error


def cache_of(url: str) -> Path:
    """The folder of this user with files that were fetched from a store.

    Raises:
        ConfigurationError: the user has no home.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    except RuntimeError as error:  # a user without a home
        raise ConfigurationError(f"XDG_CACHE_HOME: expected a folder for what {url} has: {error}") from error
    return caches / "tbe-serving" / quote(url.rstrip("/"), safe="")


def lineages(model: Path) -> list[LiveLineage]:
    """The lineages of a model's versions in a repository; empty if the model is not served live.

    Args:
        model: the model's folder.

    Raises:
        BundleError, ConfigurationError: a version or the settings cannot be read.
    """
    config = read_config(model)
    if OURS not in config.parameters or settings_of(config).weights_memory != WeightsMemory.LIVE:
        return []
    since: dict[str, int] = {}
    for number in versions(model):
        name, sequence = _lineage(model / str(number))
        since[name] = min(sequence, since.get(name, sequence))
    return [LiveLineage(model.name, name, sequence) for name, sequence in since.items()]


@cache
def _lineage(version: Path) -> tuple[str, int]:
    """The lineage of a version, which never changes, and the last delta that is in its rows."""
    bundle = open_bundle(version)
    return bundle.lineage, bundle.manifest.sequence


def _is_after(name: str, after: int) -> bool:
    """Whether a file is a delta after a number, or the signature of one."""
    step = step_of_file(name)
    return step is not None and step.sequence > after


def _state_of(path: Path) -> _FileState:
    status = path.stat()
    return _FileState(status.st_size, status.st_mtime_ns // 1000)


def _put(path: Path, blocks: Iterable[bytes], state: _FileState) -> None:
    """Write a file with the state that it has in the store, whole or not at all."""
    with replacing(path) as file:
        for block in blocks:
            file.write(block)
        if file.tell() != state.size:
            raise BundleError(f"{path}: expected {state.size} bytes, got {file.tell()}: it was just replaced")
        file.flush()
        os.utime(file.fileno(), ns=(state.time_us * 1000, state.time_us * 1000))
