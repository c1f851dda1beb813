"""The files of deltas: how one is written under a number that nobody else has, and what a host gets of it."""

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import save

from export.errors import PublishError
from serving.bundle.delta import (
    FORMAT,
    IDS,
    MOST_DELTAS,
    NO_SHA256,
    ROWS,
    Rows,
    delta_path,
    delta_signature,
    listed,
    sha256_text,
)
from serving.bundle.manifest import Manifest
from serving.bundle.segments import segments_by_rank
from serving.bundle.signature import delta_signature_of
from serving.delta_store import DeltaStore, LiveLineage
from serving.files import replacing, sync_folder


class LineageFolder(NamedTuple):
    """The folder of the deltas of a lineage, <deltas>/<model>/<lineage>.

    Attributes:
        since: deltas up to this number need not be there.
        store: has the deltas, of which the folder has those that are needed here. None: there is the folder alone.
    """

    deltas: Path
    model: str
    lineage: str
    since: int = 0
    store: DeltaStore | None = None

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.deltas / self.model / self.lineage

    @property
    def newest(self) -> int:
        """The number of its newest delta; `since` if there is none behind that.

        Raises:
            PublishError: one is missing before it, which servers wait for; or no number is left.
            ServerUnavailable: the store cannot be reached.
        """
        if self.store is not None:
            self.store.refresh(LiveLineage(self.model, self.lineage, self.since))
        numbers = [number for number in listed(self.path) if number > self.since]
        expected = range(self.since + 1, self.since + 1 + len(numbers))
        missing = next((number for number, found in zip(expected, numbers, strict=True) if number != found), None)
        if missing is not None:
            raise PublishError(
                f"{delta_path(self.path, missing)}: is missing, and {numbers[-1]} is there: servers wait for it: "
                "bring it back, or remove all behind it and publish what changed"
            )
        if (newest := self.since + len(numbers)) == MOST_DELTAS:
            raise PublishError(f"{self.path}: no number is left: export a new version")
        return newest

    def write(self, sequence: int, stored: Mapping[str, Rows], key: Ed25519PrivateKey | None) -> Path | None:
        """Write a delta, as a whole or not at all.

        Args:
            sequence: its number.
            stored: rows as they are stored, by table.
            key: signs it.

        Returns:
            Its path. None: another delta has the number.

        Raises:
            OSError: it cannot be written.
            ServerUnavailable: the store cannot be reached, or lets nobody write.
        """
        content = _content(stored, self.lineage, sequence)
        path = delta_path(self.path, sequence)
        signature = None if key is None else delta_signature(path, content)
        signed = b"" if key is None else delta_signature_of(path.name, content, key, self.model, self.lineage)
        if self.store is not None:
            files = [(path, content)] if signature is None else [(signature, signed), (path, content)]
            return path if self.store.add(files) else None
        if signature is not None:
            with replacing(signature) as file:
                file.write(signed)
        try:
            with replacing(path, is_new=True) as file:
                file.write(content)
        except FileExistsError:
            if signature is not None:
                signature.unlink()
            return None
        sync_folder(self.path)
        return path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """In the block, no other process of machines that share the folder is in such a block.

        Raises:
            OSError: the folder is not there, or its file system has no locks.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _content(stored: Mapping[str, Rows], lineage: str, sequence: int) -> bytes:
    """The file of a delta, see `serving.bundle.delta`."""
    tensors: dict[str, npt.NDArray[np.generic]] = {name + IDS: each.ids for name, each in stored.items()}
    tensors |= {name + ROWS: each.rows for name, each in stored.items()}
    said = {"format": FORMAT, "lineage": lineage, "sequence": f"{sequence}", "written_at": f"{time.time():.6f}"}
    content = save(tensors, said | {"sha256": NO_SHA256})
    digest = hashlib.sha256(content).hexdigest()
    return content.replace(sha256_text(NO_SHA256), sha256_text(digest), 1)


def own_rows(router: Manifest, stored: Mapping[str, Rows]) -> dict[str, Rows]:
    """What the router's own rank has of some rows: whole rows of the tables that it has a shard of."""
    own = {shard.table for shard in router.plan.shards if router.plan.ranks[shard.rank].weights_file is not None}
    return {table: rows for table, rows in stored.items() if table in own}


def host_rows(router: Manifest, host: int, stored: Mapping[str, Rows]) -> dict[str, Rows]:
    """What a host has of some rows, by the tables of its bundle: each is a shard of one of the router's.

    Args:
        router: the router's manifest.
        host: its number.
        stored: whole rows by the router's tables.
    """
    tables = {table.name: table for table in router.tables}
    found = {}
    for segment in segments_by_rank(router)[router.plan.rank_of_host[host]]:
        shard = segment.shard
        if (rows := stored.get(shard.table)) is None:
            continue
        low, high = np.searchsorted(rows.ids, shard.rows)
        if low < high:
            columns = tables[shard.table].shard_columns(rows.rows[low:high], shard)
            found[segment.table] = Rows(rows.ids[low:high] - shard.rows[0], columns)
    return found
