"""Score a part: a row group of a file becomes a file with its scores, whole or not at all."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow.parquet import ParquetWriter

from serving.batch.batch_scores import BATCH_ROWS, BatchScores
from serving.batch.columns import BatchColumns
from serving.batch.inputs import Part
from serving.batch.outputs import Output
from serving.batch.partitions import PartitionFiles
from serving.errors import ConfigurationError, InvalidRequest, ServingError

# Rows that are written together. Like BATCH_ROWS, they bound the memory.
_WRITTEN_ROWS = 64 << 10


@dataclass(frozen=True)
class Job:
    """What is done to each part.

    Attributes:
        batch_scores: how batches of its rows are scored.
        skips_bad_rows: whether rows that are refused are left out. Otherwise the first one is an error.
        metadata: of each file that is written.
        output: where scores are written.
        partition_by: the columns whose values name folders. Empty: a part is one file.
    """

    batch_scores: BatchScores
    skips_bad_rows: bool
    metadata: dict[str, str]
    output: Output
    partition_by: Sequence[str] = ()


class BadRow(NamedTuple):
    """A row that the model refuses: its number in the row group, from 0, and why."""

    row: int
    reason: str


def score_part(model: Any, job: Job, part: Part, rows_done: Callable[[int], object]) -> None:
    """Write the scores of a part, and the rows that are left out.

    Args:
        model: an Engine or a LookupClient.
        job: what is done.
        part: the part.
        rows_done: called with the number of rows of each batch that is done.

    Raises:
        InvalidRequest: naming file, row group and row, if a row is refused, and what the model expects.
        ServingError: the model cannot answer.
        ConfigurationError: the file has changed, or is damaged; or the row group has too many partitions.
        OSError: a file cannot be read or written.
    """
    bad_rows: list[BadRow] = []
    scored = _scored(model, job, part, bad_rows, rows_done)
    if job.partition_by:
        columns, metadata = job.partition_by, job.metadata
        with PartitionFiles(job.output.writing, part, columns, metadata, _WRITTEN_ROWS) as files:
            files.write(scored)
        job.output.write_errors(part.errors_name, _lines(part, bad_rows))
        job.output.finish(part.name, files.names)
        return
    tables = _written_tables(scored)
    with job.output.writing(part.name) as file:
        table = next(tables, None)
        if table is None:
            with part.file.open() as parquet:
                table = job.batch_scores.table_without_rows(model, parquet.schema_arrow)
        with ParquetWriter(file, table.schema.with_metadata(job.metadata)) as writer:
            writer.write_table(table)
            for table in tables:
                writer.write_table(table)
        # Inside the block: the part is finished when its file has its name.
        job.output.write_errors(part.errors_name, _lines(part, bad_rows))


def _lines(part: Part, bad_rows: list[BadRow]) -> bytes:
    """A line of JSON for each row that is left out."""
    where = {"file": part.file.path, "row_group": part.row_group}
    lines = [json.dumps({**where, "row": bad.row, "reason": bad.reason}) + "\n" for bad in bad_rows]
    return "".join(lines).encode()


def _written_tables(tables: Iterator[Any]) -> Iterator[Any]:
    """Join tables until they have `_WRITTEN_ROWS` rows."""
    waiting: list[Any] = []
    for table in tables:
        waiting.append(table)
        if sum(table.num_rows for table in waiting) >= _WRITTEN_ROWS:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def _scored(
    model: Any, job: Job, part: Part, bad_rows: list[BadRow], rows_done: Callable[[int], object]
) -> Iterator[Any]:
    """The scores of each batch of rows, with the columns that are carried over. Bad rows are added to `bad_rows`."""
    batches: deque[tuple[int, Any]] = deque()
    columns, nulls = job.batch_scores.columns, job.batch_scores.nulls

    def requests() -> Iterator[Any]:
        for first, batch in _read_ahead(_read(part, columns)):
            batches.append((first, batch))
            yield columns.request(batch)

    def refuse(row: int, error: InvalidRequest) -> None:
        if not job.skips_bad_rows:
            where = f"{part.file.path}: row group {part.row_group}, row {row}"
            raise InvalidRequest(f"{where}: {error}", error.reason) from error
        bad_rows.append(BadRow(row, str(error)))

    for answer in model.stream(requests(), nulls=nulls, errors="yield"):
        first, batch = batches.popleft()
        if isinstance(answer, InvalidRequest):
            yield from job.batch_scores.score(model, first, batch, refuse)
        elif isinstance(answer, ServingError):
            raise answer
        else:
            yield job.batch_scores.table(batch, answer)
        rows_done(batch.num_rows)


def _read_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Read each batch on another thread while the one before it is scored."""
    with ThreadPoolExecutor(1) as reader:
        future = reader.submit(next, batches, None)
        while (batch := future.result()) is not None:
            future = reader.submit(next, batches, None)
            yield batch


def _read(part: Part, columns: BatchColumns) -> Iterator[tuple[int, Any]]:
    """Batches of the part's rows, each with the number of its first row."""
    if not part.rows:
        return
    with part.file.open() as parquet:
        names = columns.of_file(part.file.path, parquet.schema_arrow)
        first = 0
        try:
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[part.row_group], columns=names):
                yield first, batch
                first += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            part.file.check_unchanged()
            raise ConfigurationError(
                f"{part.file.path}: row group {part.row_group}: cannot be read: {error}: write the file again"
            ) from error
        if not part.file.e_tag:  # with one, each read is of the same object
            part.file.check_unchanged()
