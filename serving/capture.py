"""Slow and refused requests, kept for replay: JSON lines of ids, in a file that does not grow for ever."""

import os
import queue
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Self

import msgspec
import numpy as np

from serving.errors import ConfigurationError, InvalidRequest
from serving.files import open_file
from serving.kjt import Tensors
from serving.settings import ServingSettings
from serving.strict import UNREADABLE

# Requests to answer before a model is ready, beside its config.pbtxt; `tbe-serve configure --warm-up` puts it there.
WARM_UP = "warm_up.jsonl"
# The largest such file that is signed, which takes it whole.
MOST_WARM_UP_BYTES = 1 << 28
# The longest line that is read: more ids than any request has.
LONGEST_LINE = 1 << 28
# What waits to be written; more is not kept, so that lookups never wait for a disk.
_WAITING = 64


class CapturedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A line of the file. Weights are not kept: a replay takes 1 for each id.

    Attributes:
        at: when it was answered, ISO 8601.
        why: "slow: … ms" or "refused: …".
        features: the features asked for; None for all of the model's.
        traceparent: its W3C trace context, if it had one.
    """

    at: str
    why: str
    features: list[str] | None = None
    values: list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]]
    lengths: list[Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]]
    traceparent: str | None = None

    @property
    def tensors(self) -> Tensors:
        """The request, without weights."""
        return Tensors(self.features, np.array(self.values, np.int64), np.array(self.lengths, np.int32))


class Recorder:
    """Appends requests to `path` on a thread of its own, until it has `max_bytes`.

    Args:
        path: the file; several instances may append to it.
        slow_s: what `is_slow` compares with; None calls nothing slow.
        max_bytes: nothing is appended that would make the file larger.
        kept: called for each request that was written.
    """

    def __init__(self, path: Path, slow_s: float | None, max_bytes: int, kept: Callable[[], None]) -> None:
        self._kept = kept
        self._slow_s = slow_s
        self._max_bytes = max_bytes
        # A pipe in its place would be waited for, a link followed.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.open(path, flags, 0o600)
        self._waiting: queue.SimpleQueue[CapturedRequest] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="capture", daemon=True).start()

    @classmethod
    def of(cls, settings: ServingSettings, model: str, kept: Callable[[], None]) -> Self | None:
        """The recorder that `settings` ask for.

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
        """Whether requests whose call took this long are to be kept."""
        return self._slow_s is not None and seconds > self._slow_s

    def record(self, tensors: Tensors, why: str) -> None:
        """Keep a request, unless the file is full or the disk behind."""
        if self._waiting.qsize() >= _WAITING or not self._has_room(tensors):
            return
        line = CapturedRequest(
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            why=why,
            features=None if tensors.features is None else list(tensors.features),
            values=tensors.values.tolist(),
            lengths=tensors.lengths.tolist(),
            traceparent=tensors.trace,
        )
        self._waiting.put(line)

    def _has_room(self, tensors: Tensors) -> bool:
        least = 2 * (tensors.values.size + tensors.lengths.size)  # a digit and a comma for each number
        return os.fstat(self._file).st_size + least < self._max_bytes

    def _write(self) -> None:
        while True:
            line = msgspec.json.encode(self._waiting.get()) + b"\n"
            if os.fstat(self._file).st_size + len(line) <= self._max_bytes:
                os.write(self._file, line)
                self._kept()


def read_captured(path: Path, *, follow: bool = False) -> Iterator[CapturedRequest]:
    """The requests of a file that a recorder wrote, one after the other: it may be larger than memory.

    Raises:
        InvalidRequest: the file cannot be read, or naming the line that is none.
    """
    decoder = msgspec.json.Decoder(CapturedRequest)
    try:
        file = open_file(path, follow=follow)
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise InvalidRequest(f"{path}: line {number}: expected at most {LONGEST_LINE} bytes, got more")
            try:
                yield decoder.decode(line)
            except UNREADABLE as error:
                raise InvalidRequest(f"{path}: line {number}: expected a captured request: {error}") from error
