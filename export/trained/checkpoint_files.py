"""The files of a checkpoint. Each is opened once and stays open, so that old and new content never mix."""

import errno
import hashlib
import os
import resource
import weakref
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from export.errors import CheckpointError
from serving.files import open_file


class _Identity(NamedTuple):
    """The file system's facts about a file. They change when the file is written to or replaced."""

    device: int
    inode: int
    size: int
    modified_ns: int
    status_changed_ns: int


def _identity(descriptor: int) -> _Identity:
    status = os.fstat(descriptor)
    return _Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _difference(before: _Identity, now: _Identity) -> str:
    """What happened to a file, in words."""
    if (before.device, before.inode) != (now.device, now.inode):
        return "was replaced by another file"
    if before.size != now.size:
        return f"had {before.size:,} bytes and has {now.size:,}"
    return "was written to" if before.modified_ns != now.modified_ns else "has another status (ctime)"


def _changed(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {what} while it was read: expected a checkpoint that does not change: wait for the training to "
        "finish writing it, or give a copy"
    )


class _Part(NamedTuple):
    """Bytes [start, start + length) of a file, and their digest."""

    start: int
    length: int
    sha256: str


@dataclass(eq=False)
class CheckpointFile:
    """An open file of a checkpoint. Several threads read from it at once. It is closed when nothing refers to it.

    Attributes:
        path: the file.
        descriptor: reads it.
        identity: as it was opened.
        parts: the header or directory that locates its tensors. It must not change either.
        dated: whether `parts` has no checksums of the tensors, so that only the file's time tells two saves apart.
    """

    path: Path
    descriptor: int
    identity: _Identity
    parts: list[_Part] = field(default_factory=list)
    dated: bool = False

    @property
    def size(self) -> int:
        """Its bytes, when it was opened."""
        return self.identity.size

    def read(self, start: int, length: int) -> Tensor:
        """Bytes [start, start + length): uint8 [length], a copy.

        Raises:
            CheckpointError: the file is shorter, or cannot be read.
        """
        numbers = torch.empty(length, dtype=torch.uint8)
        unread = numbers.numpy().data
        while unread:  # one read takes at most 2 GiB
            try:
                count = os.preadv(self.descriptor, [unread], start + length - len(unread))
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {error}") from error
            if not count:
                now = _identity(self.descriptor)
                if now != self.identity:
                    raise _changed(self.path, _difference(self.identity, now))
                raise CheckpointError(
                    f"{self.path}: expected {start + length:,} bytes, found {self.size:,}: was it copied whole?"
                )
            unread = unread[count:]
        return numbers

    def read_bytes(self, start: int, length: int) -> bytes:
        """As `read`, of a few bytes."""
        return self.read(start, length).numpy().tobytes()

    def read_part(self, start: int, length: int) -> bytes:
        """Bytes [start, start + length), which locate tensors, as `parts` records."""
        content = self.read_bytes(start, length)
        self.parts.append(_Part(start, length, hashlib.sha256(content).hexdigest()))
        return content

    def check_unchanged(self) -> None:
        """As `CheckpointFiles.check_unchanged`, of this file."""
        try:
            with open_file(self.path, follow=True) as file:  # NFS asks its server as a file is opened
                now = _identity(file.fileno())
        except OSError as error:
            raise _changed(self.path, "was removed" if error.errno == errno.ENOENT else str(error)) from error
        if now != self.identity:
            raise _changed(self.path, _difference(self.identity, now))
        for start, length, sha256 in self.parts:
            if hashlib.sha256(self.read_bytes(start, length)).hexdigest() != sha256:
                raise _changed(self.path, "was written to")


class CheckpointFiles:
    """The files of a checkpoint, opened as they are needed.

    Args:
        folder: the folder with all of them.
        patterns: of the names of its files if the checkpoint is a folder: no file may be added or removed.
    """

    def __init__(self, folder: Path, patterns: tuple[str, ...] = ()) -> None:
        self._folder, self._patterns = folder, patterns
        self._files: dict[str, CheckpointFile] = {}
        self._names = self._list()

    def open(self, name: str) -> CheckpointFile:
        """The file of that name, which is opened once.

        Raises:
            CheckpointError: it cannot be opened.
        """
        if (file := self._files.get(name)) is None:
            path = self._folder / name
            try:
                with _opened(path) as opened:
                    descriptor = os.dup(opened.fileno())
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from error
            file = self._files[name] = CheckpointFile(path, descriptor, _identity(descriptor))
            weakref.finalize(file, os.close, descriptor)
        return file

    def check_unchanged(self) -> None:
        """Refuse what was read if any file has changed since it was opened.

        Raises:
            CheckpointError: a file was replaced, written to, truncated, removed or added.
        """
        if changed := self._list() ^ self._names:
            name = min(changed)
            raise _changed(self._folder / name, "was removed" if name in self._names else "was added")
        for file in self._files.values():
            file.check_unchanged()

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex, equal for two checkpoints only if they were saved at the same moment.

        It covers the sizes of all files and the `parts` that locate tensors. In archives of torch.save these contain
        the CRC-32 of each tensor. For files without such checksums, it also covers the time of modification.
        """
        single = len(self._files) == 1 and not self._patterns
        states = [
            [
                "" if single else name,
                file.size,
                sorted(file.parts),
                file.identity.modified_ns if file.dated else None,
            ]
            for name, file in sorted(self._files.items())
        ]
        return hashlib.sha256(msgspec.json.encode(states)).hexdigest()

    def _list(self) -> set[str]:
        return {path.name for pattern in self._patterns for path in self._folder.glob(pattern)}


def _opened(path: Path) -> BufferedReader:
    """Open a file. A checkpoint may have more files than the default limit of this process."""
    try:
        return open_file(path, follow=True)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return open_file(path, follow=True)
