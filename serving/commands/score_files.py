"""`tbe-serve score-files`: score Parquet files into Parquet files."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from serving.batch.columns import OnError, read_column_names
from serving.batch.sources import BundleSource, ServerSource, Source
from serving.client import Tls
from serving.commands.connection import TlsOf, say, takes_tls
from serving.errors import ConfigurationError, InvalidRequest, counted
from serving.files import is_utf8
from serving.freed_memory import FreedMemory
from serving.requests.input_forms import Nulls
from serving.requests.streams import STREAM_TIMEOUT_S
from serving.terminal.app import err, out, progress_bar

# How often a line says how far the run is where no terminal shows a bar, in seconds.
_LINE_S = 10.0


@takes_tls
def score_files(
    inputs: Annotated[
        list[str], typer.Argument(help="Parquet files, folders of them, globs, and such URLs: s3://bucket/days.")
    ],
    tls: TlsOf,
    out_folder: Annotated[
        str,
        typer.Option(
            "--out",
            help="Folder for the scores, or a URL such as s3://bucket/scores: a Parquet file for each row group of "
            "the inputs.",
        ),
    ],
    bundle: Annotated[
        Path | None, typer.Option(help="The bundle to score with, <model>/<version>, in this process.")
    ] = None,
    server: Annotated[str | None, typer.Option(help="The gRPC address of a server to score with.")] = None,
    model: Annotated[str | None, typer.Option(help="With --server: the model's name.")] = None,
    columns: Annotated[
        Path | None,
        typer.Option(
            help='TOML file with the columns of inputs that have other names, such as item_id = "item". A dense '
            'input may have several: price = ["p0", "p1"].'
        ),
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="Columns to copy to the scores, joined by commas, such as id,ts.")
    ] = None,
    partition_by: Annotated[
        str | None,
        typer.Option(
            help="Columns of --keep, joined by commas: rows are in folders by their values, such as day=2026-11-01."
        ),
    ] = None,
    nulls: Annotated[
        Nulls, typer.Option(help="'refuse' null lists and ids, or read a null list as an 'empty' one.")
    ] = "refuse",
    on_error: Annotated[
        OnError,
        typer.Option(
            help="'fail' at a row that the model refuses, or 'skip' such rows and list them in OUT.errors.jsonl, in "
            "a store in OUT/_errors."
        ),
    ] = "fail",
    workers: Annotated[int, typer.Option(min=1, help="Processes that score, each on one core.")] = 1,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard scores of another bundle, other inputs or other options.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option(help="With --server: deadline of each request, in seconds.")
    ] = STREAM_TIMEOUT_S,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of the machine for an hour. Prints the cost of a million rows.")
    ] = None,
) -> None:
    """Score Parquet files. The output has the rows of the input, in their order.

    After an interruption, the same command goes on where the run stopped. OUT appears when all rows are scored; in a
    store, OUT/_SUCCESS does.
    """
    from serving.batch.run import score_files as run  # pyarrow, which a client does not have

    FreedMemory()  # malloc keeps the memory of a batch for the next one
    source = _source(bundle, server, model, tls(), timeout_s)
    started = time.monotonic()
    with _progress() as show:
        summary = run(
            source,
            inputs,
            out_folder,
            names=read_column_names(columns),
            keep=keep.split(",") if keep else (),
            partition_by=partition_by.split(",") if partition_by else (),
            nulls=nulls,
            on_error=on_error,
            workers=workers,
            restart=restart,
            progress=show,
        )
    seconds = time.monotonic() - started
    where = counted(summary.parts, "file") if partition_by is None else f"folders by {partition_by}"
    out.print(f"{out_folder}: {counted(summary.rows - summary.skipped_rows, 'row')} in {where}")
    if summary.skipped_rows:
        out.print(f"{summary.errors}: skipped {counted(summary.skipped_rows, 'row')}")
    rate = summary.scored_rows / seconds
    out.print(f"scored {counted(summary.scored_rows, 'row')} in {seconds:.1f} s: {rate:,.0f} rows/s")
    if price_per_hour is not None and rate:
        out.print(f"a million rows cost {price_per_hour * 1e6 / rate / 3600:.4f}")
    if summary.rows and summary.skipped_rows == summary.rows:
        raise InvalidRequest(f"{summary.errors}: the model refused all rows, so none has scores")


def _source(bundle: Path | None, server: str | None, model: str | None, tls: Tls | None, timeout_s: float) -> Source:
    if (bundle is None) == (server is None) or (server is None) != (model is None):
        raise ConfigurationError("--bundle, --server: expected either --bundle, or --server with --model")
    if bundle is not None:
        return BundleSource(bundle)
    assert server is not None  # noqa: S101
    assert model is not None  # noqa: S101
    if not is_utf8(model):
        raise ConfigurationError(f"--model {model!r}: expected a name in UTF-8")
    return ServerSource(server, model, tls, timeout_s)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show rows, rows a second and the time left: a bar on a terminal, or a line from time to time."""
    from rich.progress import MofNCompleteColumn, TextColumn, TimeRemainingColumn

    started = printed_at = time.monotonic()
    before: int | None = None

    def rate(rows: int) -> float:
        nonlocal before
        before = rows if before is None else before
        return (rows - before) / max(time.monotonic() - started, 1e-9)

    def say_line(rows: int, total: int) -> None:
        nonlocal printed_at
        speed = rate(rows)
        if time.monotonic() - printed_at < _LINE_S:
            return
        printed_at = time.monotonic()
        remaining = f", {(total - rows) / speed:,.0f} s left" if speed else ""
        say(f"{rows:,} of {counted(total, 'row')}, {speed:,.0f} rows/s{remaining}")

    if not err.is_terminal:
        yield say_line
        return
    columns = (MofNCompleteColumn(), TextColumn("rows"), TimeRemainingColumn())
    with progress_bar(24, "scoring", *columns) as show:
        yield lambda rows, total: show(f"scoring, {rate(rows):,.0f} rows/s", rows, total)
