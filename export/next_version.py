"""The next version of a lineage: a version with its deltas, or a model that was trained further."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
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
from export.publish.changes import difference
from export.publish.delta import deltas_of
from export.publish.draft import Draft, draft, next_version
from export.publish.lineage import Lineage
from export.trained.checkpoint import WeightSource
from serving.bundle.delta import Delta
from serving.bundle.load import Bundle, check_digest, digest_file, open_bundle, weights_path
from serving.bundle.manifest import Compacted, Manifest, write_manifest
from serving.bundle.plan import HostBundle
from serving.bundle.signature import TrustedKeys, keys_of, read_signing_key
from serving.errors import ConfigurationError
from serving.files import temporary_folder

# How often rows are compared again because another writer published a delta.
_TRIES = 10
# Bytes in a chunk of a copied file.
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
    """Publish the next version of a model: the rows of a version with its deltas.

    The new version continues the lineage: later deltas are for both versions. A server may serve either, and applies
    fewer deltas when it starts with the new one. With `until`, the new version begins a lineage of its own, which
    gets no later delta: this rolls rows back. The bundles of a model's hosts must be in the same repository. They get
    the same version number.

    Args:
        repository: the model repository.
        model: the model's name.
        version: the version whose rows are copied. None: the newest.
        until: the number of the last delta to include, at least that of the version's own rows, which may be 0. None:
            all deltas.
        deltas: the folder of all deltas. None: REPOSITORY.deltas.
        signing_key: a PEM file with an Ed25519 private key. None: the new version is not signed.
        trusted_keys: a PEM file with Ed25519 public keys. One of them must have signed the version and each delta.
            None: the signing key must have, if there is one.
        progress: called as files are copied.

    Returns:
        The path of the new version.

    Raises:
        BundleError: the version, one of its files or a delta is damaged, cannot be read, or is not signed.
        ConfigurationError: `until` is not the number of a delta, or a key cannot be read.
        PublishError: the lineage has no delta, one is missing, or the disk is full.
        ParityError: the new version answers differently from the reference.
    """
    key, trusted = keys_of(signing_key, trusted_keys)
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
    models = [part.folder.model for part in (*parts, lineage)]
    number = max(next_version(Path(repository) / model_name) for model_name in models) if parts else None
    with ExitStack() as stack:
        *drafts, model_draft = (
            stack.enter_context(draft(Path(repository), name, number, _manifest(part, last, until), None, key))
            for name, part in zip(models, (*parts, lineage), strict=True)
        )
        sizes = (file.size_bytes for new in (*drafts, model_draft) for file in new.manifest.files.values())
        copied = _Copied(progress, sum(sizes))
        hosts = {}
        for host, part, new in zip(router.hosts, parts, drafts, strict=True):
            assert number is not None  # noqa: S101  there are hosts
            filled = _filled(new, part, last, trusted, copied, {})
            continued = part.folder.name if until is None else None
            host_bundle = msgspec.structs.replace(host, version=number, manifest=filled.digest, lineage=continued)
            hosts[host_bundle] = filled
        _filled(model_draft, lineage, last, trusted, copied, hosts)
        for new in drafts:
            new.publish()
        return model_draft.publish()


def _manifest(lineage: Lineage, last: int, until: int | None) -> Manifest:
    """The manifest of a version with its deltas up to `last`, before its rows are written."""
    manifest = lineage.bundle.manifest
    return msgspec.structs.replace(
        manifest,
        compacted=Compacted(lineage.folder.name, last) if until is None else None,
        exported_at=time.time(),
        notes=(*manifest.notes, f"rows of version {lineage.bundle.path.name}, and deltas up to {last}"),
    )


@dataclass(slots=True)
class _Copied:
    """Copies files and reports the progress over all of them."""

    progress: Callable[[Progress], None]
    total: int
    copied_bytes: int = 0

    def copy(self, source: Path, target: Path) -> None:
        with source.open("rb") as source_file, target.open("wb") as target_file:
            while chunk := source_file.read(_CHUNK_BYTES):
                target_file.write(chunk)
                self.copied_bytes += len(chunk)
                self.progress(Progress(source.name, self.copied_bytes, self.total))


def _filled(
    new: Draft,
    lineage: Lineage,
    last: int,
    trusted: TrustedKeys | None,
    copied: _Copied,
    hosts: Mapping[HostBundle, Bundle],
) -> Bundle:
    """Write and verify a draft: the files of a version with the rows of its deltas up to `last`.

    Args:
        hosts: a router's bundles of hosts, by the entries of its new manifest.
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
        raise PublishError(f"the draft of this version failed verification: {verification.failures[0]}")
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
            shape=(shard.row_count, tables[shard.table].dtype.row_bytes(shard.width)),
        )
        for shard in manifest.plan.shards
        if manifest.plan.ranks[shard.rank].weights_file is not None
    }
    for delta in deltas:
        for name, rows in delta.tables.items():
            for shard in stored.keys() & {*manifest.plan.shards_by_table[name]}:
                low, high = np.searchsorted(rows.ids, shard.rows)
                block = tables[name].shard_columns(rows.rows[low:high], shard)
                stored[shard][rows.ids[low:high] - shard.rows[0]] = block
    for shard_rows in stored.values():
        shard_rows.flush()


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
    """Export a model that was trained further, as a version that continues the lineage of the newest.

    Changed rows are published as a delta first. So servers of both versions have the same rows, and later deltas are
    for both. The new version has a new dense part, and new rows and maps for tables with raw ids, which take no
    deltas. The bundles of a model's hosts must be in the same repository. They get the same version number. A file
    that does not change is linked to that of the newest version.

    Args:
        module, repository, name, config, version, checkpoint, dense, example, progress: as `export_model`.
        deltas: the folder of all deltas. None: REPOSITORY.deltas.
        signing_key: as `export_model`. It also signs the delta.

    Returns:
        The path of the new version.

    Raises:
        ConfigurationError: the export has other tables, dtypes or hosts than the newest version.
        BundleError: the newest version or a delta cannot be read.
        PublishError: other writers keep publishing deltas; or as `export_model`.
        ModelError, CheckpointError, QuantizeError, PlanError, ParityError: as `export_model`.
    """
    config, repository = config or ExportConfig(), Path(repository).absolute()
    lineage = Lineage.of(repository, name, None, deltas)
    lineages = [*map(lineage.of_host, lineage.bundle.manifest.hosts), lineage]
    key = None if signing_key is None else read_signing_key(signing_key)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder(repository.parent, f".{repository.name}.draft-"))
        export_model(
            module,
            folder / "r",
            name,
            config,
            checkpoint=checkpoint,
            dense=dense,
            example=example,
            progress=progress,
        )
        exported = Lineage.of(folder / "r", name, None, None)
        hosts = exported.bundle.manifest.hosts
        _check_same_hosts(exported.bundle, lineage.bundle)
        if hosts and version is None:
            version = max(next_version(repository / part.folder.model) for part in lineages)
        bundles = [part.bundle for part in (*map(exported.of_host, hosts), exported)]
        settings = [*(config.serving and config.serving.of_host() for _ in hosts), config.serving]
        # The drafts are begun first, so that no delta is published for a version that the model cannot take.
        *host_drafts, model_draft = (
            stack.enter_context(draft(repository, bundle.path.parent.name, version, bundle.manifest, serving, key))
            for bundle, serving in zip(bundles, settings, strict=True)
        )
        sequence = _publish_difference(lineage, exported, key)
        host_bundles = []
        for host, bundle, before, new in zip(hosts, bundles[:-1], lineages[:-1], host_drafts, strict=True):
            assert version is not None  # noqa: S101  there are hosts
            digest = _fill_next(new, bundle, before, sequence, ())
            host_bundles.append(
                msgspec.structs.replace(host, version=version, manifest=digest, lineage=before.folder.name)
            )
        _fill_next(model_draft, exported.bundle, lineage, sequence, host_bundles)
        for new in host_drafts:
            new.publish()
        return model_draft.publish()


def _check_same_hosts(exported: Bundle, before: Bundle) -> None:
    """Refuse an export with hosts, or for a model with hosts, whose tables are sharded differently than before."""
    has_hosts = bool(exported.manifest.hosts or before.manifest.hosts)
    if has_hosts and exported.manifest.placement_digest != before.manifest.placement_digest:
        raise ConfigurationError(
            f"expected the tables of {before.path}, sharded over the same hosts: export with its dtypes and sharding"
        )


def _fill_next(new: Draft, bundle: Bundle, lineage: Lineage, sequence: int, hosts: Sequence[HostBundle]) -> str:
    """Move an exported bundle into a draft that continues a lineage after a delta. Returns the draft's digest."""
    _take(bundle, new.path, lineage.bundle)
    compacted = Compacted(lineage.folder.name, sequence)
    write_manifest(new.path, msgspec.structs.replace(bundle.manifest, compacted=compacted, hosts=tuple(hosts)))
    return open_bundle(new.path).digest


def _take(bundle: Bundle, target: Path, before: Bundle) -> None:
    """Move the files of a bundle. Files that equal those of the previous version are linked, to save space."""
    for name, digest in bundle.manifest.files.items():
        with suppress(OSError):  # a file system without hard links
            if before.manifest.files.get(name) == digest and digest_file(before.path / name) == digest:
                os.link(before.path / name, target / name)
                continue
        (bundle.path / name).rename(target / name)


def _publish_difference(lineage: Lineage, exported: Lineage, key: Ed25519PrivateKey | None) -> int:
    """Publish the rows of an export that differ from those of a lineage, if there are any.

    Returns:
        The number of the delta after which they are equal.
    """
    for _ in range(_TRIES):
        newest = lineage.folder.newest
        stored = difference(lineage, exported, newest)
        if not stored:
            return newest
        if lineage.publish(stored, key).sequence == newest + 1:  # otherwise another writer published one first
            return newest + 1
    raise PublishError(f"{lineage.folder.path}: other writers keep publishing: stop them, or export a new version")
