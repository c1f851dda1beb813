"""A whole run: files are scored part by part, and the scores appear as one when all parts are finished."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.batch.batch_scores import BatchScores
from serving.batch.columns import BatchColumns, OnError
from serving.batch.folder_output import FolderOutput
from serving.batch.inputs import InputFile, Part, check_outside, find_inputs, parts_of
from serving.batch.journal import Journal
from serving.batch.object_output import ObjectOutput
from serving.batch.objects import split_url
from serving.batch.outputs import Output
from serving.batch.part_scores import Job
from serving.batch.partitions import check_partition_columns, check_partition_types
from serving.batch.sources import ServerSource, Source
from serving.batch.workers import score_parts
from serving.errors import ConfigurationError
from serving.files import is_url
from serving.requests.input_forms import Nulls

# Called with the rows that are done, and all rows.
RowsDone = Callable[[int, int], object]


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Attributes:
        rows: of all inputs.
        scored_rows: rows that this run scored; an earlier one scored the others.
        skipped_rows: rows that have no scores.
        parts: files with scores.
        errors: names the rows that have no scores. None: all have.
    """

    rows: int
    scored_rows: int
    skipped_rows: int
    parts: int
    errors: str | None


def score_files(
    source: Source,
    patterns: Sequence[str],
    out: Path | str,
    *,
    names: Mapping[str, str | Sequence[str]] | None = None,
    keep: Sequence[str] = (),
    partition_by: Sequence[str] = (),
    nulls: Nulls = "refuse",
    on_error: OnError = "fail",
    workers: int = 1,
    restart: bool = False,
    progress: RowsDone = lambda *_: None,
) -> Summary:
    """Score the rows of Parquet files into Parquet files, with a row for each row, in their order.

    Args:
        source: a bundle, or a model of a server.
        patterns: files, folders, globs and URLs of objects.
        out: a folder, or the URL of a prefix. A run that was interrupted goes on; a finished one is left as it is.
        names: the columns of inputs that have other names.
        keep: columns that are carried over.
        partition_by: columns of `keep`: rows are in folders by their values, such as day=2026-11-01.
        nulls: what null lists and ids are.
        on_error: "fail" at the first row that the model refuses, or "skip" such rows, and name them in
            `<out>.errors.jsonl`, or below a URL in `_errors/`.
        workers: processes that score.
        restart: discard what an earlier run wrote for something else.
        progress: called from time to time.

    Raises:
        ConfigurationError: an argument is invalid; the output is of something else; or another run writes it.
        InvalidRequest: the model refuses a row, which the message names.
        ServingError: the model cannot be opened, or cannot answer.
        ServerUnavailable: a store cannot be reached, or refuses access.
        OSError: a file cannot be read or written.
    """
    if isinstance(source, ServerSource):
        source = source.at_its_version()
    columns = BatchColumns(source.inputs(), names or {}, keep)
    check_partition_columns(columns, partition_by)
    files = find_inputs(patterns)
    check_outside(str(out) if is_url(out) else os.path.abspath(out), patterns, files)
    _check_columns(files, columns, partition_by)
    options = {"columns": dict(names or {}), "keep": [*keep], "nulls": nulls}
    if partition_by:
        options["partition-by"] = [*partition_by]
    journal = Journal(scores_of=source.identity(), inputs=tuple(files), options=options)
    parts = parts_of(files)
    if partition_by and not any(part.rows for part in parts):
        raise ConfigurationError("partition_by: expected inputs with rows, got none: no rows make no folders")
    output = _output_of(out, journal, is_partitioned=bool(partition_by))
    with output.locked():
        if output.is_finished(journal, restart=restart):
            if on_error == "fail" and output.skipped_rows():
                raise ConfigurationError(
                    f"{out}: has no scores of the rows in {output.errors}: --on-error skip accepts that"
                )
            todo = []
        else:
            skips = on_error == "skip"
            finished = output.prepare(journal, parts, skips_bad_rows=skips, restart=restart)
            todo = [part for part in parts if part.name not in finished]
            job = Job(BatchScores(source, columns, nulls), skips, journal.metadata, output, partition_by)
            _score(job, parts, todo, workers, progress)
            output.publish(journal, parts)
    skipped = output.skipped_rows()
    return Summary(
        rows=sum(part.rows for part in parts),
        scored_rows=sum(part.rows for part in todo),
        skipped_rows=skipped,
        parts=len(parts),
        errors=output.errors if skipped else None,
    )


def _output_of(out: Path | str, journal: Journal, *, is_partitioned: bool) -> Output:
    """The output in a folder, or below a URL."""
    if not is_url(out):
        return FolderOutput(Path(os.path.abspath(out)), is_partitioned)
    bucket, prefix = split_url(str(out))
    return ObjectOutput(f"{bucket.url}/{prefix}", journal.digest, is_partitioned)


def _check_columns(files: Sequence[InputFile], columns: BatchColumns, partition_by: Sequence[str]) -> None:
    """Refuse files that lack a column, and kept columns of different types or of types that cannot name folders."""
    first = None
    for file in files:
        schema = file.schema
        columns.of_file(file.path, schema)
        check_partition_types(file.path, schema, partition_by)
        kept_types = {name: schema.field(name).type for name in columns.keep}
        first = kept_types if first is None else first
        for name, kind in kept_types.items():
            if kind != first[name]:
                raise ConfigurationError(f"{file.path}: column {name!r}: expected {first[name]}, got {kind}")


def _score(job: Job, parts: Sequence[Part], todo: Sequence[Part], workers: int, progress: RowsDone) -> None:
    total = sum(part.rows for part in parts)
    scored = total - sum(part.rows for part in todo)
    progress(scored, total)

    def rows_done(rows: int) -> None:
        nonlocal scored
        scored += rows
        progress(scored, total)

    score_parts(job, todo, workers, rows_done)
