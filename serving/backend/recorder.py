"""Capture: slow and refused requests are kept for replay, in a file of limited size."""

import os
import queue
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import msgspec

from serving.errors import ConfigurationError
from serving.model.settings import ServingSettings
from serving.request.captured import CapturedRequest
from serving.request.tensors import Tensors

# Most requests that wait to be written. More are not kept, so that lookups never wait for a disk.
_WAITING = 64


class Recorder:
    """Appends requests to a file on a thread of its own, as long as there is room.

    Args:
        path: the file. Several instances may append to it.
        slow_s: a TBE call is slow if it takes longer than this, in seconds; None: no call is slow.
        max_bytes: largest size of the file.
        kept: called for each request that was written.
    """

    def __init__(self, path: Path, slow_s: float | None, max_bytes: int, kept: Callable[[], None]) -> None:
        self._kept = kept
        self._slow_s = slow_s
        self._max_bytes = max_bytes
        # Do not wait for a pipe in the file's place, and do not follow a link.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.open(path, flags, 0o600)
        self._waiting: queue.SimpleQueue[CapturedRequest] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="capture", daemon=True).start()

    @classmethod
    def of(cls, settings: ServingSettings, model: str, kept: Callable[[], None]) -> Self | None:
        """The recorder of `model` with these settings; None where they capture nothing.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        if settings.capture is None:
            return None
        path = Path(settings.capture) / f"{model}.jsonl"
        slow_s = None if settings.capture_slow_ms is None else settings.capture_slow_ms / 1e3
        try:
            return cls(path, slow_s, settings.capture_max_bytes, kept)
        except OSError as error:
            raise ConfigurationError(
                f"capture: {path} cannot be written: {error.strerror}: make the folder writable for the server, "
                "or `tbe-serve configure --no-capture`"
            ) from error

    def is_slow(self, seconds: float) -> bool:
        """Whether a TBE call that took so long is slow."""
        return self._slow_s is not None and seconds > self._slow_s

    def record(self, tensors: Tensors, why: str) -> None:
        """Keep a request, unless the file is full or too many wait for the disk.

        Args:
            tensors: the request; its weights are not kept.
            why: the reason, as in `CapturedRequest`.
        """
        if self._waiting.qsize() >= _WAITING or not self._has_room(tensors):
            return
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._waiting.put(CapturedRequest.of(tensors, at, why))

    def _has_room(self, tensors: Tensors) -> bool:
        least = 2 * (tensors.values.size + tensors.lengths.size)  # a digit and a comma for each number
        least += sum(each.nbytes for each in tensors.dense.values())  # and more than that in base64
        return os.fstat(self._file).st_size + least < self._max_bytes

    def _write(self) -> None:
        while True:
            line = msgspec.json.encode(self._waiting.get()) + b"\n"
            if os.fstat(self._file).st_size + len(line) <= self._max_bytes:
                os.write(self._file, line)
                self._kept()
