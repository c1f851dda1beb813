"""The next version of a lineage: of a version and its deltas, or of a model that was trained further."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from export.config import Example, ExportConfig, Progress
from export.errors import PublishError
from export.parity.verify import verify
from export.pipeline import export_model
from export.publish.changes import StoredRows, changed_rows, deltas_of
from export.publish.delta import Lineage
from export.publish.draft import Draft, draft, next_version
from export.trained.checkpoint import WeightSource
from serving.bundle.delta import Delta, Rows
from serving.bundle.manifest import (
    NEWEST_FORMAT_VERSION,
    SCORES_FORMAT_VERSION,
    Compacted,
    Manifest,
    format_version_of,
    write_manifest,
)
from serving.bundle.opening import Bundle, check_digest, digest_file, open_bundle, weights_path
from serving.bundle.plan import HostBundle
from serving.bundle.signature import TrustedKeys, read_signing_key
from serving.errors import ConfigurationError
from serving.files import temporary_folder

# Rows that are compared at once; and how often they are compared anew because somebody else published a delta.
_BLOCK_ROWS, _TRIES = 1 << 16, 10
# Bytes that are copied at once.
_CHUNK_BYTES = 16 << 20


def compact(
    repository: Path | str,
    model: str,
    *,
    version: int | None = None,
    until: int | None = None,
    deltas: Path | str | None = None,
    signing_key: Path | None = None,
    trusted_keys: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Publish the next version of a model: the rows of a version, with those of its deltas.

    The lineage goes on: the next delta is the next one for both versions. So a server may serve either, and one that
    starts with the new version has less to apply. With `until`, the new version begins a lineage of its own, and no
    later delta comes to it: that is how rows are rolled back. Of a model on several hosts, the bundles of these have
    to be in the same repository; each gets the same next version.

    Args:
        repository: the model repository.
        model: the model's name.
        version: the version whose rows are copied; the newest where None.
        until: the last delta that counts. The least is the one that the version's own rows have; 0 if they have none.
            None: all that are there.
        deltas: the folder of all deltas; REPOSITORY.deltas where None.
        signing_key: a PEM file with an Ed25519 private key. None: the new version is not signed.
        trusted_keys: a PEM file with Ed25519 public keys, which must have signed the version and its deltas. None:
            the signing key must have, if there is one.
        progress: called as files are copied.

    Returns:
        The path of the new version.

    Raises:
        BundleError: the version, one of its files or a delta is damaged, cannot be read, or is not signed.
        ConfigurationError: there is no such delta, or a key cannot be read.
        PublishError: there is no delta, one is missing, or the disk is full.
        ParityError: what was written does not answer as it should.
    """
    key = None if signing_key is None else read_signing_key(signing_key)
    # Else a signature would make good what nobody signed.
    trusted = None if key is None or signing_key is None else TrustedKeys(signing_key, (key.public_key(),))
    if trusted_keys is not None:
        trusted = TrustedKeys.read(trusted_keys)
    lineage = Lineage.of(Path(repository), model, version, deltas, trusted)
    bundle, folder = lineage.bundle, lineage.folder
    newest = folder.newest
    if until is None and newest == folder.since:
        raise PublishError(f"{folder.path}: expected deltas of {bundle.path}, found none")
    if until is not None and not folder.since <= until <= newest:
        raise ConfigurationError(f"until: expected a delta of {bundle.path}, {folder.since} to {newest}, got {until}")
    last = newest if until is None else until
    router = bundle.manifest
    parts = [lineage.of_host(host, trusted) for host in router.hosts]
    models = [each.folder.model for each in (*parts, lineage)]
    number = max(next_version(Path(repository) / each) for each in models) if parts else None
    with ExitStack() as stack:
        *drafts, own = (
            stack.enter_context(draft(Path(repository), name, number, _manifest(each, last, until), None, key))
            for name, each in zip(models, (*parts, lineage), strict=True)
        )
        sizes = (each.size_bytes for new in (*drafts, own) for each in new.manifest.files.values())
        copied = _Copied(progress, sum(sizes))
        hosts = {}
        for host, part, new in zip(router.hosts, parts, drafts, strict=True):
            assert number is not None  # noqa: S101  there are hosts
            filled = _filled(new, part, last, trusted, copied, {})
            goes_on = part.name if until is None else None
            named = msgspec.structs.replace(host, version=number, manifest=filled.digest, lineage=goes_on)
            hosts[named] = filled
        _filled(own, lineage, last, trusted, copied, hosts)
        for new in drafts:
            new.publish()
        return own.publish()


def _manifest(lineage: Lineage, last: int, until: int | None) -> Manifest:
    """That of a version with the deltas up to `last`, as far as it is known before its rows are."""
    manifest = lineage.bundle.manifest
    return msgspec.structs.replace(
        manifest,
        format_version=NEWEST_FORMAT_VERSION if until is None else _format_version(manifest),
        compacted=Compacted(lineage.name, last) if until is None else None,
        exported_at=time.time(),
        notes=(*manifest.notes, f"rows of version {lineage.bundle.path.name}, and deltas up to {last}"),
    )


@dataclass(slots=True)
class _Copied:
    """How many bytes of all files are copied."""

    progress: Callable[[Progress], None]
    total: int
    done: int = 0

    def copy(self, source: Path, target: Path) -> None:
        with source.open("rb") as read, target.open("wb") as written:
            while chunk := read.read(_CHUNK_BYTES):
                written.write(chunk)
                self.done += len(chunk)
                self.progress(Progress(source.name, self.done, self.total))


def _filled(
    new: Draft,
    lineage: Lineage,
    last: int,
    trusted: TrustedKeys | None,
    copied: _Copied,
    hosts: Mapping[HostBundle, Bundle],
) -> Bundle:
    """Write a draft: the files of a version, and the rows of its deltas up to `last`. It answers as it should.

    Args:
        hosts: of a router, the bundles of its hosts, as its manifest is to name them.
    """
    before, manifest = lineage.bundle, new.manifest
    for name, digest in manifest.files.items():
        copied.copy(before.path / name, new.path / name)
        check_digest(new.path / name, digest)
    _write(manifest, new.path, deltas_of(lineage, last, trusted))
    changed = {name: digest_file(new.path / name) for name in manifest.weights_files}
    write_manifest(
        new.path, msgspec.structs.replace(manifest, files={**manifest.files, **changed}, hosts=tuple(hosts))
    )
    ranks = {manifest.plan.rank_of_host[host.host]: part for host, part in hosts.items()}
    verification = verify(new.path, parts=ranks)
    if verification.failures:
        raise PublishError(f"the draft of this version is not right: {verification.failures[0]}")
    return verification.bundle


def _write(manifest: Manifest, directory: Path, deltas: Iterable[Delta]) -> None:
    """Write the rows of deltas, one after another, to the weights files in a folder."""
    tables = {table.name: table for table in manifest.tables}
    stored = {
        shard: np.memmap(
            weights_path(directory, manifest, shard.rank),
            np.uint8,
            mode="r+",
            offset=shard.offset_bytes,
            shape=(shard.height, tables[shard.table].dtype.row_bytes(shard.width)),
        )
        for shard in manifest.plan.shards
        if manifest.plan.ranks[shard.rank].weights_file is not None
    }
    for delta in deltas:
        for name, rows in delta.tables.items():
            for shard in stored.keys() & {*manifest.plan.shards_by_table[name]}:
                low, high = np.searchsorted(rows.ids, shard.rows)
                own = tables[name].shard_columns(rows.rows[low:high], shard)
                stored[shard][rows.ids[low:high] - shard.rows[0]] = own
    for each in stored.values():
        each.flush()


def _format_version(manifest: Manifest) -> int:
    """The oldest format that has all features of a bundle, but for deltas in its rows."""
    if manifest.dense_part is not None:
        return SCORES_FORMAT_VERSION
    return format_version_of(manifest.tables, manifest.features, manifest.id_dtype, on_hosts=manifest.is_on_hosts)


def export_next(
    module: nn.Module,
    repository: Path | str,
    name: str,
    config: ExportConfig | None = None,
    version: int | None = None,
    *,
    checkpoint: WeightSource = None,
    dense: nn.Module | None = None,
    example: Example | None = None,
    deltas: Path | str | None = None,
    signing_key: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Export a model that was trained further, as a version that goes on with the lineage of the newest.

    Rows that are stored otherwise by now are published as a delta first. So servers of either version have the same
    rows, and each later delta is for both. What is new is the dense part. Where tables have raw ids, which take no
    deltas, their rows and maps are new, too.

    Args:
        module, repository, name, config, version, checkpoint, dense, example, progress: as `export_model`.
        deltas: the folder of all deltas; REPOSITORY.deltas where None.
        signing_key: as `export_model`, and for the delta.

    Returns:
        The path of the new version.

    Raises:
        ConfigurationError: the tables are not stored as those of the newest version.
        BundleError: the newest version, or a delta, cannot be read.
        PublishError: the model is on several hosts, or others publish deltas all the time; or as `export_model`.
        ModelError, CheckpointError, QuantizeError, PlanError, ParityError: as `export_model`.
    """
    config, repository = config or ExportConfig(), Path(repository).absolute()
    lineage = Lineage.of(repository, name, None, deltas)
    if lineage.bundle.manifest.hosts:
        raise PublishError(f"{lineage.bundle.path}: is on several hosts: export it without --same-lineage")
    key = None if signing_key is None else read_signing_key(signing_key)
    with temporary_folder(repository.parent, f".{repository.name}.draft-") as folder:
        path = export_model(
            module,
            folder / "r",
            name,
            config,
            checkpoint=checkpoint,
            dense=dense,
            example=example,
            progress=progress,
        )
        exported = open_bundle(path)
        # The draft is begun first: a version that the model cannot take leaves no delta.
        with draft(repository, name, version, exported.manifest, config.serving, key) as new:
            manifest = msgspec.structs.replace(
                exported.manifest,
                format_version=NEWEST_FORMAT_VERSION,
                compacted=Compacted(lineage.name, _publish_difference(lineage, exported, key)),
            )
            for each in manifest.files:
                (path / each).rename(new.path / each)
            write_manifest(new.path, manifest)
            open_bundle(new.path)
            return new.publish()


def _publish_difference(lineage: Lineage, exported: Bundle, key: Ed25519PrivateKey | None) -> int:
    """Publish the rows of a bundle that differ from those of a lineage, if there are some.

    Returns:
        The number of the delta after which they are the same.
    """
    for _ in range(_TRIES):
        newest = lineage.folder.newest
        stored = _difference(lineage, exported, newest)
        if not stored:
            return newest
        if lineage.publish(stored, key).sequence == newest + 1:  # else somebody else's came in between
            return newest + 1
    raise PublishError(f"{lineage.folder.path}: others publish all the time: stop them, or export a version anew")


def _difference(lineage: Lineage, exported: Bundle, until: int) -> dict[str, Rows]:
    """The rows of a bundle that are stored otherwise in a version and its deltas."""
    before = {table.name: table for table in lineage.bundle.manifest.tables}
    tables = {table.name: table for table in exported.manifest.tables}
    old_shapes, new_shapes = (
        {name: (each.rows, each.dim, each.dtype, each.id_map is None) for name, each in found.items()}
        for found in (before, tables)
    )
    if old_shapes != new_shapes:
        raise ConfigurationError(
            f"expected the tables of {lineage.bundle.path}, with as many rows and columns of the same dtypes, and "
            "raw ids where it has them: export the module anew"
        )
    old, new = StoredRows(lineage.bundle, changed_rows(lineage, until)), StoredRows(exported)
    found = {}
    for name, table in tables.items():
        if table.id_map is not None:
            continue
        parts = []
        for start in range(0, table.rows, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, table.rows)
            rows = new.rows(table, start, stop)
            differ = (rows != old.rows(before[name], start, stop)).any(axis=1)
            parts.append(Rows(start + np.flatnonzero(differ), rows[differ]))
        differing = Rows.joined(parts)
        if differing.ids.size:
            found[name] = differing
    return found
