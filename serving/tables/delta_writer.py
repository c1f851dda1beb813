"""The delta writer: the process that writes deltas to the live copies of a server. `tbe-serve run` starts it.

Lookups wait while a row is half written, so the writer is a separate process, in which nothing waits for Python's
lock or for another thread. It reads the folders of deltas every `_CHECK_PERIOD_S`, checks a whole delta, and writes
its rows in slices of at most `_SLICE_S`. It sleeps between slices, so that lookups wait for about 1 % of the time;
longer if a delta is large or a copy lacks many deltas.

The writer waits for a missing number. It stops at a delta that cannot be read, has no signature by a trusted key, or
does not fit, until the delta is replaced. The model keeps serving. If several deltas are squashed into one file, the
writer applies that file.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from serving.bundle.delta import Delta, find_step, open_delta
from serving.bundle.lineage import Step, delta_path, next_step, squashed_in, steps_in
from serving.bundle.manifest import MANIFEST
from serving.bundle.parse import parse_manifest
from serving.bundle.signature import TrustedKeys
from serving.errors import BundleError, ServingError
from serving.files import read_file
from serving.tables.mutable_tables import LiveCopy, live_copies, shard_rows

# Seconds between checks of the folders.
_CHECK_PERIOD_S = 0.2
# Seconds between lists of a folder, which may have thousands of deltas. Only squashed deltas need a list: the next
# delta is found by its name.
_LIST_PERIOD_S = 1.0
# The longest slice, in seconds, and the rows of the first one.
_SLICE_S, _FIRST_ROWS = 0.0005, 1000
# The share of the time in which rows are written, within these bounds: as much as writes a delta within _WITHIN_S.
_LEAST_SHARE, _MOST_SHARE, _WITHIN_S = 0.01, 0.5, 0.25
# A delta that is older than this, in seconds, is late: it is written with the largest share.
_BEHIND_S = 2.0
# Seconds until a delta that was refused is tried again.
_RETRY_S = 2.0
# Bytes of a copy that are mapped at once, see madvise(2).
_MAPPED_AT_ONCE, _POPULATE_WRITE = 512 << 20, 23
_START_AGAIN = "bring it back, or start the server again, which applies what is there"
# Seconds until a copy that no model uses is removed. A model that is loaded again before then takes it.
_UNUSED_S = 10.0


def main(server: str) -> None:
    """Apply deltas until the parent ends.

    Args:
        server: the name of the server, see `LIVE_SERVER`.
    """
    parent = os.getppid()
    copies: dict[Path, AppliedCopy] = {}
    gc.disable()  # a garbage collection would delay lookups, and nothing here makes cycles
    next_look = 0.0
    while os.getppid() == parent:
        now = time.monotonic()
        if now >= next_look:
            next_look = now + _CHECK_PERIOD_S
            _look(server, copies)
        for copy in copies.values():
            if time.monotonic() >= copy.next_at:
                copy.step()
        wake = min([next_look, *(copy.next_at for copy in copies.values())])
        time.sleep(max(wake - time.monotonic(), 0.0))


def _look(server: str, copies: "dict[Path, AppliedCopy]") -> None:
    """Take new copies, and close the copies that no model uses."""
    for path in {*live_copies(server)} - copies.keys():
        with suppress(OSError, ServingError):  # it was just removed; a model that waits for it raises an error
            copies[path] = AppliedCopy(LiveCopy.attach(path))
    for path, copy in [*copies.items()]:
        if copy.is_unused():
            del copies[path]
            copy.close()


class AppliedCopy:
    """A live copy, and the deltas of its lineage that are applied to it.

    Args:
        copy: the live copy.

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
        path = Path(about.bundle) / MANIFEST
        try:
            self._manifest: Final = parse_manifest(path, read_file(path))
        except OSError as error:
            raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
        self._shards = shard_rows(copy, self._manifest)
        self._slices: Iterator[float] | None = None
        self._mapped_bytes = 0  # these pages can be written without page faults
        self._rows = _FIRST_ROWS  # of a slice
        self._rows_left = 0  # rows of the current delta that are not written yet
        self._due_at = 0.0  # when the current delta should be written, by time.monotonic
        self._written_at = 0.0
        self._refused: object = None
        self._retry_at = 0.0  # when the refused delta is tried again, by time.monotonic
        # The file that was applied last, and the file that is being applied, each with its `_identity`.
        self._applied: tuple[Path, object] = Path(), None
        self._reading: tuple[Path, object] = Path(), None
        self._is_other = False
        self._used_at = time.monotonic()
        self._squashed: list[Step] = []
        self._lists_at = 0.0  # by time.monotonic
        # The newest delta when the copy was taken: a model that is being loaded waits for it.
        self._awaited = 0
        with suppress(OSError):  # the folder cannot be read; the first step reports it
            self._awaited = max((step.sequence for step in steps_in(self._folder)), default=0)
        self.next_at = 0.0

    def close(self) -> None:
        """Release the copy."""
        self._copy.close()

    def is_unused(self) -> bool:
        """Whether no model has used the copy for `_UNUSED_S`, so that it can be removed."""
        now = time.monotonic()
        if self._copy.is_used():
            self._used_at = now
        return now >= self._used_at + _UNUSED_S and self._copy.remove()

    def step(self) -> None:
        """Write a slice, or begin the next delta. Then set `next_at`."""
        if self._slices is None:
            self._slices = self._begin()
        took_s = None if self._slices is None else next(self._slices, None)
        if took_s is not None:
            self.next_at = time.monotonic() + took_s * (1 / self._share() - 1)
            return
        is_applied = self._slices is not None
        self._slices = None
        self.next_at = time.monotonic() + (0.0 if is_applied else _CHECK_PERIOD_S)

    def _share(self) -> float:
        if not self._state.is_caught_up:
            return 1.0
        if time.time() - self._written_at > _BEHIND_S:
            return _MOST_SHARE
        left_s = self._rows_left * _SLICE_S / self._rows
        until_s = max(self._due_at - time.monotonic(), _SLICE_S)
        return min(max(left_s / until_s, _LEAST_SHARE), _MOST_SHARE)

    def _begin(self) -> Iterator[float] | None:
        """The slices of the next delta, or None if it does not exist or cannot be applied."""
        delta = self._next()
        if delta is None or self._state.sequence >= self._awaited:
            self._state.note_caught_up()
        if delta is None:
            self._map_more()
            return None
        self._written_at = delta.written_at
        return self._apply(delta)

    def _map_more(self) -> None:
        """Map pages while there is nothing to write: a page fault takes longer than writing the rows of the page."""
        pages = self._copy.pages
        size = min(_MAPPED_AT_ONCE, len(pages) - self._mapped_bytes)
        if size:
            with suppress(OSError):  # a kernel before 5.14
                pages.madvise(_POPULATE_WRITE, self._mapped_bytes, size)
            self._mapped_bytes += size

    def _next(self) -> Delta | None:
        """The next delta, or None if it does not exist or cannot be applied. The state has the reason then."""
        path, identity = self._folder, None
        try:
            self._check_applied()
            step = self._next_step()
            path = delta_path(self._folder, *step)
            identity = _identity(path)
            if identity is not None and (path, identity) == self._refused and time.monotonic() < self._retry_at:
                return None
            delta = None if identity is None else self._read(step)
        except Exception as error:
            why = str(error) if isinstance(error, ServingError) else f"{path}: cannot be read: {error!r}"
            # It is tried again, because a key may be added.
            self._refused, self._retry_at = (path, identity), time.monotonic() + _RETRY_S
            self._state.note_stopped(why)
            return None
        self._refused, self._reading = None, (path, identity)
        self._state.note_stopped("")
        return delta

    def _next_step(self) -> Step:
        """The next step: squashed deltas if they can be applied, else the next delta, which may not exist yet.

        A delta that a killed delta writer has written in part comes first.

        Raises:
            BundleError: that delta was removed or replaced.
        """
        applied, begun = self._state.sequence, self._state.begun
        if begun != applied:
            step = find_step(self._folder, begun, self._state.written[begun], self._manifest, as_last=False)
            if step is None:
                path = delta_path(self._folder, begun)
                raise BundleError(f"{path}: was applied in part, and was removed or replaced since: {_START_AGAIN}")
            return step
        if time.monotonic() >= self._lists_at:
            self._lists_at = time.monotonic() + _LIST_PERIOD_S
            self._squashed = squashed_in(self._folder)
        return next_step(self._squashed, applied)

    def _check_applied(self) -> None:
        """Refuse to continue if the newest applied delta was removed or replaced by another one.

        If it was replaced, the rows of this copy have another history, and the refusal is final. A removed delta may
        be restored. A new file with the same bytes is the same delta, because a mirror of an object store may fetch
        it again; so is a squashed delta that ends with it.

        Raises:
            BundleError: the delta was removed or replaced.
        """
        sequence = self._state.sequence
        digest = self._state.written.get(sequence)
        if digest is None:
            return
        path, identity = self._applied
        if identity is not None and identity == _identity(path):
            return
        path = delta_path(self._folder, sequence)
        step = None if self._is_other else find_step(self._folder, sequence, digest, self._manifest, as_last=True)
        if step is None:
            self._is_other = self._is_other or _identity(path) is not None
            raise BundleError(f"{path}: was applied, and was removed or replaced since: {_START_AGAIN}")
        path = delta_path(self._folder, *step)
        self._applied = path, _identity(path)

    def _read(self, step: Step) -> Delta:
        """A delta whose bytes were checked.

        Raises:
            BundleError: the delta cannot be applied.
            ConfigurationError: the trusted keys cannot be read.
        """
        keys = TrustedKeys.of_environment()  # read each time, because keys change while servers run
        delta = open_delta(self._folder, step, self._manifest, keys)
        if self._state.written.get(step.sequence, delta.digest) != delta.digest:
            path = delta_path(self._folder, *step)
            raise BundleError(f"{path}: was applied in part, and was replaced since: {_START_AGAIN}")
        return delta

    def _apply(self, delta: Delta) -> Iterator[float]:
        """Write the rows of a delta slice by slice. Yields the processor time of each slice, in seconds."""
        begun = self._state.half_written  # a killed delta writer wrote the rows before it
        self._rows_left = sum(len(changed.ids) for changed in delta.tables.values())
        self._due_at = time.monotonic() + _WITHIN_S
        rows_written = 0
        self._state.note_begun(delta.sequence, delta.digest)
        for name, (ids, rows) in delta.tables.items():
            start = 0 if begun is None else min(max(begun[0] - rows_written, 0), len(ids))
            while start < len(ids):
                stop = min(start + self._rows, len(ids)) if begun is None else begun[1] - rows_written
                begun = None
                parts = [shard_rows.part(ids[start:stop], rows[start:stop]) for shard_rows in self._shards[name]]
                began = time.thread_time()  # excludes the time that other processes had the core
                with self._state.writing(rows_written + start, stop - start):
                    for target, offset, columns in parts:
                        target[offset] = columns
                took_s = time.thread_time() - began
                if stop - start >= self._rows:  # otherwise the slice was the rest of a table
                    growth = min(2.0, _SLICE_S / max(took_s, 1e-9))
                    self._rows = max(1, int((stop - start) * growth))
                self._rows_left -= stop - start
                yield took_s
                start = stop
            rows_written += len(ids)
        self._applied = self._reading
        self._state.note_applied(delta.last_digest)


def _identity(path: Path) -> object:
    """A value that changes when the file at a path is replaced, or None if there is no file.

    Raises:
        BundleError: the file cannot be read.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


if __name__ == "__main__":
    main(*sys.argv[1:])
