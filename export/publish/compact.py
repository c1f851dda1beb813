"""A version and its deltas become the next version, without the trainer and as fast as files are copied."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from export.errors import PublishError
from export.parity.verify import verify
from export.publish.changes import changed_rows
from export.publish.delta import Lineage
from export.publish.draft import draft
from serving.bundle.delta import Rows
from serving.bundle.manifest import (
    NEWEST_FORMAT_VERSION,
    SCORES_FORMAT_VERSION,
    Compacted,
    Manifest,
    format_version_of,
    write_manifest,
)
from serving.bundle.opening import Bundle, check_digest, digest_file, weights_path
from serving.bundle.signature import TrustedKeys, read_signing_key
from serving.errors import ConfigurationError


def compact(
    repository: Path | str,
    model: str,
    *,
    version: int | None = None,
    until: int | None = None,
    deltas: Path | str | None = None,
    signing_key: Path | None = None,
    trusted_keys: Path | None = None,
) -> Path:
    """Publish the next version of a model: the rows of a version, with those of its deltas.

    The lineage goes on: the next delta is the next one for both versions. So a server may serve either, and one that
    starts with the new version has less to apply. With `until`, the new version begins a lineage of its own, and no
    later delta comes to it: that is how rows are rolled back.

    Args:
        repository: the model repository.
        model: the model's name.
        version: the version whose rows are copied; the newest where None.
        until: the last delta that counts; 0, or that of the version's own rows, for none. None: all that are there.
        deltas: the folder of all deltas; REPOSITORY.deltas where None.
        signing_key: a PEM file with an Ed25519 private key. None: the new version is not signed.
        trusted_keys: a PEM file with Ed25519 public keys, which must have signed the version and its deltas. None:
            the signing key must have, if there is one.

    Returns:
        The path of the new version.

    Raises:
        BundleError: the version, one of its files or a delta is damaged, cannot be read, or is not signed.
        ConfigurationError: there is no such delta, or a key cannot be read.
        PublishError: there is no delta, one is missing, the model is on several hosts, or the disk is full.
        ParityError: what was written does not answer as it should.
    """
    key = None if signing_key is None else read_signing_key(signing_key)
    # Else a signature would make good what nobody signed.
    trusted = None if key is None or signing_key is None else TrustedKeys(signing_key, (key.public_key(),))
    if trusted_keys is not None:
        trusted = TrustedKeys.read(trusted_keys)
    lineage = Lineage.of(Path(repository), model, version, deltas, trusted)
    bundle, folder = lineage.bundle, lineage.folder
    if bundle.manifest.hosts:
        raise PublishError(f"{bundle.path}: is on several hosts: export it again")
    newest = folder.newest
    if until is None and newest == folder.since:
        raise PublishError(f"{folder.path}: expected deltas of {bundle.path}, found none")
    if until is not None and not folder.since <= until <= newest:
        raise ConfigurationError(f"until: expected a delta of {bundle.path}, {folder.since} to {newest}, got {until}")
    last = newest if until is None else until
    changed = changed_rows(lineage, last, trusted)
    manifest = msgspec.structs.replace(
        bundle.manifest,
        format_version=NEWEST_FORMAT_VERSION if until is None else _format_version(bundle.manifest),
        compacted=Compacted(lineage.name, last) if until is None else None,
        exported_at=time.time(),
        notes=(*bundle.manifest.notes, f"rows of version {bundle.path.name}, and deltas up to {last}"),
    )
    with draft(Path(repository), model, None, manifest, None, key) as new:
        for name, digest in bundle.manifest.files.items():
            shutil.copyfile(bundle.path / name, new.path / name)
            check_digest(new.path / name, digest)
        _write(bundle, new.path, changed)
        files = {
            name: digest_file(new.path / name) if name in manifest.weights_files else digest
            for name, digest in bundle.manifest.files.items()
        }
        write_manifest(new.path, msgspec.structs.replace(manifest, files=files))
        if failures := verify(new.path).failures:
            raise PublishError(f"the draft of this version is not right: {failures[0]}")
        return new.publish()


def _write(bundle: Bundle, directory: Path, changed: Mapping[str, Rows]) -> None:
    """Write changed rows to the copies of a bundle's weights files."""
    manifest = bundle.manifest
    tables = {table.name: table for table in manifest.tables}
    for name, rows in changed.items():
        for shard in manifest.plan.shards_by_table[name]:
            low, high = np.searchsorted(rows.ids, shard.rows)
            if low == high:
                continue
            width = tables[name].dtype.row_bytes(shard.width)
            stored = np.memmap(
                weights_path(directory, manifest, shard.rank),
                np.uint8,
                mode="r+",
                offset=shard.offset_bytes,
                shape=(shard.height, width),
            )
            stored[rows.ids[low:high] - shard.rows[0]] = tables[name].shard_columns(rows.rows[low:high], shard)
            stored.flush()


def _format_version(manifest: Manifest) -> int:
    """The oldest format that has all features of a bundle, but for deltas in its rows."""
    if manifest.dense_part is not None:
        return SCORES_FORMAT_VERSION
    return format_version_of(manifest.tables, manifest.features, manifest.id_dtype, on_hosts=False)
