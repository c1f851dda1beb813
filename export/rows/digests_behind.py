"""SHA-256 of the ranks' files while they are being written: a thread follows behind the writes."""

import hashlib
import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from serving.bundle.digests import FileDigest
from serving.bundle.manifest import Manifest
from serving.bundle.plan import Shard

_READ_BYTES = 1 << 18  # stays in a core's cache between being read and hashed


class DigestsBehind:
    """The digests of files that are written during a `with` block.

    Each file is read from its start as far as every byte is written. So what is hashed is what the file holds,
    padding and all. Where shards of one table lie on one rank, the rest of its file is read in `finish`.

    Args:
        files_of_ranks: the files, by number of the rank. They are made if they are missing.
        manifest: tables and plan.
    """

    def __init__(self, files_of_ranks: Mapping[int, Path], manifest: Manifest) -> None:
        self._files_of_ranks = files_of_ranks
        row_bytes = {table.name: table.dtype.row_bytes for table in manifest.tables}
        # Of each rank: its shards in the order of the file, and the bytes of a row.
        self._shards: dict[int, list[tuple[Shard, int]]] = {rank: [] for rank in files_of_ranks}
        for shard in sorted(manifest.plan.shards, key=lambda each: each.offset_bytes):
            if shard.rank in files_of_ranks:
                self._shards[shard.rank].append((shard, row_bytes[shard.table](shard.width)))
        self._written: dict[str, int] = {}
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        buffer = memoryview(bytearray(_READ_BYTES))  # for all, since one thread reads
        with ExitStack() as stack:
            self._followed = {
                rank: _Followed(stack.enter_context(path.open("a+b", buffering=0)).fileno(), buffer)
                for rank, path in self._files_of_ranks.items()
            }
            self._thread = ThreadPoolExecutor(1)
            stack.callback(self._thread.shutdown, cancel_futures=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def written(self, table: str, stop: int) -> None:
        """Every row of `table` below `stop`, of those that these ranks have, is written.

        Raises:
            OSError: a file cannot be read.
        """
        self._written[table] = stop
        for rank, shards in self._shards.items():
            if any(shard.table == table for shard, _ in shards):
                self._follow(rank, self._whole_bytes(rank))
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft().result()

    def finish(self) -> dict[int, FileDigest]:
        """The digests of the files, by number of the rank. They are complete.

        Raises:
            OSError: a file cannot be read.
        """
        sizes = {rank: os.fstat(followed.file).st_size for rank, followed in self._followed.items()}
        for rank, size in sizes.items():
            self._follow(rank, size)
        for task in self._waiting:
            task.result()
        return {
            rank: FileDigest(size_bytes=sizes[rank], sha256=followed.sha256.hexdigest())
            for rank, followed in self._followed.items()
        }

    def _whole_bytes(self, rank: int) -> int:
        """How many bytes at the start of a rank's file are written."""
        whole = 0
        for shard, row_bytes in self._shards[rank]:
            rows = min(max(self._written.get(shard.table, 0) - shard.rows[0], 0), shard.height)
            if rows:  # else the padding before it is not there yet
                whole = shard.offset_bytes + rows * row_bytes
            if rows < shard.height:
                break
        return whole

    def _follow(self, rank: int, stop: int) -> None:
        self._waiting.append(self._thread.submit(self._followed[rank].hash_to, stop))


class _Followed:
    """A file, as far as it was hashed."""

    def __init__(self, file: int, buffer: memoryview) -> None:
        self.file = file
        self._buffer = buffer
        self.sha256 = hashlib.sha256()
        self._hashed = 0

    def hash_to(self, stop: int) -> None:
        """Hash the bytes that follow, up to `stop`."""
        while self._hashed < stop:
            read = os.preadv(self.file, [self._buffer[: stop - self._hashed]], self._hashed)
            if not read:
                raise OSError(f"expected {stop} bytes, got {self._hashed}: the file shrank while it was written")
            self.sha256.update(self._buffer[:read])
            self._hashed += read
