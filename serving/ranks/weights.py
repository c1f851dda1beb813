"""The bytes of ranks, mapped from their files."""

import enum
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

from serving.bundle.digests import check_digest, check_sha256
from serving.bundle.manifest import Manifest
from serving.bundle.plan import Plan
from serving.errors import BundleError, ConfigurationError
from serving.files.page_cache import HUGE_PAGE
from serving.ranks.pages import MappedFile, leave_out_of_memory
from serving.ranks.read_ahead import ReadAhead
from serving.ranks.room import room_alone, weights_of_others
from serving.ranks.shared_copy import SharedCopies
from serving.request.tensors import Batch

# How often it is looked whether there is room by now, in seconds.
_LOOKS_S = 1.0


class WeightsMemory(enum.Enum):
    """Where the weights of a bundle lie while it is served.

    mapped: in the page cache, which all processes of the machine share; in huge pages where the kernel can.
    locked: the same, and never given back (mlock(2)).
    huge: in one copy for all processes, on a file system of huge pages: hugetlbfs, or a tmpfs with `huge=`.
    """

    MAPPED = "mapped"
    LOCKED = "locked"
    HUGE = "huge"


class PagesUsed(NamedTuple):
    """The pages of the weights that a process has mapped, in bytes.

    Attributes:
        mapped: all of them.
        huge: those of 2 MiB.
        most_huge: what huge pages can hold: not the end of a file that is shorter than one.
    """

    mapped: int
    huge: int
    most_huge: int


class Weights:
    """The files of a bundle's ranks, mapped. Nothing is read until it is needed, unless the copy has to be made.

    Args:
        directory: of the bundle.
        manifest: of the bundle; its files are read by `verify`, and where copies are made.
        memory: where they are to lie.
        processes: how many have them mapped on this machine, this one among them.

    Attributes:
        tensors: of each rank, the bytes of its file: uint8 [size of the file], which nobody may write to. Of a rank
            on another host, nothing: uint8 [0].
        fits: whether memory holds them, beside those of other bundles that are served. While it does not, rows are
            read from the disk one by one, as they are needed.

    Raises:
        BundleError: a file cannot be mapped.
        ConfigurationError: this machine cannot keep them where they are to lie; the message says what it lacks.
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
        self._room_alone = partial(room_alone, processes, kept=memory is not WeightsMemory.MAPPED)
        self._size_bytes = sum(sizes.values())
        self._paths = [directory / name for name in sizes]
        self.fits = self._size_bytes <= self._room()
        lacks = "" if self.fits else self._lacks()
        self._copies = SharedCopies(lacks=lacks) if memory is WeightsMemory.HUGE else None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._files: dict[str, MappedFile] = {}
        for name, size in sizes.items():
            if size:  # else a rank without shards: an empty file cannot be mapped
                self._files[name] = self._map(name, size)
        self.tensors = _tensors(manifest.plan, self._files)
        if self._copies is not None:  # they could be made
            self.fits = True
        self._is_kept = memory is not WeightsMemory.MAPPED
        self._is_populated = False
        # What others have, while there is no room.
        self._waited_for: set[Path] = set()
        self._ahead = None if self.fits else self._read_ahead_of_all()
        if memory is WeightsMemory.LOCKED:
            self._lock()

    def _map(self, name: str, size: int) -> MappedFile:
        path = self._directory / name
        if self._copies is not None:
            path = self._copies.take(path, self._manifest.files[name])
        try:
            return MappedFile(path, size, huge=self.fits or self._copies is not None)
        except OSError as error:
            raise BundleError(
                f"{path}: cannot be mapped: {error.strerror}: it takes address space, and memory only as it is read: "
                "look at `ulimit -v` and the limits of the container"
            ) from error

    def verify(self) -> None:
        """Read all files, and compare them with their digests. They are in memory then, as far as they fit.

        Raises:
            BundleError: naming the first file that differs, or cannot be read.
        """
        if self._copies is not None:  # they were compared as they were made
            return
        for name, file in self._files.items():
            if not self.fits:
                check_digest(file.path, self._manifest.files[name], follow=True)
                continue
            sha256 = hashlib.sha256()
            for chunk in _next_read(file):
                sha256.update(chunk)
            check_sha256(file.path, sha256.hexdigest(), self._manifest.files[name])

    def populate(self, done: Callable[[PagesUsed], None] = lambda _: None) -> None:
        """Bring all files into memory while lookups go on, as soon as they fit, and as long as they do.

        Others may leave, and the limit of the control group may change: that is looked for from now on.

        Args:
            done: called when they are, on another thread.
        """
        if self._thread is None and any(each.bytes.size >= HUGE_PAGE for each in self._files.values()):
            # It holds this while it works, and not while it waits: else this would be there as long as the process.
            arguments = (weakref.ref(self), self._stopping, done)
            self._thread = threading.Thread(target=_keep_populated, args=arguments, name="weights", daemon=True)
            self._thread.start()

    def look(self, done: Callable[[PagesUsed], None]) -> None:
        """Do what the room that there is by now asks for. `populate` has it called.

        Raises:
            OSError: a file cannot be read.
        """
        if not self._is_populated:
            if self.fits or self._has_room_now():
                self._populate(done)
        elif not self._is_kept and self._size_bytes > self._room_alone():
            ahead = self._read_ahead_of_all()
            for file in self._files.values():
                file.read_row_by_row()
            self.fits, self._is_populated, self._ahead = False, False, ahead

    def _populate(self, done: Callable[[PagesUsed], None]) -> None:
        for name, file in self._files.items():
            if self._copies is not None:
                file.populate()
                continue
            for _ in file.chunks(partial(self._brings, name)):
                if self._stopping.is_set():
                    return
        self._is_populated, self._ahead = True, None
        done(self.used())

    def _brings(self, name: str, stop: int) -> None:
        """A file is being brought into memory up to here, in large pages. Small ones would be in the way."""
        if self._ahead is not None:
            self._ahead.leave_out(name, stop)

    def _has_room_now(self) -> bool:
        """Whether there is room: others have left, such as the version before this one, or the limit has grown."""
        if self._size_bytes > self._room_alone():
            return False
        if self._size_bytes > self._room():
            self._waited_for |= {*self._of_others()}
            return False
        # Their pages would stay, and there would be few huge ones among what is left.
        for path in self._waited_for - {*self._of_others()}:
            leave_out_of_memory(path)
        self._waited_for.clear()
        for file in self._files.values():
            file.huge = True
        self.fits = True
        return True

    def _read_ahead_of_all(self) -> ReadAhead:
        return ReadAhead(self._manifest, {name: self._directory / name for name in self._files})

    def _room(self) -> int:
        return self._room_alone() - sum(self._of_others().values())

    def _lacks(self) -> str:
        return (
            f"{self._directory} has {self._size_bytes} bytes of weights; the memory of this machine, or of its "
            f"control group, has room for {max(self._room(), 0)} beside other bundles that are served, and a quarter "
            "of a GB for each process"
        )

    def _of_others(self) -> dict[Path, int]:
        return weights_of_others(self._directory, self._paths)

    def read_ahead(self, batch: Batch) -> None:
        """Before a batch is looked up: ask the disk for its rows, if memory does not hold all."""
        if (ahead := self._ahead) is not None:
            ahead.ask(batch)

    def used(self) -> PagesUsed:
        """How this process has mapped them."""
        files = self._files.values()
        return PagesUsed(
            mapped=sum(each.bytes.size for each in files),
            huge=sum(each.huge_bytes() for each in files),
            most_huge=sum(each.bytes.size // HUGE_PAGE * HUGE_PAGE for each in files),
        )

    def why_small(self) -> str:
        """What this machine lacks, where not all is in huge pages."""
        if self._size_bytes > self._room():
            return self._lacks()
        return next((each.why_small() for each in self._files.values()), "there is nothing to map")

    def close(self) -> None:
        """Stop populating, and let the copies go."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._copies is not None:
            self._copies.release()

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


def _keep_populated(of: "weakref.ref[Weights]", stopping: threading.Event, done: Callable[[PagesUsed], None]) -> None:
    """Look again and again, until the weights are gone or closed, or a file cannot be read."""
    while (weights := of()) is not None and not stopping.is_set():
        try:
            weights.look(done)
        except OSError:  # the log of the kernel says why; what needs it ends the process, and is recovered
            return
        del weights
        stopping.wait(_LOOKS_S)


def _tensors(plan: Plan, files: dict[str, MappedFile]) -> list[torch.Tensor]:
    with warnings.catch_warnings():
        # torch has no read-only tensors. The program only reads them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return [
            torch.from_numpy(files[rank.weights_file].bytes)
            if rank.weights_file in files
            else torch.empty(0, dtype=torch.uint8)
            for rank in plan.ranks
        ]


def _next_read(file: MappedFile) -> Iterator[memoryview]:
    """The chunks of a file. The next one is read while the caller works on one.

    Raises:
        BundleError: it cannot be read.
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
