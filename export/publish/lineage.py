"""The lineage of a version, and the writing of deltas to its folder, each under a number of its own."""

import fcntl
import hashlib
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from export.errors import PublishError
from serving.bundle.delta import FORMAT, IDS_SUFFIX, NO_SHA256, ROWS_SUFFIX, ChangedRows, Delta, sha256_text
from serving.bundle.lineage import (
    MOST_DELTAS,
    Step,
    delta_path,
    delta_signature,
    deltas_folder,
    files_in,
    files_of,
    lineage_of_host,
    reached,
    steps_in,
)
from serving.bundle.load import Bundle, newest, open_bundle, open_host
from serving.bundle.manifest import Manifest
from serving.bundle.plan import HostBundle
from serving.bundle.segments import segments_by_rank
from serving.bundle.signature import TrustedKeys, delta_signature_of
from serving.delta_store import DeltaStore, LiveLineage, store_of
from serving.errors import BundleError
from serving.files import replacing, sync_folder


class PublishedDelta(NamedTuple):
    """A delta that is published.

    Attributes:
        path: its file.
        sequence: its number in its lineage.
        version: the version whose lineage it is.
        rows: the number of its rows, of all tables.
        notes: properties of its rows that a reader should know, a line each.
    """

    path: Path
    sequence: int
    version: int
    rows: int
    notes: tuple[str, ...] = ()


class LineageFolder(NamedTuple):
    """The deltas of a lineage, in a folder, <deltas>/<model>/<lineage>, or in a store.

    Attributes:
        deltas: the folder of all deltas.
        model: the model's name.
        name: the lineage's name.
        since: the number of the last delta in the version's own rows, so that the folder needs none up to it.
        store: the store of the deltas. The folder has the ones that this machine needed. None: the folder has
            all of them.
    """

    deltas: Path
    model: str
    name: str
    since: int = 0
    store: DeltaStore | None = None

    @property
    def path(self) -> Path:
        """The folder itself."""
        return self.deltas / self.model / self.name

    def steps(self) -> list[Step]:
        """All its deltas in order, also those of the store that the folder lacks.

        Raises:
            ServerUnavailable: the store cannot be reached.
        """
        return steps_in(self.path) if self.store is None else self.store.steps(self.model, self.name)

    def fetch(self, after: int) -> None:
        """Fetch all deltas after the number `after` into the folder, if they are in a store.

        Raises:
            ServerUnavailable: the store cannot be reached.
        """
        if self.store is not None:
            self.store.bring(self.model, self.name, after, all_files=True)

    def remove(self, steps: Collection[Step]) -> None:
        """Remove deltas and their signatures, and the folder if it is empty then.

        Raises:
            ServerUnavailable: the store cannot be reached, or refuses removals.
        """
        if self.store is not None:
            self.store.remove(self.model, self.name, steps)
            return
        for name in files_of(files_in(self.path), steps):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

    @property
    def newest(self) -> int:
        """The number of its newest delta, or `since` if it has none after that.

        Raises:
            PublishError: an earlier delta is missing, which servers wait for; or no number is left.
            ServerUnavailable: the store cannot be reached.
        """
        if self.store is not None:
            self.store.refresh(LiveLineage(self.model, self.name, self.since))
        steps = [step for step in steps_in(self.path) if step.sequence > self.since]
        newest = reached(steps, self.since)
        if steps and steps[-1].sequence > newest:
            raise PublishError(
                f"{delta_path(self.path, newest + 1)}: is missing, and {steps[-1].sequence} is there: servers wait "
                "for it: restore it, or remove all deltas after it and publish what changed"
            )
        if newest == MOST_DELTAS:
            raise PublishError(f"{self.path}: no number is left: export a new version")
        return newest

    def write(self, sequence: int, stored: Mapping[str, ChangedRows], key: Ed25519PrivateKey | None) -> Path | None:
        """Write a delta, atomically.

        Args:
            sequence: its number.
            stored: rows as they are stored, by table.
            key: signs it.

        Returns:
            Its path. None: another delta has the number.

        Raises:
            OSError: it cannot be written.
            ServerUnavailable: the store cannot be reached, or refuses writes.
        """
        metadata = {"sequence": f"{sequence}", "written_at": f"{time.time():.6f}"}
        return self._write(delta_path(self.path, sequence), metadata, stored, key)

    def write_squashed(self, step: Step, squashed: Delta, key: Ed25519PrivateKey | None) -> Path | None:
        """Write several deltas as one, as `write` does. Returns None if they were squashed before."""
        metadata = {
            "sequence": f"{step.sequence}",
            "since": f"{step.since}",
            "written_at": f"{squashed.written_at:.6f}",
            "last_sha256": squashed.last_digest,
        }
        return self._write(delta_path(self.path, *step), metadata, squashed.tables, key)

    def _write(
        self, path: Path, metadata: dict[str, str], stored: Mapping[str, ChangedRows], key: Ed25519PrivateKey | None
    ) -> Path | None:
        content = _content(stored, {"format": FORMAT, "lineage": self.name} | metadata)
        signature = None if key is None else delta_signature(path, content)
        signed = b"" if key is None else delta_signature_of(path.name, content, key, self.model, self.name)
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
            if signature is not None and path.read_bytes() != content:  # otherwise it signs the existing file
                signature.unlink()
            return None
        sync_folder(self.path)
        return path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock that excludes all processes on machines that share the folder.

        Raises:
            OSError: the folder does not exist, or its file system has no locks.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _content(stored: Mapping[str, ChangedRows], metadata: Mapping[str, str]) -> bytes:
    """The file of a delta, see `serving.bundle.delta`. `metadata` lacks `sha256`, which is computed here."""
    from safetensors.numpy import save  # only publishing needs it; a client-only install prunes, too

    tensors: dict[str, npt.NDArray[np.generic]] = {table + IDS_SUFFIX: rows.ids for table, rows in stored.items()}
    tensors |= {table + ROWS_SUFFIX: rows.rows for table, rows in stored.items()}
    content = save(tensors, {**metadata, "sha256": NO_SHA256})
    digest = hashlib.sha256(content).hexdigest()
    return content.replace(sha256_text(NO_SHA256), sha256_text(digest), 1)


def own_rows(router: Manifest, stored: Mapping[str, ChangedRows]) -> dict[str, ChangedRows]:
    """The changed rows of the tables that the router's own rank has a shard of, as whole rows."""
    ranks = router.plan.ranks
    tables = {shard.table for shard in router.plan.shards if ranks[shard.rank].weights_file is not None}
    return {table: rows for table, rows in stored.items() if table in tables}


def host_rows(router: Manifest, host: int, stored: Mapping[str, ChangedRows]) -> dict[str, ChangedRows]:
    """A host's part of changed rows, by the tables of its bundle. Each is a shard of a table of the router.

    Args:
        router: the router's manifest.
        host: its number.
        stored: whole rows by the router's tables.
    """
    tables = {table.name: table for table in router.tables}
    by_table = {}
    for segment in segments_by_rank(router)[router.plan.rank_of_host[host]]:
        shard = segment.shard
        if (rows := stored.get(shard.table)) is None:
            continue
        low, high = np.searchsorted(rows.ids, shard.rows)
        if low < high:
            columns = tables[shard.table].shard_columns(rows.rows[low:high], shard)
            by_table[segment.table] = ChangedRows(rows.ids[low:high] - shard.rows[0], columns)
    return by_table


def locate_deltas(repository: Path, deltas: Path | str | None) -> tuple[Path, DeltaStore | None]:
    """The folder of all deltas of a repository, and their store. `deltas` is as for `publish_delta`."""
    if (store := store_of(deltas)) is not None:
        return store.folder, store
    return deltas_folder(repository) if deltas is None else Path(deltas), None


@dataclass(frozen=True, slots=True)
class Lineage:
    """The lineage of a version, to which deltas are published.

    Attributes:
        bundle: the version's bundle.
        folder: its deltas.
    """

    bundle: Bundle
    folder: LineageFolder

    @classmethod
    def of_bundle(cls, bundle: Bundle, deltas: Path, store: DeltaStore | None) -> "Lineage":
        """The lineage of a bundle, whose deltas are where `locate_deltas` says."""
        model, since = bundle.path.parent.name, bundle.manifest.sequence
        return cls(bundle, LineageFolder(deltas, model, bundle.lineage, since, store))

    @classmethod
    def of(
        cls,
        repository: Path,
        model: str,
        version: int | None,
        deltas: Path | str | None,
        trusted: TrustedKeys | None = None,
    ) -> "Lineage":
        """The lineage of a version, or of the newest if `version` is None. `deltas` is as for `publish_delta`.

        Raises:
            BundleError: the version cannot be opened, or none of the keys signed it.
            PublishError: it is a host's version, whose deltas are published with its router's.
        """
        number = newest(repository / model) if version is None else version
        bundle = open_bundle(repository / model / str(number), trusted)
        if (part_of := bundle.manifest.part_of) is not None:
            raise PublishError(f"{bundle.path}: is a host of {part_of.model!r}: publish deltas of that")
        return cls.of_bundle(bundle, *locate_deltas(repository, deltas))

    def of_host(self, host: HostBundle, trusted: TrustedKeys | None = None) -> "Lineage":
        """The lineage of a host's bundle in the same repository. Its deltas have the same numbers.

        Raises:
            BundleError: the bundle is missing or a different one, or none of the keys signed it.
        """
        bundle, named = open_host(self.bundle, host, trusted), lineage_of_host(host)
        if bundle.lineage != named:
            raise BundleError(
                f"{bundle.path}: expected the lineage {named}, which {self.bundle.path} names, got {bundle.lineage}"
            )
        return Lineage.of_bundle(bundle, self.folder.deltas, self.folder.store)

    def publish(self, stored: Mapping[str, ChangedRows], key: Ed25519PrivateKey | None) -> PublishedDelta:
        """Write stored rows as the next delta. For a router, write one delta for each host, and then its own.

        Raises:
            PublishError: a folder cannot be written to.
        """
        with self.writing():
            path = self._publish_parts(stored, key) if self.bundle.manifest.hosts else self._publish(stored, key)
        count = sum(len(rows.ids) for rows in stored.values())
        return PublishedDelta(path, int(path.stem), int(self.bundle.path.name), count)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make the folder, and turn an OSError of the block into a PublishError.

        Raises:
            PublishError: the folder cannot be written to.
        """
        try:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            other = "folder, --deltas, here and for servers" if self.folder.store is None else "cache, XDG_CACHE_HOME"
            raise PublishError(
                f"{self.folder.path}: cannot be written: {error.strerror}: name another {other}"
            ) from error

    def _publish(self, stored: Mapping[str, ChangedRows], key: Ed25519PrivateKey | None) -> Path:
        sequence = self.folder.newest + 1
        while (path := self.folder.write(sequence, stored, key)) is None:
            sequence += 1
        return path

    def _publish_parts(self, stored: Mapping[str, ChangedRows], key: Ed25519PrivateKey | None) -> Path:
        """Write a delta for each host and one for the router, under one number. Returns the path of the router's.

        A killed writer may have left some of them without an earlier number. They get an empty delta for it.
        """
        router = self.bundle.manifest
        parts = {
            self.folder._replace(model=host.model, name=lineage_of_host(host)): host_rows(router, host.host, stored)
            for host in router.hosts
        }
        parts[self.folder] = own_rows(router, stored)
        with self.folder.locked():
            for folder in parts:
                folder.path.mkdir(parents=True, exist_ok=True)
            newest = {folder: folder.newest for folder in parts}
            sequence = 1 + max(newest.values())
            for folder, rows in parts.items():
                for missing in range(newest[folder] + 1, sequence):
                    folder.write(missing, {}, key)
                if folder.write(sequence, rows, key) is None:
                    raise PublishError(
                        f"{folder.path}: another writer took number {sequence}: all writers of a model on hosts "
                        "must share a file system with locks, or one machine if they publish in a store"
                    )
        return delta_path(self.folder.path, sequence)
