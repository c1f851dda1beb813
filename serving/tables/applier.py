"""The applier: the one process of a server that writes deltas to its live copies. `tbe-serve run` starts it.

It is a process of its own, because lookups wait while rows are half written: nothing here waits for Python's lock, or
for another thread. It reads the folders of deltas `_LOOKS_S` apart, checks a delta as a whole, and writes its rows in
slices of at most `_SLICE_S`. In between it sleeps, so that lookups are held up for about 1 % of the time; for more of
it if a delta is large, or a copy is behind.

A number that is missing is waited for. A delta that cannot be read, is not signed by a trusted key, or does not fit
stops those behind it, until another takes its place. The model serves on.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from serving.bundle.delta import Delta, delta_digest, delta_path, delta_signature, listed, parse_delta, read_delta
from serving.bundle.manifest import MANIFEST
from serving.bundle.parse import parse_manifest
from serving.bundle.signature import TrustedKeys
from serving.errors import BundleError, ServingError
from serving.files import read_file
from serving.tables.live_copy import LiveCopy, live_copies, shard_rows

# Seconds between looks at the folders.
_LOOKS_S = 0.2
# The longest slice, in seconds, and the rows of the first one.
_SLICE_S, _FIRST_ROWS = 0.0005, 1000
# The share of the time that rows are written: so much that a delta is written within _WITHIN_S, but between the two.
_LEAST_SHARE, _MOST_SHARE, _WITHIN_S = 0.01, 0.5, 0.25
# A delta that is older than this, in seconds, is behind: it is written as fast as lookups can bear.
_BEHIND_S = 2.0
# Seconds until a delta that was refused is tried again.
_RETRY_S = 2.0
# Bytes of a copy that are mapped at once, see madvise(2).
_MAPPED_AT_ONCE, _POPULATE_WRITE = 512 << 20, 23
_START_AGAIN = "bring it back, or start the server again, which applies what is there"
# A copy that no model uses is removed after so many seconds. Until then, a model that is loaded anew finds it.
_UNUSED_S = 10.0


def main(server: str) -> None:
    """Apply deltas until the parent ends.

    Args:
        server: the name of the server, see `LIVE_SERVER`.
    """
    parent = os.getppid()
    copies: dict[Path, AppliedCopy] = {}
    gc.disable()  # a collection would hold up lookups; nothing here makes cycles
    next_look = 0.0
    while os.getppid() == parent:
        now = time.monotonic()
        if now >= next_look:
            next_look = now + _LOOKS_S
            _look(server, copies)
        for copy in copies.values():
            if time.monotonic() >= copy.next_at:
                copy.step()
        wake = min([next_look, *(copy.next_at for copy in copies.values())])
        time.sleep(max(wake - time.monotonic(), 0.0))


def _look(server: str, copies: "dict[Path, AppliedCopy]") -> None:
    """Take new copies, and let those go that nobody uses."""
    for path in {*live_copies(server)} - copies.keys():
        with suppress(OSError, ServingError):  # it was just removed; a model that waits for it says that it waited
            copies[path] = AppliedCopy(LiveCopy.attach(path))
    for path, copy in [*copies.items()]:
        if copy.is_unused():
            del copies[path]
            copy.close()


class AppliedCopy:
    """A live copy, and where it is in its lineage.

    Args:
        copy: what is written to.

    Attributes:
        next_at: when the next `step` is due, by `time.monotonic`.

    Raises:
        ServingError: the manifest of its bundle cannot be read.
    """

    def __init__(self, copy: LiveCopy) -> None:
        self._copy = copy
        self._state = copy.state
        about = copy.state.about
        self._folder = Path(about.deltas)
        self._model, self._lineage = about.model, self._folder.name
        path = Path(about.bundle) / MANIFEST
        try:
            self._manifest: Final = parse_manifest(path, read_file(path))
        except OSError as error:
            raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
        self._shards = shard_rows(copy, self._manifest)
        self._slices: Iterator[float] | None = None
        self._mapped_bytes = 0  # that need no page fault any more when they are written
        self._rows = _FIRST_ROWS  # of a slice
        self._left = 0  # rows of the present delta that are not written
        self._due_at = 0.0  # when it should be written, by time.monotonic
        self._written_at = 0.0
        self._refused: object = None
        self._retry_at = 0.0  # when what was refused is tried again, by time.monotonic
        # What tells the file that was applied last from another, and the one that is being applied.
        self._applied: object = None
        self._reading: object = None
        self._is_other = False
        self._used_at = time.monotonic()
        # The newest delta that was there when the copy was taken: a model that is loaded waits for it.
        self._awaited = 0
        with suppress(OSError):  # the folder cannot be read: the first step says so
            self._awaited = max(listed(self._folder), default=0)
        self.next_at = 0.0

    def close(self) -> None:
        """Let the copy go."""
        self._copy.close()

    def is_unused(self) -> bool:
        """Whether no model has used the copy for `_UNUSED_S`. It is removed then."""
        now = time.monotonic()
        if self._copy.is_used():
            self._used_at = now
        return now >= self._used_at + _UNUSED_S and self._copy.remove()

    def step(self) -> None:
        """Write a slice, or begin with the next delta; and say when the next step is due."""
        if self._slices is None:
            self._slices = self._begin()
        took_s = None if self._slices is None else next(self._slices, None)
        if took_s is not None:
            self.next_at = time.monotonic() + took_s * (1 / self._share() - 1)
            return
        is_applied = self._slices is not None
        self._slices = None
        self.next_at = time.monotonic() + (0.0 if is_applied else _LOOKS_S)

    def _share(self) -> float:
        if not self._state.is_caught_up:
            return 1.0
        if time.time() - self._written_at > _BEHIND_S:
            return _MOST_SHARE
        left_s = self._left * _SLICE_S / self._rows
        until_s = max(self._due_at - time.monotonic(), _SLICE_S)
        return min(max(left_s / until_s, _LEAST_SHARE), _MOST_SHARE)

    def _begin(self) -> Iterator[float] | None:
        """The slices of the next delta. None: it is not there, or cannot be applied."""
        delta = self._next()
        if delta is None or delta.sequence > self._awaited:
            self._state.note_caught_up()
        if delta is None:
            self._map_more()
            return None
        self._written_at = delta.written_at
        return self._apply(delta)

    def _map_more(self) -> None:
        """Map pages while there is nothing to write: a page fault takes longer than to write the rows of the page."""
        pages = self._copy.pages
        size = min(_MAPPED_AT_ONCE, len(pages) - self._mapped_bytes)
        if size:
            with suppress(OSError):  # a kernel before 5.14
                pages.madvise(_POPULATE_WRITE, self._mapped_bytes, size)
            self._mapped_bytes += size

    def _next(self) -> Delta | None:
        """The next delta. None: it is not there, or cannot be applied, which the state says."""
        sequence = self._state.sequence + 1
        path = delta_path(self._folder, sequence)
        seen = None
        try:
            self._check_applied()
            seen = _identity(path)
            if seen is not None and seen == self._refused and time.monotonic() < self._retry_at:
                return None
            delta = None if seen is None else self._read(path, sequence)
        except Exception as error:
            why = str(error) if isinstance(error, ServingError) else f"{path}: cannot be read: {error!r}"
            self._refuse(seen, why)
            return None
        self._refused, self._reading = None, seen
        self._state.note_stopped("")
        return delta

    def _refuse(self, seen: object, why: str) -> None:
        """Say why the next delta is not applied. It is tried again: its signature or a key may come later."""
        self._refused, self._retry_at = seen, time.monotonic() + _RETRY_S
        self._state.note_stopped(why)

    def _check_applied(self) -> None:
        """Refuse to go on if the newest delta that was applied is gone, or another has its number now.

        If another has it, the rows here are those of another history, and stay so. A copy of the same bytes in its
        place is no other: what brings deltas from elsewhere may bring them again. What is gone may come back.

        Raises:
            BundleError: naming it.
        """
        digest = self._state.written.get(self._state.sequence)
        if digest is None:
            return
        path = delta_path(self._folder, self._state.sequence)
        found = _identity(path)
        if found is not None and found != self._applied:
            self._is_other = self._is_other or delta_digest(path, self._manifest) != digest
            self._applied = found
        if self._is_other or found is None:
            raise BundleError(f"{path}: was applied, and is gone or another by now: {_START_AGAIN}")

    def _read(self, path: Path, sequence: int) -> Delta:
        """A delta whose bytes were checked.

        Raises:
            BundleError: it cannot be applied.
            ConfigurationError: the trusted keys cannot be read.
        """
        content = read_delta(path, self._manifest)
        if (keys := TrustedKeys.of_environment()) is not None:  # read each time: keys are changed while servers run
            keys.check_delta(path, content, delta_signature(path, content), self._model, self._lineage)
        delta = parse_delta(path, content, self._manifest, self._lineage, sequence)
        if self._state.written.get(sequence, delta.digest) != delta.digest:
            raise BundleError(f"{path}: was applied in part, and is another by now: {_START_AGAIN}")
        return delta

    def _apply(self, delta: Delta) -> Iterator[float]:
        """Write the rows of a delta, a slice at each step. It yields the processor's time for that, in seconds."""
        begun = self._state.half_written  # by an applier that was killed: what came before is written
        self._left = sum(len(each.ids) for each in delta.tables.values())
        self._due_at = time.monotonic() + _WITHIN_S
        place = 0
        self._state.note_begun(delta.sequence, delta.digest)
        for name, (ids, rows) in delta.tables.items():
            start = 0 if begun is None else min(max(begun[0] - place, 0), len(ids))
            while start < len(ids):
                stop = min(start + self._rows, len(ids)) if begun is None else begun[1] - place
                begun = None
                parts = [each.part(ids[start:stop], rows[start:stop]) for each in self._shards[name]]
                began = time.thread_time()  # without what others took of the core meanwhile
                with self._state.writing(place + start, stop - start):
                    for target, at, columns in parts:
                        target[at] = columns
                took_s = time.thread_time() - began
                self._adapt(took_s, stop - start)
                self._left -= stop - start
                yield took_s
                start = stop
            place += len(ids)
        self._applied = self._reading
        self._state.note_applied(delta.sequence)

    def _adapt(self, took_s: float, rows: int) -> None:
        """Make the next slice as long as `_SLICE_S`, at most twice as long as the last."""
        if rows >= self._rows:  # else it was the rest of a table
            self._rows = max(1, int(rows * min(2.0, _SLICE_S / max(took_s, 1e-9))))


def _identity(path: Path) -> object:
    """Tells one file at a path from another that took its place. None: there is none.

    Raises:
        BundleError: nobody can tell.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


if __name__ == "__main__":
    main(*sys.argv[1:])
