"""A model repository in an object store: the same files under the same names, such as s3://bucket/models/movies/3/….

A store cannot rename folders, so files are written in an order that replaces the rename. A version exists when its
manifest.json exists, which is written last (export/publish/push.py) and has the size and SHA-256 of every other file.

obstore accesses the stores, with settings and credentials from the environment: `AWS_…` for s3://, `GOOGLE_…` for
gs://, `AZURE_…` for az://. file:// names an existing folder.
"""

import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from serving.bundle.load import check_sha256
from serving.bundle.manifest import MANIFEST, FileDigest
from serving.bundle.parse import parse_manifest
from serving.bundle.plan import is_model_name
from serving.bundle.release import Release, release_path
from serving.bundle.signature import signature_of
from serving.errors import BundleError, ConfigurationError, ServerUnavailable
from serving.files import SMALL, UNREADABLE, locked_file, make_content, put_in_place, read_file
from serving.model.config_file import CONFIG, parse_config
from serving.ordered_map import map_in_order
from serving.requests.captured import WARM_UP
from serving.tables.pages import HUGE_PAGE

# Called with the name of a file, how many of its bytes are done, and how many it has.
Progress = Callable[[str, int, int], None]

# The schemes of URLs, each with the prefix of its environment variables.
_SCHEMES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_", "file": ""}
# The first object of a version. It reserves the number for a manifest: the SHA-256 of it, in hex.
TAKEN = "manifest.sha256"
_OF_A_VERSION = re.compile(rf"([^/]+)/([1-9][0-9]{{0,17}})/({re.escape(MANIFEST)}|{re.escape(TAKEN)})")
# A model's files beside its versions, each before its signature.
SETTINGS = tuple(name for file in (CONFIG, WARM_UP) for name in (file, signature_of(Path(file)).name))
# Bytes that are read or written at once, the number of such parts in flight, and the maximum parts of an object.
_PART_BYTES, _PARTS, _MOST_PARTS = 16 << 20, 8, 10_000


class Store:
    """A model repository in an object store.

    Args:
        url: such as s3://bucket/models.

    Raises:
        ConfigurationError: `url` is not the URL of a store, or the environment has unusable settings.
    """

    # What to install where obstore is missing.
    package = "obstore"

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme, _, path = self.url.partition("://")
        if scheme not in _SCHEMES or not path or path.startswith("/") != (scheme == "file"):
            schemes = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
            raise ConfigurationError(
                f"{url}: expected a repository in a store, such as s3://bucket/models: {schemes}"
            )
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise ConfigurationError(f"{url}: needs a package: pip install {self.package}") from error
        self._obstore = obstore
        large: dict[str, Any] = {} if scheme == "file" else {"retry_config": {"max_retries": 5}}
        small: dict[str, Any] = {} if scheme == "file" else _for_small(_SCHEMES[scheme])
        try:
            self._store, self._small = from_url(self.url, **large), from_url(self.url, **small)
        except (obstore.exceptions.BaseError, ValueError, OSError) as error:
            raise ConfigurationError(f"{url}: cannot be opened: is it there? {_first_line(error)}") from error

    def names(self) -> dict[str, str]:
        """The names of all objects, each with its ETag, which changes when the object does."""
        with self._asking(""):
            entries = itertools.chain.from_iterable(self._obstore.list(self._small))
            return {entry["path"]: f"{entry['e_tag']} {entry['last_modified']}" for entry in entries}

    def release(self, model: str) -> Release | None:
        """The release of a model, or None. Its signature is not checked.

        Raises:
            BundleError: the object is not a release.
        """
        name = release_names(model)[0]
        content = self.read(name)
        try:
            return None if content is None else msgspec.json.decode(content, type=Release)
        except UNREADABLE as error:
            raise BundleError(f"{self.url}/{name}: expected what `tbe-export release` writes: {error}") from error

    def pull(self, model: str, version: int, repository: Path, progress: Progress = lambda *_: None) -> bool:
        """Fetch a version into a repository in a folder, completely or not at all.

        Every file is compared with its digest. An interrupted copy resumes where it stopped. If several processes
        fetch a version into one folder, one of them does the work and the others wait.

        Returns:
            True if the version was fetched, False if it was already complete.

        Raises:
            ConfigurationError: the store has no such version.
            BundleError: a file differs from the manifest, or the folder has another bundle under the number.
            ServerUnavailable: the store cannot be reached, or refuses access.
            OSError: the repository cannot be written to.
        """
        name = f"{model}/{version}"
        text = self.read(f"{name}/{MANIFEST}")
        if text is None:
            stored = list(versions_in(self.names()).get(model, ()))
            raise ConfigurationError(f"{self.url}/{model}: expected one of versions {stored}, got {version}")
        target = repository / model / str(version)
        if self._is_there(target, text):
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        pulls = repository.parent / f".{repository.name}.pulls" / model
        pulls.mkdir(parents=True, exist_ok=True)
        if pulls.stat().st_dev != target.parent.stat().st_dev:
            raise ConfigurationError(
                f"{repository}: is the root of a file system, so that nothing beside it can be renamed into it: "
                "name a folder of it"
            )
        draft = pulls / f"{version}-{hashlib.sha256(text).hexdigest()[:16]}"
        with locked_file(pulls / "lock"):
            if self._is_there(target, text):
                return False
            for other in pulls.iterdir():
                if other.is_dir() and other != draft:
                    shutil.rmtree(other)
            draft.mkdir(exist_ok=True)
            try:
                self._fill(draft, name, text, progress)
            except BundleError as error:
                raise BundleError(str(error).replace(str(draft), f"{self.url}/{name}")) from error
            put_in_place(draft, target, HUGE_PAGE)
        return True

    def _fill(self, draft: Path, name: str, text: bytes, progress: Progress) -> None:
        path = draft / MANIFEST
        recorded = self.read(f"{name}/{TAKEN}")  # folders that were copied by other tools have no such file
        if recorded is not None and recorded.strip() != hashlib.sha256(text).hexdigest().encode():
            raise BundleError(f"{path}: expected the manifest of {TAKEN}, got another: publish the bundle again")
        files = parse_manifest(path, text).files
        for leftover in draft.iterdir():  # a killed pull leaves its unfinished file
            if leftover.name not in files:
                leftover.unlink()
        for file, digest in files.items():
            self._bring(f"{name}/{file}", draft / file, digest, progress)
        make_content(signature_of(path), self.read(f"{name}/{signature_of(path).name}"))
        make_content(path, text)

    def _is_there(self, target: Path, text: bytes) -> bool:
        if not target.exists():
            return False
        if read_file(target / MANIFEST) == text:
            return True
        raise BundleError(
            f"{target}: expected the bundle of {self.url}, got another under its number: "
            "versions are never changed: name another folder"
        )

    def _bring(self, name: str, path: Path, expected: FileDigest, progress: Progress) -> None:
        """Fetch a file, or the rest of it if an earlier fetch was interrupted."""
        for _ in range(2):
            with path.open("ab+") as file, ThreadPoolExecutor(_PARTS) as pool:
                sha256 = hashlib.sha256()
                file.seek(0)
                while part := file.read(_PART_BYTES):
                    sha256.update(part)
                began_at = fetched_bytes = file.tell()
                starts = range(fetched_bytes, expected.size_bytes, _PART_BYTES)
                for part in map_in_order(pool, partial(self._part, name, expected), starts, ahead=_PARTS - 1):
                    file.write(part)
                    sha256.update(part)
                    fetched_bytes += len(part)
                    progress(path.name, fetched_bytes, expected.size_bytes)
            if sha256.hexdigest() == expected.sha256:
                return
            path.unlink()
            if not began_at:  # a resumed file may have had wrong bytes
                break
        check_sha256(path, sha256.hexdigest(), expected)

    def _part(self, name: str, expected: FileDigest, start: int) -> bytes:
        stop = min(start + _PART_BYTES, expected.size_bytes)
        with self._asking(name):
            try:
                part = bytes(self._obstore.get_range(self._store, name, start=start, end=stop))
            except FileNotFoundError:
                raise BundleError(f"{self.url}/{name}: is missing: publish the bundle again") from None
        if len(part) != stop - start:
            raise BundleError(
                f"{self.url}/{name}: expected {expected.size_bytes} bytes, got fewer: publish the bundle again"
            )
        return part

    def pull_settings(self, model: str, repository: Path) -> None:
        """Fetch a model's settings into a repository in a folder: config.pbtxt, the warm-up, their signatures.

        Raises:
            ConfigurationError: the store has no readable settings. The folder keeps its own.
        """
        contents = {name: self.read(f"{model}/{name}") for name in SETTINGS}
        if (config := contents[CONFIG]) is None:
            raise ConfigurationError(f"{self.url}/{model}/{CONFIG}: is missing: `tbe-export push` it again")
        parse_config(config, f"{self.url}/{model}/{CONFIG}")
        (repository / model).mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            make_content(repository / model / name, content)

    def pull_release(self, model: str, repository: Path) -> None:
        """Fetch a model's release and its signature, if it has a release, into a repository in a folder."""
        for name in reversed(release_names(model)):
            make_content(repository / name, self.read(name))

    def read(self, name: str) -> bytes | None:
        """A small object, or None if it does not exist."""
        with self._asking(name):
            try:
                response = self._obstore.get(self._small, name)
                if response.meta["size"] > SMALL:
                    raise BundleError(
                        f"{self.url}/{name}: expected at most {SMALL} bytes, got {response.meta['size']}"
                    )
                return bytes(response.bytes())
            except FileNotFoundError:
                return None

    def size(self, name: str) -> int | None:
        """The size of an object in bytes, or None if it does not exist."""
        with self._asking(name):
            try:
                return int(self._obstore.head(self._small, name)["size"])
            except FileNotFoundError:
                return None

    def check(self, name: str, expected: FileDigest) -> None:
        """Read an object in parts, and compare it with its size and SHA-256.

        Raises:
            BundleError: the object is missing or differs.
            ServerUnavailable: the store cannot be reached, or refuses reads.
        """
        if (size := self.size(name)) != expected.size_bytes:
            raise BundleError(
                f"{self.url}/{name}: expected {expected.size_bytes} bytes, got {size or 0}: push this version again "
                "under another number"
            )
        sha256 = hashlib.sha256()
        with ThreadPoolExecutor(_PARTS) as pool:
            starts = range(0, expected.size_bytes, _PART_BYTES)
            for part in map_in_order(pool, partial(self._part, name, expected), starts, ahead=_PARTS - 1):
                sha256.update(part)
        check_sha256(f"{self.url}/{name}", sha256.hexdigest(), expected)

    def write(self, name: str, content: bytes | Path) -> None:
        """Write an object, whole or not at all."""
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        part_bytes = max(_PART_BYTES, size // _MOST_PARTS + 1)
        with self._asking(name):
            self._obstore.put(self._store, name, content, chunk_size=part_bytes, max_concurrency=_PARTS)

    def create(self, name: str, content: bytes) -> bytes | None:
        """Write an object unless it exists. Returns the content that it then has."""
        with self._asking(name):
            try:
                self._obstore.put(self._store, name, content, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return self.read(name)
        return content

    @contextmanager
    def _asking(self, name: str) -> Iterator[None]:
        """During the block, turn obstore's errors into ours, which name the object."""
        try:
            yield
        except (self._obstore.exceptions.BaseError, OSError) as error:
            reason = _first_line(error)
            reason += next((f": {hint}" for words, hint in _HINTS.items() if words in reason), "")
            raise ServerUnavailable(f"{self.url}/{name}: cannot be read or written: {reason}") from error


def _for_small(prefix: str) -> dict[str, Any]:
    """Settings for lists and small objects, with a short timeout: a working store answers these at once.

    Settings that are passed to obstore's client replace those of the environment, so they are repeated here.
    """
    plain = ("allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only", "timeout")
    names = (*plain, "proxy_ca_certificate", "proxy_excludes", "proxy_url", "user_agent")
    of_environment = {
        name: os.environ[variable] for name in names if (variable := f"{prefix}{name.upper()}") in os.environ
    }
    client = {"connect_timeout": "3s", "timeout": "3s"} | of_environment
    return {"client_options": client, "retry_config": {"max_retries": 3}}


# Advice, by words in obstore's messages.
_HINTS = {
    "builder error": "is its endpoint http:? AWS_ALLOW_HTTP=true allows that",
    "/latest/api/token": "no credentials: neither AWS_ACCESS_KEY_ID and so on, nor a role of the machine",
    "404 Not Found": "is there a bucket of that name?",
    "invalid path": "remove that object, whose name has an empty part or dots, or take a prefix without such ones",
}


def versions_in(names: Iterable[str], mark: str = MANIFEST) -> dict[str, tuple[int, ...]]:
    """The versions of each model, oldest first. Models without versions are left out.

    Args:
        names: the names of a store's objects.
        mark: the object that a version must have: MANIFEST if it is published, TAKEN if its number is reserved.
    """
    numbers_by_model: dict[str, list[int]] = {}
    for name in names:
        version = _OF_A_VERSION.fullmatch(name)
        if version is not None and version[3] == mark and is_model_name(version[1]):
            numbers_by_model.setdefault(version[1], []).append(int(version[2]))
    return {model: tuple(sorted(numbers)) for model, numbers in sorted(numbers_by_model.items())}


def release_names(model: str) -> tuple[str, str]:
    """The names of a model's release and its signature."""
    path = release_path(Path(model))
    return path.name, signature_of(path).name


def _first_line(error: Exception) -> str:
    """The first line of an error, without durations, so that the same problem has the same text."""
    return re.sub(r" in [0-9.]+[nµm]?s\b", "", str(error).partition("\n")[0].partition(": <?xml")[0])
