"""Publish the rows of a trained module that are stored otherwise by now: what changed since the last delta."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import nn

from export.publish.delta import Quantizer, check_limits, check_takes, squashed_deltas
from export.publish.lineage import Lineage, PublishedDelta
from export.trained.checkpoint import WeightSource, blocks
from export.trained.model_weights import open_weights
from export.trained.tables import collect_tables
from serving.bundle.delta import ChangedRows
from serving.bundle.formats import Bytes
from serving.bundle.load import Bundle, weights_path
from serving.bundle.plan import Shard
from serving.bundle.segments import segments_by_rank
from serving.bundle.signature import read_signing_key
from serving.bundle.tables import Table
from serving.errors import ConfigurationError

# Rows that are compared at once.
_BLOCK_ROWS = 1 << 16


def publish_changes(
    repository: Path | str,
    model: str,
    module: nn.Module,
    *,
    checkpoint: WeightSource = None,
    checkpoint_prefix: str | None = None,
    version: int | None = None,
    max_error: Mapping[str, float] = MappingProxyType({}),
    deltas: Path | str | None = None,
    signing_key: Path | None = None,
) -> PublishedDelta | None:
    """Publish the rows of a module that are stored otherwise than in its version and the deltas since.

    All rows are read and quantized, block by block, but only those that differ are published. Of a model on several
    hosts, the bundles of these have to be in the same repository.

    Args:
        module: as `export_model` takes it.
        checkpoint: as `export_model` takes it.
        checkpoint_prefix: of the model's keys in it; the only one that fits where None.
        repository, model, version, max_error, deltas, signing_key: as `publish_delta`.

    Returns:
        What was published. None: no row differs.

    Raises:
        ModelError, CheckpointError: as `export_model`.
        ConfigurationError: the module has other tables than the model.
        BundleError: a delta of the lineage, or the bundle of a host, cannot be read; or as `publish_delta`.
        QuantizeError, ParityError, PublishError: as `publish_delta`.
    """
    lineage = Lineage.of(Path(repository), model, version, deltas)
    key = None if signing_key is None else read_signing_key(signing_key)
    trained = collect_tables(module, follow=False)
    tables = {table.name: table for table in lineage.bundle.manifest.tables}
    if {each.name: (each.rows, each.dim) for each in trained.tables} != {
        each.name: (each.rows, each.dim) for each in tables.values()
    }:
        raise ConfigurationError(
            f"expected the tables of {lineage.bundle.path}, with as many rows and columns: export the module anew"
        )
    check_limits(max_error)
    weights = open_weights(module, trained, checkpoint, checkpoint_prefix)
    current = stored_rows(lineage)
    stored: dict[str, ChangedRows] = {}
    notes: list[str] = []
    for table in trained.tables:
        weights.check(table)
        quantizer = Quantizer(lineage.bundle.manifest, tables[table.name], max_error.get(table.name))
        found = [
            _differing(current, tables[table.name], start, rows, quantizer) for start, rows in blocks(table, weights)
        ]
        notes += quantizer.notes()
        differing = ChangedRows.joined(found)
        if differing.ids.size:
            check_takes(tables[table.name])
            stored[table.name] = differing
    weights.check_unchanged()
    return lineage.publish(stored, key)._replace(notes=tuple(notes)) if stored else None


class StoredRows:
    """The rows of a bundle as they are stored, but for those that deltas have changed since.

    Args:
        bundle: the bundle.
        changed: these rows, by table.
    """

    def __init__(self, bundle: Bundle, changed: Mapping[str, ChangedRows] = MappingProxyType({})) -> None:
        self._bundle, self._changed = bundle, changed

    def rows(self, table: Table, start: int, stop: int) -> Bytes:
        """Rows [start, stop) of a table: uint8 [n, row bytes]."""
        found: Bytes = np.empty((stop - start, table.row_bytes), np.uint8)
        for shard in self._bundle.manifest.plan.pieces_by_table[table.name]:
            first, last = max(start, shard.rows[0]), min(stop, shard.rows[1])
            if first < last:
                stored = self._piece(table, shard, first, last)
                header = table.dtype.format.header_bytes
                own = found[first - start : last - start]
                own[:, :header] = stored[:, :header]
                own[:, table.columns_at(shard)] = stored[:, header:]
        if (changed := self._changed.get(table.name)) is not None:
            low, high = np.searchsorted(changed.ids, (start, stop))
            found[changed.ids[low:high] - start] = changed.rows[low:high]
        return found

    def _piece(self, table: Table, shard: Shard, first: int, last: int) -> Bytes:
        """Rows [first, last) of a table as a shard has them: uint8 [n, header and the shard's columns]."""
        width = table.dtype.row_bytes(shard.width)
        return np.memmap(
            weights_path(self._bundle.path, self._bundle.manifest, shard.rank),
            np.uint8,
            mode="r",
            offset=shard.offset_bytes + (first - shard.rows[0]) * width,
            shape=(last - first, width),
        )


class _RouterRows(StoredRows):
    """The rows of a router's tables: those of its own rank, and those of its hosts, with the deltas of each."""

    def __init__(self, lineage: Lineage, until: int | None) -> None:
        super().__init__(lineage.bundle, _changed_rows(lineage, until))
        router = lineage.bundle.manifest
        segments = segments_by_rank(router)
        self._of_hosts: dict[Shard, tuple[StoredRows, Table]] = {}
        for host in router.hosts:
            own = lineage.of_host(host)
            rows = stored_rows(own, until)
            tables = {table.name: table for table in own.bundle.manifest.tables}
            for segment in segments[router.plan.rank_of_host[host.host]]:
                self._of_hosts[segment.shard] = rows, tables[segment.table]

    def _piece(self, table: Table, shard: Shard, first: int, last: int) -> Bytes:
        if shard not in self._of_hosts:
            return super()._piece(table, shard, first, last)
        rows, own = self._of_hosts[shard]
        return rows.rows(own, first - shard.rows[0], last - shard.rows[0])


def stored_rows(lineage: Lineage, until: int | None = None) -> StoredRows:
    """The rows of a version as they are stored, with the deltas since; all of them where `until` is None.

    Raises:
        BundleError: a delta, or the bundle of a host, cannot be read.
        PublishError: a delta is missing.
    """
    bundle = lineage.bundle
    return _RouterRows(lineage, until) if bundle.manifest.hosts else StoredRows(bundle, _changed_rows(lineage, until))


def _changed_rows(lineage: Lineage, until: int | None) -> Mapping[str, ChangedRows]:
    changed = squashed_deltas(lineage, until)
    return {} if changed is None else changed.tables


def difference(lineage: Lineage, exported: Lineage, until: int) -> dict[str, ChangedRows]:
    """The rows of an export that are stored otherwise in a version and its deltas.

    Args:
        lineage: of the version.
        exported: what is compared with it.
        until: the last delta that counts.

    Raises:
        ConfigurationError: the tables are not stored as those of the version.
        BundleError, PublishError: as `stored_rows`.
    """
    before = {table.name: table for table in lineage.bundle.manifest.tables}
    tables = {table.name: table for table in exported.bundle.manifest.tables}
    old_shapes, new_shapes = (
        {name: (each.rows, each.dim, each.dtype, each.id_map is None) for name, each in found.items()}
        for found in (before, tables)
    )
    if old_shapes != new_shapes:
        raise ConfigurationError(
            f"expected the tables of {lineage.bundle.path}, with as many rows and columns of the same dtypes, and "
            "raw ids where it has them: export the module anew"
        )
    old, new = stored_rows(lineage, until), stored_rows(exported)
    found = {}
    for name, table in tables.items():
        if table.id_map is not None:
            continue
        parts = []
        for start in range(0, table.rows, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, table.rows)
            rows = new.rows(table, start, stop)
            differ = (rows != old.rows(before[name], start, stop)).any(axis=1)
            parts.append(ChangedRows(start + np.flatnonzero(differ), rows[differ]))
        differing = ChangedRows.joined(parts)
        if differing.ids.size:
            found[name] = differing
    return found


def _differing(
    current: StoredRows, table: Table, start: int, rows: torch.Tensor, quantizer: Quantizer
) -> ChangedRows:
    """Those of some consecutive rows that are stored otherwise by now."""
    ids = np.arange(start, start + len(rows))
    stored = quantizer.quantized(ids, rows)
    differ = (stored != current.rows(table, start, start + len(rows))).any(axis=1)
    return ChangedRows(ids[differ], stored[differ])
