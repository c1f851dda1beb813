"""Objects of a store, such as s3://bucket/days/1.parquet: found, read where they have not changed, and written."""

import fnmatch
import io
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, BinaryIO, NamedTuple

from serving.errors import ConfigurationError
from serving.range_file import RangeFile
from serving.store import Store

# Bytes that are read at once: a request to a store takes tens of milliseconds, however little it reads.
READ_BYTES = 8 << 20
_SCHEMES = ("s3", "gs", "az")
_GLOB = "*?["


class ObjectState(NamedTuple):
    """An object: its size in bytes, and its ETag, which changes when the object does. "": the store has no ETags."""

    size_bytes: int
    e_tag: str


class Objects(Store):
    """The objects below a URL. They are read and written by their names below it."""

    package = "'tbe-serving[batch]'"

    def states(self, prefix: str = "") -> dict[str, ObjectState]:
        """The objects below a prefix, which ends where a part of a name does.

        Raises:
            ServerUnavailable: the store cannot be reached, has no such bucket, or refuses access.
        """
        with self._asking(prefix):
            entries = [entry for page in self._obstore.list(self._small, prefix) for entry in page]
        return {entry["path"]: _state(entry) for entry in entries}

    def state(self, name: str) -> ObjectState | None:
        """An object, or None if it does not exist.

        Raises:
            ServerUnavailable: as `states`.
        """
        with self._asking(name):
            try:
                return _state(self._obstore.head(self._small, name))
            except FileNotFoundError:
                return None

    def read_range(self, name: str, state: ObjectState, start: int, stop: int) -> bytes:
        """Bytes of an object.

        Raises:
            ConfigurationError: it has changed.
            ServerUnavailable: as `states`.
        """
        options: Any = {"range": (start, stop), "if_match": state.e_tag or None}
        with self._asking(name):
            try:
                return bytes(self._obstore.get(self._store, name, options=options).bytes())
            except (FileNotFoundError, self._obstore.exceptions.PreconditionError):
                pass
        raise ConfigurationError(f"{self.url}/{name}: changed while it was scored: start again with --restart")

    def open(self, name: str, state: ObjectState) -> BinaryIO:
        """A file that reads an object."""

        def read_range(start: int, length: int) -> bytes:
            return self.read_range(name, state, start, start + length)

        return io.BufferedReader(RangeFile(state.size_bytes, read_range), READ_BYTES)

    def write_file(self, name: str, file: BinaryIO) -> None:
        """Write an object, whole or not at all, from the start of a file."""
        file.flush()
        file.seek(0)
        with self._asking(name):
            self._obstore.put(self._store, name, file)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects."""
        for name in names:
            with self._asking(name):
                self._obstore.delete(self._store, name)


@cache
def objects_of(url: str) -> Objects:
    """The objects below a URL, by one client for each process.

    Raises:
        ConfigurationError: as `Store`.
    """
    return Objects(url)


def split_url(url: str) -> tuple[Objects, str]:
    """The bucket of an object's URL, and the object's name in it.

    Raises:
        ConfigurationError: it is no URL of a store.
    """
    scheme, _, path = url.partition("://")
    bucket, _, name = path.partition("/")
    if scheme not in _SCHEMES or not bucket or not name.strip("/"):
        schemes = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise ConfigurationError(f"{url}: expected a path on this machine, or s3://bucket/name ({schemes})")
    return objects_of(f"{scheme}://{bucket}"), name.rstrip("/")


def find_objects(url: str) -> list[str]:
    """The URLs of Parquet objects that a URL names: an object, a prefix with *.parquet below it, or a glob.

    Of a prefix, objects are left out if a part of their names below it begins with "." or "_".

    Raises:
        ConfigurationError: it names none.
        ServerUnavailable: the store cannot be reached, has no such bucket, or refuses access.
    """
    bucket, name = split_url(url)
    if bucket.state(name) is not None:
        return [f"{bucket.url}/{name}"]
    parts = name.split("/")
    if any(sign in name for sign in _GLOB):
        fixed = next(number for number, part in enumerate(parts) if any(sign in part for sign in _GLOB))
        names = [path for path in bucket.states("/".join(parts[:fixed])) if _matches(path.split("/"), parts)]
    else:
        below = {path: path.removeprefix(f"{name}/").split("/") for path in bucket.states(name)}
        names = [
            path
            for path, parts_below in below.items()
            if path.endswith(".parquet") and not any(part.startswith((".", "_")) for part in parts_below)
        ]
    if not names:
        raise ConfigurationError(f"{url}: expected Parquet objects: one, a prefix with *.parquet below it, or a glob")
    return [f"{bucket.url}/{path}" for path in sorted(names)]


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether a path matches a glob, both in their parts. `**` is any number of parts."""
    if not parts or not patterns:
        return not parts and all(pattern == "**" for pattern in patterns)
    if patterns[0] == "**":
        return _matches(parts, patterns[1:]) or _matches(parts[1:], patterns)
    return fnmatch.fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])


def _state(entry: Any) -> ObjectState:
    return ObjectState(entry["size"], entry["e_tag"] or "")
