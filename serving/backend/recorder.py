"""Capture slow and refused requests in a file of limited size, for replay."""

import errno
import fcntl
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import msgspec

from serving.errors import ConfigurationError
from serving.model.settings import ServingSettings
from serving.requests.captured import LONGEST_LINE, CapturedRequest
from serving.requests.types import Tensors

# Largest number of requests that wait to be written. More are dropped, so that lookups never wait for a disk.
_WAITING = 64


class Recorder:
    """Appends requests to a file on its own thread, until the file has its largest size.

    Args:
        path: the file. Several instances may append to it.
        slow_s: a TBE call is slow if it takes longer than this, in seconds. None: no call is slow.
        max_bytes: largest size of the file.
        count: called for each request with whether it was written.
        warn: called with a line when a request cannot be written, and then not again until one was written.

    Raises:
        OSError: the file cannot be written, or belongs to another user, who could read the requests.
    """

    def __init__(
        self,
        path: Path,
        slow_s: float | None,
        max_bytes: int,
        count: Callable[[bool], None],
        warn: Callable[[str], None],
    ) -> None:
        self._path = path
        self._count = count
        self._warn = warn
        self._slow_s = slow_s
        self._max_bytes = max_bytes
        self._file = _opened(path)
        self._waiting: queue.SimpleQueue[CapturedRequest] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="capture", daemon=True).start()

    @classmethod
    def of(
        cls, settings: ServingSettings, model: str, count: Callable[[bool], None], warn: Callable[[str], None]
    ) -> Self | None:
        """Open the recorder of `model` with these settings, or return None if they do not capture.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        if settings.capture is None:
            return None
        path = _path(settings.capture, model)
        slow_s = None if settings.capture_slow_ms is None else settings.capture_slow_ms / 1e3
        with _errors_of(path):
            return cls(path, slow_s, settings.capture_max_bytes, count, warn)

    def is_slow(self, seconds: float) -> bool:
        """Whether a TBE call of this duration is slow."""
        return self._slow_s is not None and seconds > self._slow_s

    def record(self, tensors: Tensors, why: str) -> None:
        """Queue a request to be written, unless the file is full or too many requests wait for the disk.

        Args:
            tensors: the request. Its per-id weights are not written.
            why: the reason, as in `CapturedRequest`.
        """
        if self._waiting.qsize() >= _WAITING or not self._fits(tensors):
            self._count(False)
            return
        answered_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._waiting.put(CapturedRequest.of(tensors, answered_at, why))

    def _fits(self, tensors: Tensors) -> bool:
        least = 2 * (tensors.values.size + tensors.lengths.size)  # a number is at least a digit and a comma
        least += sum(array.nbytes for array in tensors.dense.values())  # base64 takes more than the bytes
        return os.fstat(self._file).st_size + least < self._max_bytes

    def _write(self) -> None:
        is_failing = False
        while True:
            is_kept = False
            try:
                is_kept = self._append(msgspec.json.encode(self._waiting.get()) + b"\n")
            except (OSError, UnicodeError) as error:  # the disk is full, or a name is not UTF-8
                if not is_failing:
                    self._warn(f"capture: {self._path}: a request was not written: {error}: later ones are tried")
                is_failing = True
            else:
                is_failing = False
            self._count(is_kept)

    def _append(self, line: bytes) -> bool:
        """Append a whole line, or nothing. Returns False if the file would be too large, or the line is too long."""
        fcntl.flock(self._file, fcntl.LOCK_EX)  # other instances append as well
        try:
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                line = b"\n" + line  # the process that wrote the last line was killed while it wrote
            if size + len(line) > self._max_bytes or len(line) > LONGEST_LINE:
                return False
            rest = memoryview(line)
            try:
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except OSError:
                os.ftruncate(self._file, size)
                raise
            return True
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def check_capture(settings: ServingSettings, model: str) -> None:
    """Refuse a capture file that this process could not write. A missing file is created.

    Raises:
        ConfigurationError: as `Recorder.of`.
    """
    if settings.capture is not None:
        path = _path(settings.capture, model)
        with _errors_of(path):
            os.close(_opened(path))


def _path(folder: str, model: str) -> Path:
    return Path(folder) / f"{model}.jsonl"


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"capture: {path} cannot be written: {error.strerror}: make the folder writable for the server, "
            "or `tbe-serve configure --no-capture`"
        ) from error


def _opened(path: Path) -> int:
    """A descriptor of the file. From now on, only its own user can read the file."""
    # The path may be a pipe or a link: O_NONBLOCK does not wait for the pipe, O_NOFOLLOW refuses the link.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags, 0o600)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "expected a file, got something else", str(path))
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "is another user's: remove it", str(path))
        os.fchmod(file, 0o600)
    except BaseException:
        os.close(file)
        raise
    return file
