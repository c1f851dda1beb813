"""Publish a delta: changed rows of a model that is served. `serving.bundle.delta` has its format."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from export.errors import ParityError, PublishError, QuantizeError
from export.publish.lineage import Lineage, PublishedDelta
from export.rows.quantize import quantize
from export.rows.table_error import TableError
from serving.bundle.delta import IDS, ROWS, Rows, tables_in
from serving.bundle.manifest import Manifest
from serving.bundle.signature import read_signing_key
from serving.bundle.tables import Bytes, Table
from serving.errors import ConfigurationError

# Row numbers, integers [n], and float rows [n, dim].
Changed = tuple[npt.ArrayLike | torch.Tensor, npt.ArrayLike | torch.Tensor]
# Rows that are quantized at once.
_BLOCK_ROWS = 1 << 16


def publish_delta(
    repository: Path | str,
    model: str,
    changed: Mapping[str, Changed],
    *,
    version: int | None = None,
    max_error: Mapping[str, float] = MappingProxyType({}),
    deltas: Path | str | None = None,
    signing_key: Path | None = None,
) -> PublishedDelta:
    """Quantize changed rows and publish them. Servers of the model with `weights-memory: live` apply them.

    It is there as a whole or not at all. Of several writers each gets a number of its own; the rows of the last one
    win. After an error nothing is published, unless it is that a store's answer was lost.

    Args:
        repository: the model repository.
        model: the model's name.
        changed: by table the numbers of the rows, integers [n], each once; and the rows as trained, float32 or
            float16 [n, dim].
        version: the version whose lineage it is; the newest where None.
        max_error: largest allowed |float − stored| of an element, by table. A table without one is still checked: no
            element may move further than rounding explains.
        deltas: the folder of all deltas, or its URL in a store, such as s3://bucket/models.deltas; REPOSITORY.deltas
            where None.
        signing_key: a PEM file with an Ed25519 private key. None: it is not signed.

    Returns:
        What was published.

    Raises:
        BundleError: the version cannot be opened.
        ConfigurationError: a table or a row number is not the model's, or the signing key cannot be read.
        QuantizeError: a row does not fit its dtype.
        ParityError: a row would move further than its limit, or than rounding explains.
        PublishError: a table takes no deltas, it is a host's model, or the folder cannot be written to.
        ServerUnavailable: the store cannot be reached, or lets nobody write.
    """
    lineage = Lineage.of(Path(repository), model, version, deltas)
    key = None if signing_key is None else read_signing_key(signing_key)
    stored = _stored(lineage.bundle.manifest, changed, max_error)
    if not stored:
        raise ConfigurationError("expected at least one row that changed, got none")
    return lineage.publish(stored, key)


def read_changed(path: Path) -> dict[str, Changed]:
    """Changed rows from a file of safetensors: `TABLE/ids`, integers [n], and `TABLE/rows`, floats [n, dim], each.

    Raises:
        ConfigurationError: it cannot be read, or has other tensors.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{path}: expected safetensors: {error}") from error
    names = tables_in(tensors)
    if names is None:
        raise ConfigurationError(f"{path}: expected TABLE{IDS} and TABLE{ROWS} of each table, got {sorted(tensors)}")
    return {name: (tensors[name + IDS], tensors[name + ROWS]) for name in sorted(names)}


def _stored(manifest: Manifest, changed: Mapping[str, Changed], max_error: Mapping[str, float]) -> dict[str, Rows]:
    """The rows as they are stored."""
    tables = {table.name: table for table in manifest.tables}
    if unknown := (changed.keys() | max_error.keys()) - tables.keys():
        raise ConfigurationError(f"table {min(unknown)!r}: expected one of the model's, {', '.join(tables)}")
    check_limits(max_error)
    found = {}
    for name, (ids, rows) in changed.items():
        table = tables[name]
        check_takes(table)
        numbers, floats = _checked(table, ids, rows)
        if len(numbers):
            blocks = (slice(start, start + _BLOCK_ROWS) for start in range(0, len(numbers), _BLOCK_ROWS))
            parts = [quantized(table, numbers[each], floats[each], max_error.get(name, math.inf)) for each in blocks]
            found[name] = Rows(numbers, np.concatenate(parts))
    return found


def check_limits(max_error: Mapping[str, float]) -> None:
    """Refuse limits that no error can keep.

    Raises:
        ConfigurationError: naming the table.
    """
    for table, limit in max_error.items():
        if not 0 < limit < math.inf:
            raise ConfigurationError(f"max_error {table!r}: expected a finite number > 0, got {limit}")


def check_takes(table: Table) -> None:
    """Refuse a table that takes no deltas."""
    if table.id_map is not None:
        raise PublishError(
            f"table {table.name!r}: its rows are named by raw ids, whose map no delta changes: export it again"
        )


def _checked(
    table: Table, ids: npt.ArrayLike | torch.Tensor, rows: npt.ArrayLike | torch.Tensor
) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
    """Row numbers in order, and their rows.

    Raises:
        ConfigurationError: they do not fit the table.
    """
    numbers = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    floats = rows.detach().cpu() if isinstance(rows, torch.Tensor) else torch.from_numpy(np.asarray(rows))
    where = f"table {table.name!r}: expected"
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ConfigurationError(f"{where} row numbers as integers [n], got {numbers.dtype} {[*numbers.shape]}")
    if floats.dtype not in (torch.float32, torch.float16) or floats.shape != (numbers.size, table.dim):
        raise ConfigurationError(
            f"{where} rows float32 or float16 [{numbers.size}, {table.dim}], got "
            f"{str(floats.dtype).removeprefix('torch.')} {[*floats.shape]}"
        )
    outside = (numbers < 0) | (numbers >= table.rows)
    if outside.any():
        raise ConfigurationError(f"{where} row numbers in [0, {table.rows}), got {int(numbers[outside.argmax()])}")
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order].astype(np.int64)
    twice = np.diff(numbers) == 0
    if twice.any():
        raise ConfigurationError(f"{where} each row once, got row {int(numbers[twice.argmax()])} twice")
    return numbers, floats[torch.from_numpy(order)]


def quantized(table: Table, ids: npt.NDArray[np.int64], rows: torch.Tensor, limit: float) -> Bytes:
    """Rows as they are stored: uint8 [n, row bytes]."""
    try:
        stored: Bytes = quantize(table.name, 0, rows, table.dtype).numpy()
    except QuantizeError:
        for position, number in enumerate(ids.tolist()):  # which row it is
            quantize(table.name, number, rows[position : position + 1], table.dtype)
        raise
    error = TableError(table.dtype)
    error.add(0, rows.float().numpy(), stored, np.empty(rows.shape, np.float32))
    agreement = error.tally.agreement
    if error.unexplained_row is not None:
        raise ParityError(
            f"table {table.name!r}: row {int(ids[error.unexplained_row])} moved further than rounding explains"
        )
    if not agreement.largest <= limit:
        raise ParityError(
            f"table {table.name!r}: {table.dtype.value} moves an element of row {int(ids[agreement.worst_row])} by "
            f"{agreement.largest:.3g}, expected at most {limit:.3g}: export the model again with a wider dtype"
        )
    return stored
