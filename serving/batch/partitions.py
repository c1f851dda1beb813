"""Scores in folders by the values of columns, as Hive and Spark write them: day=2026-11-01/part-00000.parquet.

The names of the folders have the values of the columns, which the files therefore lack. Names are escaped so that
pyarrow, Polars and Spark read the same values.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from pyarrow.parquet import ParquetWriter

from serving.batch.columns import BatchColumns
from serving.batch.inputs import Part
from serving.errors import ConfigurationError

# Open files of a process: one for each partition of a row group. Many systems allow 1024.
MOST_PARTITIONS = 512
# The folder of nulls and of empty text in Hive and Spark.
_NULL = "__HIVE_DEFAULT_PARTITION__"
# All of ASCII but letters, digits and "_.~-". Other characters are not escaped, because Spark reads %C3%A9 as two.
_ESCAPED = re.compile(r"(?![\w.~-])[\x00-\x7f]")
_MOST_NAME_BYTES = 255


def check_partition_columns(columns: BatchColumns, partition_by: Sequence[str]) -> None:
    """Refuse columns that are not carried over to the scores, outputs of the model, and repeated columns.

    Raises:
        ConfigurationError: a column is refused. The message names it.
    """
    for column in partition_by:
        if column in columns.inputs.outputs:
            raise ConfigurationError(
                f"partition_by: {column!r}: expected a column of --keep, got an output of the model"
            )
        if column not in columns.keep:
            raise ConfigurationError(f"partition_by: {column!r}: expected a column of --keep: add it there too")
        if partition_by.count(column) > 1:
            raise ConfigurationError(f"partition_by: {column!r}: expected another column: it is named twice")


def check_partition_types(path: str, schema: Any, partition_by: Sequence[str]) -> None:
    """Refuse columns whose types cannot name folders.

    Args:
        path: the path of the file.
        schema: its pyarrow Schema.
        partition_by: the columns.

    Raises:
        ConfigurationError: a column has another type. The message names file and column.
    """
    is_name: tuple[Callable[[Any], bool], ...] = (
        pa.types.is_integer, pa.types.is_boolean, pa.types.is_date, pa.types.is_string, pa.types.is_large_string,
    )  # fmt: skip
    for column in partition_by:
        kind = schema.field(column).type
        values = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not any(is_one(values) for is_one in is_name):
            raise ConfigurationError(
                f"{path}: column {column!r}: expected integers, text, booleans or dates to partition by, got {kind}: "
                "carry over a column with the day or with a bucket instead"
            )


class PartitionFiles:
    """The files of a part, one for each partition. They appear when the block ends without an error.

    Args:
        writing: opens a file by its name, such as day=2026-11-01/part-00000.parquet.
        part: the part.
        partition_by: the columns.
        metadata: the metadata of each file.
        waiting_rows: the number of rows that are collected in memory before they are written.
    """

    def __init__(
        self,
        writing: Callable[[str], AbstractContextManager[BinaryIO]],
        part: Part,
        partition_by: Sequence[str],
        metadata: dict[str, str],
        waiting_rows: int,
    ) -> None:
        self._writing = writing
        self._part = part
        self._partition_by = partition_by
        self._metadata = metadata
        self._waiting_rows = waiting_rows
        self._stack = ExitStack()
        self._writers: dict[str, Any] = {}
        self._waiting: dict[str, list[Any]] = {}

    @property
    def names(self) -> list[str]:
        """The names of the files."""
        return [*self._writers]

    def __enter__(self) -> "PartitionFiles":
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def write(self, tables: Iterator[Any]) -> None:
        """Write tables, each row into the file of its partition, in their order.

        Raises:
            ConfigurationError: the row group has too many partitions, or a value is too long for a name.
        """
        for table in tables:
            for folder, rows in split(table, self._partition_by):
                self._waiting.setdefault(f"{folder}/{self._part.name}", []).append(rows)
            if len(self._waiting) > MOST_PARTITIONS:
                raise ConfigurationError(
                    f"{self._part.file.path}: row group {self._part.row_group}: expected at most {MOST_PARTITIONS} "
                    f"partitions of {','.join(self._partition_by)}, got more: partition by columns with fewer "
                    "values, or sort the rows by them"
                )
            while sum(map(_row_count, self._waiting.values())) >= self._waiting_rows:
                self._write_waiting(max(self._waiting, key=lambda name: _row_count(self._waiting[name])))
        for name in [*self._waiting]:
            self._write_waiting(name)

    def _write_waiting(self, name: str) -> None:
        tables = self._waiting[name]
        self._waiting[name] = []
        if not tables:
            return
        table = pa.concat_tables(tables)
        if name not in self._writers:
            file = self._stack.enter_context(self._writing(name))
            schema = table.schema.with_metadata(self._metadata)
            self._writers[name] = self._stack.enter_context(ParquetWriter(file, schema))
        self._writers[name].write_table(table)


def split(table: Any, partition_by: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The rows of a pyarrow Table by partition, without the columns that say the partition.

    Yields:
        The folder of a partition, such as day=2026-11-01/country=DE, and its rows in their order.

    Raises:
        ConfigurationError: a value is too long for the name of a folder.
    """
    codes = np.zeros(table.num_rows, np.int64)
    for column in partition_by:
        values = table.column(column).combine_chunks()
        encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode("encode")
        _, codes_of_column = np.unique(encoded.indices.fill_null(-1).to_numpy(), return_inverse=True)
        _, codes = np.unique(codes * table.num_rows + codes_of_column, return_inverse=True)
    _, firsts, codes = np.unique(codes, return_index=True, return_inverse=True)
    folders = [partition_folder(values) for values in table.select([*partition_by]).take(firsts).to_pylist()]
    names, numbers = np.unique(folders, return_inverse=True)  # null and empty text have one folder
    numbers = numbers[codes]
    rows = table.drop_columns([*partition_by]).take(np.argsort(numbers, kind="stable"))
    stops = np.cumsum(np.bincount(numbers))
    for name, start, stop in zip(names, [0, *stops[:-1]], stops, strict=True):
        yield str(name), rows.slice(start, stop - start)


def partition_folder(values: dict[str, Any]) -> str:
    """The folder of a partition by its values, such as day=2026-11-01/country=DE.

    Raises:
        ConfigurationError: a value is too long for the name of a folder.
    """
    folders = [f"{_escaped(column)}={_text(value)}" for column, value in values.items()]
    for folder in folders:
        if len(folder.encode()) > _MOST_NAME_BYTES:
            raise ConfigurationError(
                f"partition_by: expected names of folders of at most {_MOST_NAME_BYTES} bytes, got {folder[:80]!r}…"
            )
    return "/".join(folders)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return _escaped(str(value)) if value not in (None, "") else _NULL


def _escaped(text: str) -> str:
    return _ESCAPED.sub(lambda character: f"%{ord(character[0]):02X}", text)


def _row_count(tables: Sequence[Any]) -> int:
    return sum(table.num_rows for table in tables)
