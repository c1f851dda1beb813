"""Publish the rows of a trained module that changed since the last delta, found by comparing all stored rows."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
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

# Number of rows that are compared together.
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
    """Publish the rows of a module that differ from its published version and the deltas since.

    All rows are read and quantized, block by block, but only rows that differ are published. The bundles of a model's
    hosts must be in the same repository.

    Args:
        module: as in `export_model`.
        checkpoint: as in `export_model`.
        checkpoint_prefix: the prefix of the model's keys in the checkpoint. None: the only one that fits.
        repository, model, version, max_error, deltas, signing_key: as `publish_delta`.

    Returns:
        The published delta, or None if no row differs.

    Raises:
        ModelError, CheckpointError: as `export_model`.
        ConfigurationError: the module's tables are not the model's.
        BundleError: a delta of the lineage, or the bundle of a host, cannot be read; or as `publish_delta`.
        QuantizeError, ParityError, PublishError: as `publish_delta`.
    """
    lineage = Lineage.of(Path(repository), model, version, deltas)
    key = None if signing_key is None else read_signing_key(signing_key)
    trained = collect_tables(module, trace=False)
    tables = {table.name: table for table in lineage.bundle.manifest.tables}
    if {table.name: (table.rows, table.dim) for table in trained.tables} != {
        table.name: (table.rows, table.dim) for table in tables.values()
    }:
        raise ConfigurationError(
            f"expected the tables of {lineage.bundle.path}, with the same rows and columns: export "
            "the module as a new version"
        )
    check_limits(max_error)
    weights = open_weights(module, trained, checkpoint, checkpoint_prefix)
    current = stored_rows(lineage)
    stored: dict[str, ChangedRows] = {}
    notes: list[str] = []
    for table in trained.tables:
        weights.check(table)
        quantizer = Quantizer(lineage.bundle.manifest, tables[table.name], max_error.get(table.name))
        quantized = (
            (start, quantizer.quantized(np.arange(start, start + len(rows)), rows))
            for start, rows in blocks(table, weights)
        )
        changed = _changed_since(current, tables[table.name], quantized)
        notes += quantizer.notes()
        if changed.ids.size:
            check_takes(tables[table.name])
            stored[table.name] = changed
    weights.check_unchanged()
    return lineage.publish(stored, key)._replace(notes=tuple(notes)) if stored else None


class StoredRows:
    """The stored rows of a bundle with the changes of its deltas.

    Args:
        bundle: the bundle.
        changed: the rows that deltas changed, by table.
    """

    def __init__(self, bundle: Bundle, changed: Mapping[str, ChangedRows] = MappingProxyType({})) -> None:
        self._bundle, self._changed = bundle, changed

    def rows(self, table: Table, start: int, stop: int) -> Bytes:
        """Rows [start, stop) of a table: uint8 [n, row bytes]."""
        rows: Bytes = np.empty((stop - start, table.row_bytes), np.uint8)
        for shard in self._bundle.manifest.plan.pieces_by_table[table.name]:
            first, last = max(start, shard.rows[0]), min(stop, shard.rows[1])
            if first < last:
                stored = self._piece(table, shard, first, last)
                header = table.dtype.format.header_bytes
                part = rows[first - start : last - start]
                part[:, :header] = stored[:, :header]
                part[:, table.columns_at(shard)] = stored[:, header:]
        if (changed := self._changed.get(table.name)) is not None:
            low, high = np.searchsorted(changed.ids, (start, stop))
            rows[changed.ids[low:high] - start] = changed.rows[low:high]
        return rows

    def _piece(self, table: Table, shard: Shard, first: int, last: int) -> Bytes:
        """A shard's part of rows [first, last) of its table: uint8 [n, bytes of header and columns]."""
        width = table.dtype.row_bytes(shard.width)
        return np.memmap(
            weights_path(self._bundle.path, self._bundle.manifest, shard.rank),
            np.uint8,
            mode="r",
            offset=shard.offset_bytes + (first - shard.rows[0]) * width,
            shape=(last - first, width),
        )


class _RouterRows(StoredRows):
    """The rows of a router's tables, from its own rank and its hosts, with the deltas of each."""

    def __init__(self, lineage: Lineage, until: int | None) -> None:
        super().__init__(lineage.bundle, _changed_rows(lineage, until))
        router = lineage.bundle.manifest
        segments = segments_by_rank(router)
        self._of_hosts: dict[Shard, tuple[StoredRows, Table]] = {}
        for host in router.hosts:
            host_lineage = lineage.of_host(host)
            rows = stored_rows(host_lineage, until)
            tables = {table.name: table for table in host_lineage.bundle.manifest.tables}
            for segment in segments[router.plan.rank_of_host[host.host]]:
                self._of_hosts[segment.shard] = rows, tables[segment.table]

    def _piece(self, table: Table, shard: Shard, first: int, last: int) -> Bytes:
        if shard not in self._of_hosts:
            return super()._piece(table, shard, first, last)
        rows, host_table = self._of_hosts[shard]
        return rows.rows(host_table, first - shard.rows[0], last - shard.rows[0])


def stored_rows(lineage: Lineage, until: int | None = None) -> StoredRows:
    """The stored rows of a version with its deltas up to the number `until`, or all deltas if it is None.

    Raises:
        BundleError: a delta or the bundle of a host cannot be read.
        PublishError: a delta is missing.
    """
    bundle = lineage.bundle
    return _RouterRows(lineage, until) if bundle.manifest.hosts else StoredRows(bundle, _changed_rows(lineage, until))


def _changed_rows(lineage: Lineage, until: int | None) -> Mapping[str, ChangedRows]:
    changed = squashed_deltas(lineage, until)
    return {} if changed is None else changed.tables


def difference(lineage: Lineage, exported: Lineage, until: int) -> dict[str, ChangedRows]:
    """The rows of an export that differ from a version with its deltas.

    Args:
        lineage: the version's lineage.
        exported: the export's lineage.
        until: the number of the last delta to compare with.

    Raises:
        ConfigurationError: the export has other tables, dtypes or id maps than the version.
        BundleError, PublishError: as `stored_rows`.
    """
    before = {table.name: table for table in lineage.bundle.manifest.tables}
    tables = {table.name: table for table in exported.bundle.manifest.tables}
    old_shapes, new_shapes = (
        {name: (table.rows, table.dim, table.dtype, table.id_map is None) for name, table in tables_by_name.items()}
        for tables_by_name in (before, tables)
    )
    if old_shapes != new_shapes:
        raise ConfigurationError(
            f"expected the tables of {lineage.bundle.path}, with the same rows, columns, dtypes and raw ids: "
            "export the module as a new version"
        )
    old, new = stored_rows(lineage, until), stored_rows(exported)
    changed = {}
    for name, table in tables.items():
        if table.id_map is not None:
            continue
        starts = range(0, table.rows, _BLOCK_ROWS)
        stored = ((start, new.rows(table, start, min(start + _BLOCK_ROWS, table.rows))) for start in starts)
        rows = _changed_since(old, before[name], stored)
        if rows.ids.size:
            changed[name] = rows
    return changed


def _changed_since(old: StoredRows, table: Table, new: Iterable[tuple[int, Bytes]]) -> ChangedRows:
    """The rows of a table that differ from the stored ones.

    Args:
        old: the stored rows.
        table: the table there.
        new: blocks of all rows as they are stored now, uint8 [n, row bytes], each with the number of its first row.
    """
    parts = []
    for start, rows in new:
        differ = (rows != old.rows(table, start, start + len(rows))).any(axis=1)
        parts.append(ChangedRows(start + np.flatnonzero(differ), rows[differ]))
    return ChangedRows.concatenated(parts)
