"""Labelled rows in batches: from parquet files, or from JSON lines as `tbe-export model --labelled` takes them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from export.scores.labelled_requests import LabelledRequest, Labels, outputs_with_labels, read_labelled
from serving.batch.columns import BatchColumns, ModelInputs
from serving.errors import ConfigurationError
from serving.pins import not_installed
from serving.requests.input_forms import Nulls

# Rows of a parquet file that are scored at a time.
BATCH_ROWS = 2048
_SUFFIX = ".parquet"


@dataclass(frozen=True, eq=False, slots=True)
class LabelledBatch:
    """Some labelled rows.

    Attributes:
        where: the file, and the row group with the rows (from 0), or the line; for messages.
        features: ids by feature, as `Engine.score` takes them.
        dense: dense inputs by name, as `Engine.score` takes them.
        labels: bool [B].
        nulls: what null lists and ids are, as in `serving.requests.encoding.encode`.
        halves: makes two batches of the rows. None: there is one row, or the rows belong together.
    """

    where: str
    features: Any
    dense: Any
    labels: Labels
    nulls: Nulls = "refuse"
    halves: "Callable[[], tuple[LabelledBatch, LabelledBatch]] | None" = None


@dataclass(frozen=True, slots=True)
class LabelledColumns:
    """What is read of labelled rows.

    Attributes:
        features: the features of the model.
        dense: its dense inputs.
        weighted: the features whose ids carry weights, which may have a column `<feature>.weights`.
        outputs: its outputs.
        output: the output that is labelled.
    """

    features: Sequence[str]
    dense: Sequence[str]
    weighted: Collection[str]
    outputs: Sequence[str]
    output: str


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """Rows with labels in a file, or in the parquet files of a folder.

    Attributes:
        path: a parquet file, a folder with parquet files, or a file of JSON lines.
        label: the column with the labels of parquet files. None for JSON lines, which have labels themselves.
        column_names: of parquet files: the column of each input that has another name there, as `BatchColumns` takes
            them.
        nulls: what null lists and ids are.

    Raises:
        ConfigurationError: the path does not exist; parquet files have no label column; JSON lines have one, or have
            names of columns.
    """

    path: Path
    label: str | None
    column_names: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    nulls: Nulls = "refuse"

    def __post_init__(self) -> None:
        is_parquet = self.path.suffix == _SUFFIX or self.path.is_dir()
        if is_parquet and self.label is None:
            raise ConfigurationError("labelled: expected --label with it, the column with 0 or 1 for each row")
        if not is_parquet and self.label is not None:
            raise ConfigurationError(
                f"label: expected a parquet file *{_SUFFIX} or a folder of them as --labelled, got {self.path}: JSON "
                "lines have their labels in each line"
            )
        if not is_parquet and self.column_names:
            raise ConfigurationError(
                f"columns: expected a parquet file *{_SUFFIX} or a folder of them as --labelled, got {self.path}"
            )
        if not self.path.exists():
            raise ConfigurationError(f"labelled: {self.path}: expected a file or folder, found none")

    def open(self, columns: LabelledColumns) -> Callable[[], Iterator[LabelledBatch]]:
        """Check that the rows can be read, and return a function that reads them from the first one.

        Raises:
            ConfigurationError: the rows cannot be read, a column is missing, a name of `column_names` is no input of
                the model, or JSON lines have no labels for the output. The function raises it for a label that is not
                0 or 1.
        """
        label = self.label
        if label is None:
            requests = read_labelled(self.path)
            if columns.output not in outputs_with_labels(requests, columns.outputs):
                raise ConfigurationError(f"{requests[0].where}: label: expected labels for output {columns.output!r}")
            return lambda: (_batch_of_request(request, columns.output, self.nulls) for request in requests)
        files = sorted(self.path.rglob(f"*{_SUFFIX}")) if self.path.is_dir() else [self.path]
        if not files:
            raise ConfigurationError(f"labelled: {self.path}: expected files *{_SUFFIX} in it, found none")
        inputs = ModelInputs(
            keys=tuple(columns.features), weighted=tuple(columns.weighted), dense=tuple(columns.dense), outputs={}
        )
        read_columns = BatchColumns(inputs, self.column_names, keep=())
        for file in files:
            with _parquet_file(file) as parquet:
                _columns_to_read(file, parquet.schema_arrow, read_columns, label)
        return lambda: (batch for file in files for batch in _read_parquet(file, read_columns, label, self.nulls))


def _parquet_file(path: Path) -> Any:
    """A pyarrow.parquet.ParquetFile."""
    try:
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise not_installed("pyarrow", "batch") from error
    try:
        return ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are of these classes
        raise ConfigurationError(f"labelled: {path}: expected a parquet file that can be read: {error}") from error


def _columns_to_read(path: Path, schema: Any, columns: BatchColumns, label: str) -> list[str]:
    if label not in schema.names:
        raise ConfigurationError(
            f"labelled: {path}: expected a column {label!r}, got the columns {', '.join(map(repr, schema.names))}"
        )
    return list(dict.fromkeys([*columns.of_file(f"labelled: {path}", schema), label]))


def _read_parquet(path: Path, columns: BatchColumns, label: str, nulls: Nulls) -> Iterator[LabelledBatch]:
    with _parquet_file(path) as file:
        names = _columns_to_read(path, file.schema_arrow, columns, label)
        for row_group in range(file.num_row_groups):
            where = f"labelled: {path}: row group {row_group}"
            start = 0
            batches = file.iter_batches(BATCH_ROWS, row_groups=[row_group], columns=names)
            while True:
                try:
                    batch = next(batches, None)
                except (OSError, ValueError) as error:  # pyarrow's errors are of these classes
                    raise ConfigurationError(f"{where}: rows from {start} cannot be read: {error}") from error
                if batch is None:
                    break
                if batch.num_rows:
                    yield _batch_of_rows(where, start, batch, columns, label, nulls)
                start += batch.num_rows


def _batch_of_rows(
    where: str, start: int, rows: Any, columns: BatchColumns, label: str, nulls: Nulls
) -> LabelledBatch:
    """The rows of a pyarrow RecordBatch, the first of which is the row `start` of a row group."""

    def halves() -> tuple[LabelledBatch, LabelledBatch]:
        middle = rows.num_rows // 2
        return (
            _batch_of_rows(where, start, rows.slice(0, middle), columns, label, nulls),
            _batch_of_rows(where, start + middle, rows.slice(middle), columns, label, nulls),
        )

    stop = start + rows.num_rows
    return LabelledBatch(
        f"{where}, row {start}" if rows.num_rows == 1 else f"{where}, rows {start} to {stop - 1}",
        *columns.request(rows),
        labels_of_column(where, label, rows[label], start),
        nulls,
        halves if rows.num_rows > 1 else None,
    )


def labels_of_column(where: str, label: str, column: Any, start: int) -> Labels:
    """The labels in a pyarrow Array, bool [B].

    Args:
        where: the file and the row group, for messages.
        label: the column's name.
        column: booleans, or numbers that are 0 or 1.
        start: the number of its first row in the row group, from 0.

    Raises:
        ConfigurationError: naming the first row with another value.
    """
    numbers = column.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind not in "biuf" and column.null_count == 0:
        raise ConfigurationError(f"{where}: column {label!r}: expected labels 0 and 1, got {column.type}")
    is_label = np.isin(numbers, (0, 1))
    if column.null_count:
        is_label &= column.is_valid().to_numpy(zero_copy_only=False)
    if not is_label.all():
        row = int(np.argmin(is_label))
        raise ConfigurationError(
            f"{where}, row {start + row}: column {label!r}: expected the label 0 or 1, got {column[row].as_py()!r}"
        )
    labels: Labels = numbers == 1
    return labels


def _batch_of_request(request: LabelledRequest, output: str, nulls: Nulls) -> LabelledBatch:
    label = request.label[output] if isinstance(request.label, dict) else request.label
    labels = request.labels_of(output, len(label) if isinstance(label, list) else 0)
    return LabelledBatch(request.where, request.features, request.dense, labels, nulls)
