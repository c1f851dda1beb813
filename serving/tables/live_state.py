"""The state of a live copy, and how rows are read from it while they are written.

No reader sees half a row. The first number of the state, the *fence*, is odd while rows are written. A reader reads
the fence, looks up, and looks up again if the fence was odd or has changed. On x86-64 the processor reorders neither
loads with loads nor stores with stores, so nothing else is needed. On other processors, and if rows change during
each of `_TRIES` lookups, the reader holds a shared lock on the state. The writer holds that lock exclusively for each
slice of rows (fcntl(2), open file description locks).

A killed writer leaves an odd fence. The next writer writes that slice again, from the row that the state names, and
makes the fence even. The state has the digests of the newest applied delta and of the delta that is being written, so
that the next writer notices if either was replaced.
"""

import fcntl
import mmap
import os
import platform
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from serving.errors import ServerUnavailable
from serving.files import Strict

# The offsets of the texts in the state, and the maximum bytes of a text, its length included.
_ABOUT, _STOPPED, _TEXT_BYTES = 4096, 16384, 8192
# Whether readers need no lock, because the processor keeps loads in order, and stores in order.
_IS_ORDERED = platform.machine() == "x86_64"
# Lookups during which rows may change before the reader takes the lock.
_TRIES = 2
# Longest wait, in seconds, for a writer that was killed while it wrote.
_PATIENCE_S = 5.0
_CHECK_PERIOD_S = 0.001

T = TypeVar("T")


class About(Strict, frozen=True):
    """The version that a live copy belongs to.

    Attributes:
        model, version: the name of the model, and the number of the version.
        bundle: the path of the bundle.
        deltas: the path of the folder of its lineage, whose deltas are applied.
    """

    model: str
    version: str
    bundle: str
    deltas: str


class State:
    """The state of a live copy. Only the delta writer writes it; any process may read it.

    Args:
        pages: the first 2 MiB of the copy or more, mapped.
        file: the copy, for locks.
    """

    _FENCE, _APPLIED, _CAUGHT_UP, _ROWS, _REFUSED, _PLACE, _STOP, _BEGUN = range(8)
    # Two digests of four numbers each: of the newest applied delta, and of the delta that is being written. The last
    # bit of `_APPLIED` says which is which. Its other bits are the number of the delta, so both change at once.
    _DIGESTS = 8

    def __init__(self, pages: mmap.mmap, file: int) -> None:
        self._pages = memoryview(pages)
        self._numbers = self._pages[:_ABOUT].cast("Q")
        self._file = file

    def close(self) -> None:
        """Release the pages."""
        for view in (self._numbers, self._pages):
            view.release()

    @property
    def about(self) -> About:
        """The version that the copy belongs to."""
        return msgspec.json.decode(self._text(_ABOUT), type=About)

    @property
    def sequence(self) -> int:
        """The number of the newest delta that is applied completely, as are all deltas before it."""
        return self._numbers[self._APPLIED] >> 1

    @property
    def begun(self) -> int:
        """The number of the delta that is being written, or `sequence` if none is."""
        return self._numbers[self._BEGUN]

    @property
    def is_caught_up(self) -> bool:
        """Whether the deltas that existed when the copy was taken are applied, or one of them is refused."""
        return bool(self._numbers[self._CAUGHT_UP])

    @property
    def rows(self) -> int:
        """The number of rows written so far."""
        return self._numbers[self._ROWS]

    @property
    def refused(self) -> int:
        """The number of deltas refused so far."""
        return self._numbers[self._REFUSED]

    @property
    def stopped(self) -> str:
        """Why no further delta is applied; empty if deltas are applied."""
        return self._text(_STOPPED).decode(errors="replace")

    def note_stopped(self, why: str) -> None:
        """Write why no further delta is applied. An empty text says that deltas are applied again."""
        if why and why != self.stopped:
            self._numbers[self._REFUSED] += 1
        self._write_text(_STOPPED, why.encode(errors="replace")[: _TEXT_BYTES - 8])

    def note_caught_up(self) -> None:
        """Let models serve from this copy from now on."""
        self._numbers[self._CAUGHT_UP] = 1

    def _text(self, offset: int) -> bytes:
        size = min(self._numbers_at(offset), _TEXT_BYTES - 8)
        return bytes(self._pages[offset + 8 : offset + 8 + size])

    def _numbers_at(self, offset: int) -> int:
        return int.from_bytes(self._pages[offset : offset + 8], "little")

    def _write_text(self, offset: int, text: bytes) -> None:
        self._pages[offset + 8 : offset + 8 + len(text)] = text
        self._pages[offset : offset + 8] = len(text).to_bytes(8, "little")

    def begin(self, about: About, sequence: int) -> None:
        """Write the first state, of a version whose rows have the deltas up to `sequence`."""
        self._numbers[self._APPLIED] = sequence << 1
        self._numbers[self._BEGUN] = sequence
        self._write_text(_ABOUT, msgspec.json.encode(about))

    def begin_again(self, about: About) -> None:
        """Continue with the rows that a killed server left. Deltas may have been published since."""
        self._numbers[self._CAUGHT_UP] = 0
        self._write_text(_ABOUT, msgspec.json.encode(about))

    # Reading rows, and writing them.

    def read(self, look_up: Callable[[], T]) -> T:
        """The result of a lookup that reads only whole rows.

        Args:
            look_up: reads rows. It may be called several times. Its result must not share memory with the rows.

        Raises:
            ServerUnavailable: a killed writer left half-written rows, and no other process completed them.
        """
        numbers, fence = self._numbers, self._FENCE
        if _IS_ORDERED:
            for _ in range(_TRIES):
                before = numbers[fence]
                result = look_up()
                if numbers[fence] == before and not before & 1:
                    return result
        return self._read_locked(look_up)

    def _read_locked(self, look_up: Callable[[], T]) -> T:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            with _locked_state(self._file, fcntl.F_RDLCK):
                if not self._numbers[self._FENCE] & 1:
                    return look_up()
            time.sleep(_CHECK_PERIOD_S)  # a writer was killed; the next one completes the slice
        raise ServerUnavailable("rows are half written, and no delta writer continues: check `tbe-serve run`")

    @property
    def half_written(self) -> tuple[int, int] | None:
        """The slice of a delta that a killed writer was writing: its first row, and the row after its last one.

        Rows are counted over all tables of the delta. The result is None if no slice is half written.
        """
        numbers = self._numbers
        return (numbers[self._PLACE], numbers[self._STOP]) if numbers[self._FENCE] & 1 else None

    @contextmanager
    def writing(self, first: int, rows: int) -> Iterator[None]:
        """During the block, write a slice of a delta's rows. It must be short, because lookups wait.

        Args:
            first: the number of the delta's rows before the slice.
            rows: the number of rows in the slice. A half-written slice must be written with its original bounds.
        """
        numbers = self._numbers
        with _locked_state(self._file, fcntl.F_WRLCK):
            if not numbers[self._FENCE] & 1:
                numbers[self._PLACE], numbers[self._STOP] = first, first + rows
                numbers[self._FENCE] += 1
            yield
            numbers[self._FENCE] += 1
            numbers[self._ROWS] += rows

    @property
    def written(self) -> Mapping[int, str]:
        """The SHA-256, in hex, of the deltas with the numbers `sequence` and `begun`, by number.

        It is empty if no delta was written to this copy.
        """
        digests = {self.begun: self._digest(is_applied=False), self.sequence: self._digest(is_applied=True)}
        return {sequence: digest.hex() for sequence, digest in digests.items() if any(digest)}

    def _digest(self, *, is_applied: bool) -> memoryview:
        slot = self._numbers[self._APPLIED] & 1 ^ (not is_applied)
        start = 8 * (self._DIGESTS + 4 * slot)
        return self._pages[start : start + 32]

    def note_begun(self, sequence: int, digest: str) -> None:
        """Record that the rows of a delta are going to be written."""
        self._digest(is_applied=False)[:] = bytes.fromhex(digest)
        self._numbers[self._BEGUN] = sequence

    def note_applied(self, digest: str) -> None:
        """Record that all rows of the begun delta are written, and its digest."""
        self._numbers[self._APPLIED] = self.begun << 1 | (self._numbers[self._APPLIED] & 1 ^ 1)
        self._digest(is_applied=True)[:] = bytes.fromhex(digest)  # another only where deltas are squashed


@contextmanager
def _locked_state(file: int, kind: int) -> Iterator[None]:
    """Hold a lock on the first byte of a copy during the block."""
    _lock(file, kind)
    try:
        yield
    finally:
        _lock(file, fcntl.F_UNLCK)


def _lock(file: int, kind: int) -> None:
    fcntl.fcntl(file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0))
