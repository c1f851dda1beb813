"""The weights files of a bundle's ranks, mapped into memory."""

import hashlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from serving.bundle.load import check_digest, check_sha256
from serving.bundle.manifest import Manifest
from serving.bundle.plan import Plan
from serving.errors import BundleError, ConfigurationError
from serving.model.settings import WeightsMemory
from serving.tables.huge_page_copy import SharedCopies
from serving.tables.memory_budget import most_weights_bytes, weights_of_others
from serving.tables.mutable_tables import LiveCopy, offsets_of
from serving.tables.pages import HUGE_PAGE, MappedFile, leave_out_of_memory
from serving.tables.read_ahead import ReadAhead

# Seconds between checks for free memory.
_CHECK_PERIOD_S = 1.0


class PagesUsed(NamedTuple):
    """Bytes of the weights files that a process has mapped.

    Attributes:
        mapped: all mapped bytes.
        huge: the bytes in pages of 2 MiB.
        most_huge: the maximum for `huge`: a part of a file that does not fill a huge page does not count.
    """

    mapped: int
    huge: int
    most_huge: int


class TableFiles:
    """The weights files of a bundle's ranks, mapped. A row is read from the disk when it is first needed.

    Files are read as a whole by `verify` and `populate`, for WeightsMemory.LOCKED, and to make a copy for
    WeightsMemory.HUGE and LIVE.

    Args:
        directory: the folder of the bundle.
        manifest: the manifest of the bundle.
        memory: where the files are held.
        processes: how many processes of this machine map the files, this one included.

    Attributes:
        tensors: for each rank the bytes of its file, uint8 [size of the file], read-only and not copied; uint8 [0]
            for a rank on another host.
        fits: whether memory holds the files beside the files of other served bundles. While it does not, rows are
            read from the disk when they are needed.
        ahead: requests the rows of a batch from the disk before its lookup. None while memory holds the files.
        live: for WeightsMemory.LIVE, the copy whose memory `tensors` share. Read rows inside `live.state.read`.

    Raises:
        BundleError: a file cannot be mapped.
        ConfigurationError: this machine cannot hold the files as `memory` says. The message says what it lacks.
        ServerUnavailable: for WeightsMemory.LIVE, the existing deltas are not being applied.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        memory: WeightsMemory = WeightsMemory.MAPPED,
        processes: int = 1,
    ) -> None:
        sizes = {name: (directory / name).stat().st_size for name in sorted(manifest.weights_files)}
        self._directory = directory
        self._manifest = manifest
        self._most_alone = partial(most_weights_bytes, processes, is_pinned=memory is not WeightsMemory.MAPPED)
        self._size_bytes = sum(sizes.values())
        self._paths = [directory / name for name in sizes]
        self.fits = self._size_bytes <= self._free_bytes()
        lacks = "" if self.fits else self._lacks()
        self._copies = SharedCopies(lacks=lacks) if memory is WeightsMemory.HUGE else None
        self.live = LiveCopy.take(directory, manifest, lacks) if memory is WeightsMemory.LIVE else None
        # Copies are compared with their digests when they are made.
        self._is_copied = self._copies is not None or self.live is not None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._files: dict[str, MappedFile] = {}
        for name, size in sizes.items():
            if size:  # otherwise the rank has no shards, and an empty file cannot be mapped
                self._files[name] = self._map(name, size)
        self.tensors = _tensors(manifest.plan, self._files)
        if self._is_copied:  # memory was reserved for it
            self.fits = True
        self._is_kept = memory is not WeightsMemory.MAPPED
        self._is_populated = False
        # Files of other bundles, which take the memory that this one needs.
        self._waited_for: set[Path] = set()
        self.ahead = None if self.fits else self._read_ahead_of_all()
        if memory is WeightsMemory.LOCKED:
            self._lock()
        if self.live is not None:
            self.live.wait_until_caught_up()

    def _map(self, name: str, size: int) -> MappedFile:
        path, start = self._directory / name, 0
        if self._copies is not None:
            path = self._copies.take(path, self._manifest.files[name])
        elif self.live is not None:
            path, start = self.live.path, offsets_of(self._manifest)[name]
        try:
            return MappedFile(path, size, huge=self.fits or self._is_copied, start=start)
        except OSError as error:
            raise BundleError(
                f"{path}: cannot be mapped: {error.strerror}: it takes address space, and memory only as it is read: "
                "look at `ulimit -v` and the limits of the container"
            ) from error

    def verify(self) -> None:
        """Read all files, and compare them with their digests. If they fit, they are in memory afterwards.

        Raises:
            BundleError: a file differs, or cannot be read.
        """
        if self._is_copied:
            return
        for name, file in self._files.items():
            if not self.fits:
                check_digest(file.path, self._manifest.files[name], follow=True)
                continue
            sha256 = hashlib.sha256()
            for chunk in _next_read(file):
                sha256.update(chunk)
            check_sha256(file.path, sha256.hexdigest(), self._manifest.files[name])

    def populate(self, report: Callable[[PagesUsed], None] = lambda _: None) -> None:
        """Read all files into memory on another thread, while lookups continue.

        From now on, memory is checked every `_CHECK_PERIOD_S` seconds, because other bundles may be unloaded and the
        limit of the control group may change. The files are read as soon as they fit. When they no longer fit, rows
        are again read when they are needed.

        Args:
            report: called on that thread each time all files are in memory.
        """
        if self._thread is None and any(mapped.bytes.size >= HUGE_PAGE for mapped in self._files.values()):
            # A weak reference: while the thread waits, it must not keep these files mapped.
            arguments = (weakref.ref(self), self._stopping, report)
            self._thread = threading.Thread(target=_keep_populated, args=arguments, name="weights", daemon=True)
            self._thread.start()

    def look(self, report: Callable[[PagesUsed], None]) -> None:
        """Check memory once: read the files into memory if they now fit, or return to single rows if they do not.

        The thread of `populate` calls it.

        Raises:
            OSError: a file cannot be read.
        """
        if not self._is_populated:
            if self.fits or self._fits_now():
                self._populate(report)
        elif not self._is_kept and self._size_bytes > self._most_alone():
            ahead = self._read_ahead_of_all()
            for file in self._files.values():
                file.read_row_by_row()
            self.fits, self._is_populated, self.ahead = False, False, ahead

    def _populate(self, report: Callable[[PagesUsed], None]) -> None:
        for name, file in self._files.items():
            if self._is_copied:
                file.populate()
                continue
            for _ in file.chunks(partial(self._end_read_ahead, name)):
                if self._stopping.is_set():
                    return
        self._is_populated, self.ahead = True, None
        report(self.used())

    def _end_read_ahead(self, name: str, stop: int) -> None:
        """End read-ahead for bytes [0, stop) of a file, because it reads small pages, and huge pages are read now."""
        if self.ahead is not None:
            self.ahead.leave_out(name, stop)

    def _fits_now(self) -> bool:
        """Whether the files fit now, as after another bundle was unloaded or the control group's limit was raised."""
        if self._size_bytes > self._most_alone():
            return False
        if self._size_bytes > self._free_bytes():
            self._waited_for |= {*self._of_others()}
            return False
        # Drop the pages of unloaded bundles. They would stay, and leave few huge pages free.
        for path in self._waited_for - {*self._of_others()}:
            leave_out_of_memory(path)
        self._waited_for.clear()
        for file in self._files.values():
            file.huge = True
        self.fits = True
        return True

    def _read_ahead_of_all(self) -> ReadAhead:
        return ReadAhead(self._manifest, {name: self._directory / name for name in self._files})

    def _free_bytes(self) -> int:
        """The memory that the files of other bundles leave for this one, in bytes."""
        return self._most_alone() - sum(self._of_others().values())

    def _lacks(self) -> str:
        free = max(self._free_bytes(), 0)
        return (
            f"{self._directory} has {self._size_bytes} bytes of weights; the memory of this machine, or of its "
            f"control group, has room for {free} beside other bundles that are served, and a quarter of a GB for "
            "each process"
        )

    def _of_others(self) -> dict[Path, int]:
        return weights_of_others(self._directory, self._paths)

    def used(self) -> PagesUsed:
        """The bytes that this process has mapped, and those in huge pages."""
        files = self._files.values()
        return PagesUsed(
            mapped=sum(mapped.bytes.size for mapped in files),
            huge=sum(mapped.huge_bytes() for mapped in files),
            most_huge=sum(mapped.bytes.size // HUGE_PAGE * HUGE_PAGE for mapped in files),
        )

    def why_small(self) -> str:
        """Why some pages are small: what this machine lacks for huge pages."""
        if self._size_bytes > self._free_bytes():
            return self._lacks()
        return next((mapped.why_small() for mapped in self._files.values()), "there is nothing to map")

    def close(self) -> None:
        """Stop populating, and release the copies."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        for copy in (self._copies, self.live):
            if copy is not None:
                copy.close()

    def _lock(self) -> None:
        if not self.fits:
            raise ConfigurationError(
                f"weights-memory 'locked': {self._lacks()}: give it more, unload what else is served, or set 'mapped'"
            )
        for file in self._files.values():
            try:
                file.lock()
            except OSError as error:
                raise ConfigurationError(
                    f"weights-memory 'locked': {file.path} cannot be locked: {error.strerror}: it has "
                    f"{file.bytes.size} bytes: look at `ulimit -l`, or give the container the capability IPC_LOCK"
                ) from error


def _keep_populated(
    of: "weakref.ref[TableFiles]", stopping: threading.Event, report: Callable[[PagesUsed], None]
) -> None:
    """Check memory every `_CHECK_PERIOD_S`, until the files are closed or unreferenced, or one cannot be read."""
    while (weights := of()) is not None and not stopping.is_set():
        try:
            weights.look(report)
        except OSError:  # the kernel's log has the reason; a lookup of such a page kills this process
            return
        del weights
        stopping.wait(_CHECK_PERIOD_S)


def _tensors(plan: Plan, files: dict[str, MappedFile]) -> list[torch.Tensor]:
    with warnings.catch_warnings():
        # torch has no read-only tensors. The program does not write to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return [
            torch.from_numpy(files[rank.weights_file].bytes)
            if rank.weights_file in files
            else torch.empty(0, dtype=torch.uint8)
            for rank in plan.ranks
        ]


def _next_read(file: MappedFile) -> Iterator[memoryview]:
    """The chunks of a file. The next one is read while the caller works on the last.

    Raises:
        BundleError: the file cannot be read.
    """
    chunks = file.chunks()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, chunks, None)
        while True:
            try:
                chunk = coming.result()
            except OSError as error:
                raise BundleError(
                    f"{file.path}: cannot be read: {error.strerror}: publish the bundle again"
                ) from error
            if chunk is None:
                return
            coming = pool.submit(next, chunks, None)
            yield chunk.data
