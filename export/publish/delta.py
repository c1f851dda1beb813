"""Publish a delta: changed rows of a model that is served, see `serving.bundle.delta`; or several deltas as one."""

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
from serving.bundle.delta import IDS, ROWS, ChangedRows, Delta, open_delta, tables_in
from serving.bundle.formats import Bytes
from serving.bundle.lineage import Step, delta_path, files_in, next_step, reached, steps_in
from serving.bundle.manifest import Manifest
from serving.bundle.signature import TrustedKeys, keys_of, read_signing_key
from serving.bundle.tables import Table
from serving.errors import ConfigurationError

# Row numbers, integers [n], and float rows [n, dim].
Changed = tuple[npt.ArrayLike | torch.Tensor, npt.ArrayLike | torch.Tensor]
# Rows that are quantized at once.
_BLOCK_ROWS = 1 << 16
# Rows of deltas that are held before those that a later one has, too, are dropped.
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
        ParityError: a row would move further than its limit, or than rounding explains, or is lost in FP16.
        PublishError: a table takes no deltas, it is a host's model, or the folder cannot be written to.
        ServerUnavailable: the store cannot be reached, or lets nobody write.
    """
    lineage = Lineage.of(Path(repository), model, version, deltas)
    key = None if signing_key is None else read_signing_key(signing_key)
    stored, notes = _stored(lineage.bundle.manifest, changed, max_error)
    if not stored:
        raise ConfigurationError("expected at least one row that changed, got none")
    return lineage.publish(stored, key)._replace(notes=notes)


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


def deltas_of(lineage: Lineage, until: int | None = None, trusted: TrustedKeys | None = None) -> Iterator[Delta]:
    """The deltas of a lineage behind those that are in its version, in order.

    Args:
        lineage: a version, and the deltas since.
        until: the last one; the newest where None.
        trusted: one of these keys must have signed each. None: no signature is needed.

    Raises:
        BundleError: one cannot be read, or none of the keys signed it.
        PublishError: one is missing.
    """
    folder = lineage.folder
    last = folder.newest if until is None else until
    if (store := folder.store) is not None:  # which may have more than what servers of this machine needed
        store.bring(folder.model, folder.lineage, folder.since, each=True)
    steps = steps_in(folder.path) if store is None else store.steps(folder.model, folder.lineage)
    at = folder.since
    if (whole := reached([step for step in steps if step.sequence <= last], at)) < last:
        others = "".join(f", or {step.sequence}" for step in steps if step.since <= whole < last < step.sequence)
        raise PublishError(
            f"{delta_path(folder.path, whole + 1)}: is missing: bring it back. Without it, rows are known as they "
            f"are after delta {whole}{others}"
        )
    squashed = [step for step in steps if step.is_squashed]
    while at < last:
        step = next_step(squashed, at, last)
        yield open_delta(folder.path, step, lineage.bundle.manifest, trusted)
        at = step.sequence


def squashed_deltas(lineage: Lineage, until: int | None = None, trusted: TrustedKeys | None = None) -> Delta | None:
    """What `deltas_of` a lineage come to: each row as it is in the last that has it. None: there is no delta.

    No more than about twice as many rows are in memory.
    """
    changed: dict[str, list[ChangedRows]] = {}
    more: Counter[str] = Counter()  # rows behind the first part of a table
    delta = None
    for delta in deltas_of(lineage, until, trusted):
        for name, rows in delta.tables.items():
            changed.setdefault(name, []).append(rows)
            more[name] += len(rows.ids)
            if more[name] > max(_LEAST_ROWS, len(changed[name][0].ids)):
                changed[name], more[name] = [_last_of_each(changed[name])], 0
    return delta and delta._replace(tables={name: _last_of_each(each) for name, each in changed.items()})


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
    """Publish the deltas of a version as one, with each row as it is in the last that has it.

    A server that starts applies it in their place. They stay, for rows to be rolled back, until they are pruned.

    Args:
        until: the last delta that is squashed; the newest where None.
        trusted_keys: as `compact` takes it.
        repository, model, version, deltas, signing_key: as `publish_delta`.

    Returns:
        What was published, or is there already. Of a model on hosts, `rows` are those of all files.

    Raises:
        BundleError: the version, or a delta, cannot be read, or is not signed.
        ConfigurationError: there is no such delta, a key cannot be read, or there is none and deltas are signed.
        PublishError: there are no two deltas, one is missing, or the folder cannot be written to.
        ServerUnavailable: the store cannot be reached, or lets nobody write.
    """
    key, trusted = keys_of(signing_key, trusted_keys)
    lineage = Lineage.of(Path(repository), model, version, deltas, trusted)
    since, newest = lineage.folder.since, lineage.folder.newest
    step = Step(newest if until is None else until, since)
    if newest < since + 2:
        raise PublishError(
            f"{lineage.folder.path}: expected two deltas or more behind {since}, found {newest - since}"
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
    rows = 0
    for part in (lineage, *(lineage.of_host(host, trusted) for host in lineage.bundle.manifest.hosts)):
        squashed = squashed_deltas(part, step.sequence, trusted)
        assert squashed is not None  # noqa: S101  there are two
        with part.writing():
            part.folder.write_squashed(step, squashed, key)
        rows += sum(len(each.ids) for each in squashed.tables.values())
    path = delta_path(lineage.folder.path, *step)
    return PublishedDelta(path, step.sequence, int(lineage.bundle.path.name), rows)


def _stored(
    manifest: Manifest, changed: Mapping[str, Changed], max_error: Mapping[str, float]
) -> tuple[dict[str, ChangedRows], tuple[str, ...]]:
    """The rows as they are stored, and what to note of them."""
    tables = {table.name: table for table in manifest.tables}
    if unknown := (changed.keys() | max_error.keys()) - tables.keys():
        raise ConfigurationError(f"table {min(unknown)!r}: expected one of the model's, {', '.join(tables)}")
    check_limits(max_error)
    found: dict[str, ChangedRows] = {}
    notes: list[str] = []
    for name, (ids, rows) in changed.items():
        check_takes(tables[name])
        numbers, floats = _checked(tables[name], ids, rows)
        if len(numbers):
            quantizer = Quantizer(manifest, tables[name], max_error.get(name))
            blocks = (slice(start, start + _BLOCK_ROWS) for start in range(0, len(numbers), _BLOCK_ROWS))
            parts = [quantizer.quantized(numbers[block], floats[block]) for block in blocks]
            found[name] = ChangedRows(numbers, np.concatenate(parts))
            notes += quantizer.notes()
    return found, tuple(notes)


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


class Quantizer:
    """Stores rows of a table as its version does.

    Args:
        manifest: of the version.
        table: the table.
        limit: largest |float − stored|; None: what rounding explains.
    """

    def __init__(self, manifest: Manifest, table: Table, limit: float | None) -> None:
        self._table, self._limit = table, limit
        parity = {each.table: each.quantized.largest for each in manifest.parity}
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
        """What to note of all rows so far, a line each."""
        if (note := self._coarse.note(self._table.dtype)) is not None:
            yield f"table {self._table.name!r}: {note}"


def _last_of_each(changed: Sequence[ChangedRows]) -> ChangedRows:
    """Each row once, as it is in the last of some deltas that has it."""
    ids, rows = ChangedRows.joined(changed)
    each_once, first = np.unique(ids[::-1], return_index=True)
    return ChangedRows(each_once, rows[::-1][first])
