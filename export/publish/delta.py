"""Publish a delta: changed rows of a served model, see `serving.bundle.delta`. Squash several deltas to one."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from export.rows.table_error import CoarseRows, TableError
from serving.bundle.delta import IDS_SUFFIX, ROWS_SUFFIX, ChangedRows, Delta, open_delta, tables_in
from serving.bundle.formats import Bytes
from serving.bundle.lineage import Step, delta_path, files_in, next_step, reached
from serving.bundle.manifest import Manifest
from serving.bundle.signature import TrustedKeys, keys_of, read_signing_key
from serving.bundle.tables import Table
from serving.errors import ConfigurationError

# Row numbers, integers [n], and float rows [n, dim].
Changed = tuple[npt.ArrayLike | torch.Tensor, npt.ArrayLike | torch.Tensor]
# Number of rows that are quantized together.
_BLOCK_ROWS = 1 << 16
# Number of a table's rows that are read from deltas before replaced ones are dropped.
_LEAST_ROWS = 1 << 20


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

    A delta is published atomically. Several writers get different numbers, and the rows of the highest one win. After
    an error nothing is published, except when the answer of a store was lost.

    Args:
        repository: the model repository.
        model: the model's name.
        changed: by table, the distinct row numbers, integers [n]; and the trained rows, float32 or float16 [n, dim].
        version: the version whose lineage gets the delta. None: the newest.
        max_error: largest allowed |float − stored| of an element, by table. Without a limit, no element may move
            further than rounding explains.
        deltas: the folder of all deltas, or its URL in a store, such as s3://bucket/models.deltas. None:
            REPOSITORY.deltas.
        signing_key: a PEM file with an Ed25519 private key. None: the delta is not signed.

    Returns:
        What was published.

    Raises:
        BundleError: the version cannot be opened.
        ConfigurationError: the model has no such table or row, or the signing key cannot be read.
        QuantizeError: a row does not fit its dtype.
        ParityError: a row would move further than its limit, or than rounding explains, or is lost in FP16.
        PublishError: a table takes no deltas, the model is a host's, or the folder cannot be written to.
        ServerUnavailable: the store cannot be reached, or refuses writes.
    """
    lineage = Lineage.of(Path(repository), model, version, deltas)
    key = None if signing_key is None else read_signing_key(signing_key)
    stored, notes = _stored(lineage.bundle.manifest, changed, max_error)
    if not stored:
        raise ConfigurationError("expected at least one row that changed, got none")
    return lineage.publish(stored, key)._replace(notes=notes)


def read_changed(path: Path) -> dict[str, Changed]:
    """Changed rows from a safetensors file, by table: `TABLE/ids`, integers [n], and `TABLE/rows`, floats [n, dim].

    Raises:
        ConfigurationError: the file cannot be read, or has other tensors.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{path}: expected safetensors: {error}") from error
    names = tables_in(tensors)
    if names is None:
        raise ConfigurationError(
            f"{path}: expected TABLE{IDS_SUFFIX} and TABLE{ROWS_SUFFIX} of each table, got {sorted(tensors)}"
        )
    return {name: (tensors[name + IDS_SUFFIX], tensors[name + ROWS_SUFFIX]) for name in sorted(names)}


def deltas_of(lineage: Lineage, until: int | None, trusted: TrustedKeys | None) -> Iterator[Delta]:
    """The deltas of a lineage that are newer than the rows of its version, in order.

    Args:
        lineage: a version and its deltas.
        until: the number of the last delta. None: the newest.
        trusted: one of these keys must have signed every delta. None: no signature is needed.

    Raises:
        BundleError: a delta cannot be read, or none of the keys signed it.
        PublishError: a delta is missing.
    """
    folder = lineage.folder
    last = folder.newest if until is None else until
    folder.fetch(folder.since)  # a store may have more deltas than servers of this machine needed
    steps = folder.steps()
    applied = folder.since
    if (complete := reached([step for step in steps if step.sequence <= last], applied)) < last:
        alternatives = [step.sequence for step in steps if step.since <= complete < last < step.sequence]
        until_which = ", or ".join(map(str, (complete, *alternatives)))
        raise PublishError(
            f"{delta_path(folder.path, complete + 1)}: is missing: restore it. Without it, rows are known as they "
            f"are after delta {until_which}"
        )
    squashed = [step for step in steps if step.is_squashed]
    while applied < last:
        step = next_step(squashed, applied, last)
        yield open_delta(folder.path, step, lineage.bundle.manifest, trusted)
        applied = step.sequence


def squashed_deltas(lineage: Lineage, until: int | None, trusted: TrustedKeys | None = None) -> Delta | None:
    """All deltas of a lineage as one, with the newest state of each row. None: there is no delta.

    About twice as many rows are in memory.
    """
    changed: dict[str, list[ChangedRows]] = {}
    more: Counter[str] = Counter()  # number of rows after the first part of each table
    delta = None
    for delta in deltas_of(lineage, until, trusted):
        for name, rows in delta.tables.items():
            changed.setdefault(name, []).append(rows)
            more[name] += len(rows.ids)
            if more[name] > max(_LEAST_ROWS, len(changed[name][0].ids)):
                changed[name], more[name] = [_newest(changed[name])], 0
    return delta and delta._replace(tables={name: _newest(parts) for name, parts in changed.items()})


def squash(
    repository: Path | str,
    model: str,
    *,
    version: int | None = None,
    until: int | None = None,
    deltas: Path | str | None = None,
    signing_key: Path | None = None,
    trusted_keys: Path | None = None,
) -> PublishedDelta:
    """Publish all deltas of a version as one, with the newest state of each row.

    A server that starts applies the squashed delta instead of them. They stay, so that rows can be rolled back, until
    they are pruned.

    Args:
        until: the last delta to squash. None: the newest.
        trusted_keys: as `compact`.
        repository, model, version, deltas, signing_key: as `publish_delta`.

    Returns:
        The squashed delta, which may have existed before. For a model on hosts, `rows` counts the rows of all files.

    Raises:
        BundleError: the version or a delta cannot be read, or is not signed.
        ConfigurationError: `until` is not the number of a delta, a key cannot be read, or the deltas are signed and
            there is no signing key.
        PublishError: there are fewer than two deltas, one is missing, or the folder cannot be written to.
        ServerUnavailable: the store cannot be reached, or refuses writes.
    """
    key, trusted = keys_of(signing_key, trusted_keys)
    lineage = Lineage.of(Path(repository), model, version, deltas, trusted)
    since, newest = lineage.folder.since, lineage.folder.newest
    step = Step(newest if until is None else until, since)
    if newest < since + 2:
        raise PublishError(
            f"{lineage.folder.path}: expected two deltas or more after {since}, found {newest - since}"
        )
    if not since + 2 <= step.sequence <= newest:
        raise ConfigurationError(
            f"until: expected a delta of {lineage.bundle.path}, {since + 2} to {newest}, got {until}"
        )
    if key is None and any(name.endswith(".sig") for name in files_in(lineage.folder.path)):
        raise ConfigurationError(
            f"{lineage.folder.path}: expected a signing key, since deltas there are signed: servers that trust keys "
            "would stop at one that is not"
        )
    count = 0
    for part in (lineage, *(lineage.of_host(host, trusted) for host in lineage.bundle.manifest.hosts)):
        squashed = squashed_deltas(part, step.sequence, trusted)
        assert squashed is not None  # noqa: S101  there are two
        with part.writing():
            part.folder.write_squashed(step, squashed, key)
        count += sum(len(rows.ids) for rows in squashed.tables.values())
    path = delta_path(lineage.folder.path, *step)
    return PublishedDelta(path, step.sequence, int(lineage.bundle.path.name), count)


def _stored(
    manifest: Manifest, changed: Mapping[str, Changed], max_error: Mapping[str, float]
) -> tuple[dict[str, ChangedRows], tuple[str, ...]]:
    """Quantize changed rows. Returns them by table, and notes about them."""
    tables = {table.name: table for table in manifest.tables}
    if unknown := (changed.keys() | max_error.keys()) - tables.keys():
        raise ConfigurationError(f"table {min(unknown)!r}: expected one of the model's, {', '.join(tables)}")
    check_limits(max_error)
    stored: dict[str, ChangedRows] = {}
    notes: list[str] = []
    for name, (ids, rows) in changed.items():
        check_takes(tables[name])
        numbers, floats = _checked(tables[name], ids, rows)
        if len(numbers):
            quantizer = Quantizer(manifest, tables[name], max_error.get(name))
            blocks = (slice(start, start + _BLOCK_ROWS) for start in range(0, len(numbers), _BLOCK_ROWS))
            parts = [quantizer.quantized(numbers[block], floats[block]) for block in blocks]
            stored[name] = ChangedRows(numbers, np.concatenate(parts))
            notes += quantizer.notes()
    return stored, tuple(notes)


def check_limits(max_error: Mapping[str, float]) -> None:
    """Refuse limits that are not finite and positive.

    Raises:
        ConfigurationError: with the name of the table.
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
    """Sorted row numbers, int64 [n], and their rows, [n, dim].

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


class Quantizer:
    """Quantizes rows of a table as its version has them.

    Args:
        manifest: the version's manifest.
        table: the table.
        limit: largest allowed |float − stored|. None: what rounding explains.
    """

    def __init__(self, manifest: Manifest, table: Table, limit: float | None) -> None:
        self._table, self._limit = table, limit
        parity = {table.table: table.quantized.largest for table in manifest.parity}
        self._usual = parity.get(table.name, 0.0)
        self._coarse = CoarseRows()

    def quantized(self, ids: npt.NDArray[np.int64], rows: torch.Tensor) -> Bytes:
        """Rows as they are stored: uint8 [n, row bytes].

        Raises:
            QuantizeError: a row does not fit the dtype.
            ParityError: a row moves further than the limit, or than rounding explains, or is lost.
        """
        table = self._table
        try:
            stored: Bytes = quantize(table.name, 0, rows, table.dtype).numpy()
        except QuantizeError:
            for position, number in enumerate(ids.tolist()):  # to name the row
                quantize(table.name, number, rows[position : position + 1], table.dtype)
            raise
        error = TableError(table.dtype)
        error.add(0, rows.float().numpy(), stored, np.empty(rows.shape, np.float32))
        agreement = error.tally.agreement
        if error.unexplained_row is not None:
            raise ParityError(
                f"table {table.name!r}: row {int(ids[error.unexplained_row])} moved further than rounding explains"
            )
        if self._limit is not None and not agreement.largest <= self._limit:
            raise ParityError(
                f"table {table.name!r}: {table.dtype.value} moves an element of row {int(ids[agreement.worst_row])} "
                f"by {agreement.largest:.3g}, expected at most {self._limit:.3g}: export the model again with a "
                "wider dtype"
            )
        coarse = error.coarse.renumbered(ids)
        if self._limit is None and (lost := coarse.refusal(self._usual)) is not None:
            raise ParityError(
                f"table {table.name!r}: {lost}: export the model again with the table as FP32, or say by max_error "
                "how far a row may move"
            )
        self._coarse.join(coarse)
        return stored

    def notes(self) -> Iterator[str]:
        """Notes about all rows so far, a line each."""
        if (note := self._coarse.note(self._table.dtype)) is not None:
            yield f"table {self._table.name!r}: {note}"


def _newest(parts: Sequence[ChangedRows]) -> ChangedRows:
    """The newest state of each row. `parts` are in the order of their deltas."""
    ids, rows = ChangedRows.concatenated(parts)
    unique_ids, last = np.unique(ids[::-1], return_index=True)
    return ChangedRows(unique_ids, rows[::-1][last])
