"""A whole run: files are scored part by part, and the scores appear as one folder when all parts are finished.

Until then they are in a hidden folder beside it. A run that is interrupted goes on there when it is started again.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pyarrow import ArrowException
from pyarrow.parquet import read_schema

from serving.batch.batch_scores import BatchScores
from serving.batch.columns import BatchColumns, OnError
from serving.batch.inputs import InputFile, Part, find_inputs, parts_of
from serving.batch.journal import JOURNAL, Journal, check_continues, is_output_of, read_journal
from serving.batch.part_scores import Job
from serving.batch.sources import ServerSource, Source
from serving.batch.workers import score_parts
from serving.errors import ConfigurationError
from serving.files import make_content, put_in_place, replacing
from serving.requests.input_forms import Nulls

# Called with the rows that are done, and all rows.
RowsDone = Callable[[int, int], object]
# Files of this size and more are left out of the page cache, in bytes.
_LARGE_BYTES = 64 << 20


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
    errors: Path | None


def score_files(
    source: Source,
    patterns: Sequence[str],
    out: Path,
    *,
    names: Mapping[str, str | Sequence[str]] | None = None,
    keep: Sequence[str] = (),
    nulls: Nulls = "refuse",
    on_error: OnError = "fail",
    workers: int = 1,
    restart: bool = False,
    progress: RowsDone = lambda *_: None,
) -> Summary:
    """Score the rows of Parquet files into a folder of Parquet files, with a row for each row, in their order.

    Args:
        source: a bundle, or a model of a server.
        patterns: files, folders and globs.
        out: the folder. A run that was interrupted goes on; a finished one is left as it is.
        names: the columns of inputs that have other names.
        keep: columns that are carried over.
        nulls: what null lists and ids are.
        on_error: "fail" at the first row that the model refuses, or "skip" such rows, and name them in
            `<out>.errors.jsonl`.
        workers: processes that score.
        restart: discard what an earlier run wrote for something else.
        progress: called from time to time.

    Raises:
        ConfigurationError: an argument is invalid; the output is of something else; or another run writes it.
        InvalidRequest: the model refuses a row, which the message names.
        ServingError: the model cannot be opened, or cannot answer.
        OSError: a file cannot be read or written.
    """
    if isinstance(source, ServerSource):
        source = source.at_its_version()
    columns = BatchColumns(source.inputs(), names or {}, keep)
    files = find_inputs(patterns)
    _check_columns(files, columns)
    options = {"columns": dict(names or {}), "keep": [*keep], "nulls": nulls}
    journal = Journal(scores_of=source.identity(), inputs=tuple(files), options=options)
    parts = parts_of(files)
    out = Path(os.path.abspath(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    errors = out.with_name(f"{out.name}.errors.jsonl")
    with _locked_folder(out) as folder:
        if _is_finished(out, journal, restart=restart):
            if on_error == "fail" and errors.exists():
                raise ConfigurationError(
                    f"{out}: has no scores of the rows in {errors}: --on-error skip accepts that"
                )
            return _summary(parts, [], errors)
        batch_scores = BatchScores(source, columns, nulls)
        job = Job(batch_scores, on_error == "skip", journal.metadata, folder / "scores", folder / "errors")
        _prepare(out, folder, journal, parts, job, restart=restart)
        todo = [part for part in parts if not (job.scores / part.name).exists()]
        _score(job, parts, todo, workers, progress)
        _publish(out, job, parts, errors)
    return _summary(parts, todo, errors)


def _check_columns(files: Sequence[InputFile], columns: BatchColumns) -> None:
    """Refuse files that lack a column, and columns that are carried over in different types."""
    first = None
    for file in files:
        schema = read_schema(file.path)
        columns.of_file(file.path, schema)
        kept = {name: schema.field(name).type for name in columns.keep}
        first = kept if first is None else first
        for name, kind in kept.items():
            if kind != first[name]:
                raise ConfigurationError(f"{file.path}: column {name!r}: expected {first[name]}, got {kind}")


@contextmanager
def _locked_folder(out: Path) -> Iterator[Path]:
    """The hidden folder of a run into `out`, which no other run uses. It is removed when the block ends well.

    Raises:
        ConfigurationError: another run uses it.
    """
    folder = out.with_name(f".{out.name}.scoring")
    lock = _lock(out, folder)
    try:
        yield folder
        shutil.rmtree(folder)
    finally:
        with suppress(OSError):
            folder.rmdir()  # a run that was refused wrote nothing
        os.close(lock)


def _lock(out: Path, folder: Path) -> int:
    """Make a folder, and lock it. Returns the descriptor that holds the lock.

    Raises:
        ConfigurationError: another run has locked it.
    """
    while True:
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise ConfigurationError(f"{out}: another run writes it: wait for its end, or name another") from error
        if folder.exists() and os.path.samestat(os.fstat(lock), folder.stat()):
            return lock
        os.close(lock)  # another run finished, and removed it, before it was locked


def _is_finished(out: Path, journal: Journal, *, restart: bool) -> bool:
    """Whether the scores of this run are there.

    Raises:
        ConfigurationError: something else is there.
    """
    if not os.path.lexists(out):
        return False
    try:
        finished = is_output_of(out, journal) if out.is_dir() else None
    except (ArrowException, OSError):
        finished = None
    if finished is None:
        raise ConfigurationError(f"{out}: expected no such file or folder, or earlier scores: name another")
    if not finished and not restart:
        raise ConfigurationError(
            f"{out}: has scores of another bundle, of other inputs or with other options: name another folder, or "
            "replace it with --restart"
        )
    return finished


def _prepare(out: Path, folder: Path, journal: Journal, parts: Sequence[Part], job: Job, *, restart: bool) -> None:
    """Leave in the hidden folder what an earlier run finished, and nothing else.

    Raises:
        ConfigurationError: the earlier run was of something else.
    """
    earlier = read_journal(folder)
    if earlier is not None and not restart:
        check_continues(out, earlier, journal)
    for path in folder.iterdir():
        if earlier == journal and path.name in (JOURNAL, job.scores.name, job.errors.name):
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if earlier != journal:
        journal.write(folder)
    job.scores.mkdir(exist_ok=True)
    job.errors.mkdir(exist_ok=True)
    if not job.skips_bad_rows:
        for part in parts:
            if (job.errors / part.errors_name).exists():  # a run with --on-error skip finished it
                (job.scores / part.name).unlink(missing_ok=True)
    names = {name for part in parts for name in (part.name, part.errors_name)}
    for path in (*job.scores.iterdir(), *job.errors.iterdir()):
        if path.name not in names:  # a draft of a run that was killed
            path.unlink()


def _score(job: Job, parts: Sequence[Part], todo: Sequence[Part], workers: int, progress: RowsDone) -> None:
    total = sum(part.rows for part in parts)
    done = total - sum(part.rows for part in todo)
    progress(done, total)

    def rows_done(rows: int) -> None:
        nonlocal done
        done += rows
        progress(done, total)

    score_parts(job, todo, workers, rows_done)


def _publish(out: Path, job: Job, parts: Sequence[Part], errors: Path) -> None:
    """Name the rows without scores in `errors`, and give the folder its name."""
    files = [path for part in parts if (path := job.errors / part.errors_name).exists()]
    if files:
        with replacing(errors) as file:
            for path in files:
                file.write(path.read_bytes())
    else:
        make_content(errors, None)
    if out.exists():  # with --restart
        out.rename(job.scores.with_name("replaced"))
    put_in_place(job.scores, out, _LARGE_BYTES)


def _summary(parts: Sequence[Part], scored: Sequence[Part], errors: Path) -> Summary:
    skipped = 0
    if errors.exists():
        with errors.open("rb") as file:
            skipped = sum(1 for _ in file)
    return Summary(
        rows=sum(part.rows for part in parts),
        scored_rows=sum(part.rows for part in scored),
        skipped_rows=skipped,
        parts=len(parts),
        errors=errors if skipped else None,
    )
