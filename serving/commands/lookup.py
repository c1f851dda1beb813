"""`tbe-serve lookup` and `tbe-serve score`: one request for each line of JSON."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from rich.table import Table

from serving.client import DEFAULT_TIMEOUT_S, Answer, JaggedRows, LookupClient, Scores
from serving.commands.connection import DEFAULT_URL, TlsOf, UrlOption, say, takes_tls
from serving.errors import ConfigurationError, InvalidRequest, ServingError
from serving.requests.types import Array, Embeddings
from serving.terminal.app import out
from serving.terminal.output import is_read, lost, print_json

Answered = TypeVar("Answered", bound=Mapping[str, Any])
LinesArgument = Annotated[
    typer.FileBinaryRead, typer.Argument(help="JSON lines, one request each; standard input by default.")
]
TimeoutOption = Annotated[float, typer.Option(help="Deadline of each request, in seconds.")]
TableOption = Annotated[bool, typer.Option("--table", help="Print a table instead of JSON lines.")]
SharedOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A feature with one bag in each line, or a dense input with one row. It counts for all samples of the "
        "line, as the user's features do in ranking. May be repeated."
    ),
]


def answer_lines(
    file: typer.FileBinaryRead, answer: Callable[[bytes], Answered], table: Callable[[Answered], Table] | None
) -> bool:
    """Print the answer to each line of a file that is not blank. Report lines that cannot be answered.

    Args:
        file: the lines.
        answer: answers a line. It may raise a ServingError.
        table: makes the table that shows an answer. None: print it as a JSON line.

    Returns:
        Whether there are lines that cannot be answered, or answers that cannot be printed.
    """
    refused = False
    where = "" if file is sys.stdin.buffer else f"{file.name}: "
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            found = answer(line)
        except ServingError as error:
            refused = True
            say(f"{where}line {number}: {error}")
        else:
            print_arrays(found) if table is None else out.print(table(found))
            if not is_read():  # `| head`; or the disk is full
                break
    return refused or lost() is not None


def object_of(line: bytes, expected: str) -> dict[str, Any]:
    """The JSON object in a line.

    Args:
        line: the line. It is not trusted.
        expected: the form of the object, for the message.

    Raises:
        InvalidRequest: the line is no JSON object.
    """
    try:
        request: Any = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or a number of 5,000 digits
        raise InvalidRequest(f"expected JSON: {error}") from error
    if not isinstance(request, dict):
        raise InvalidRequest(f"expected {expected}, got {line.decode().strip()[:40]!r}")
    return request


def print_arrays(arrays: Mapping[str, Array | JaggedRows]) -> None:
    """Print arrays as a JSON line. Each number is the shortest decimal that reads back as the same float.

    Rows of a sequence are printed as a list of rows for each sample.
    """
    plain = {
        name: [_decimals(found.rows(sample)) for sample in range(len(found))]
        if isinstance(found, JaggedRows)
        else _decimals(found)
        for name, found in arrays.items()
    }
    print_json(json.dumps(plain))


def _decimals(rows: Array) -> Any:
    """Integers and booleans are themselves."""
    return rows.astype(str).astype(np.float64).tolist() if rows.dtype.kind == "f" else rows.tolist()


def brief(row: Array) -> str:
    """The first six numbers of an array of one dimension, for a column of a table."""
    form = "{:+.4f}" if row.dtype.kind == "f" else "{}"
    return " ".join(map(form.format, row[:6])) + (" …" if row.size > 6 else "")


@takes_tls
def lookup(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    tls: TlsOf,
    file: LinesArgument = "-",  # type: ignore[assignment]
    url: UrlOption = DEFAULT_URL,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_table: TableOption = False,
    shared: SharedOption = None,
) -> None:
    """Look embeddings up: each line {"feature": [[id, ...], ...], ...} gives {"feature": [[number, ...], ...], ...}.

    A feature of an EmbeddingCollection gives a list of rows for each sample: [[[number, ...], ...], ...].
    Instead of a list of bags, a feature may have a list of ids, one for each sample, or
    {"values": [...], "lengths": [...], "weights": [...]}.
    A line that cannot be answered is reported. The others are answered, and the exit code is 1. If the server or the
    model cannot be reached, nothing is looked up.
    """
    with LookupClient(url, model, timeout_s, tls=tls()) as client:
        client.info()

        def answer(line: bytes) -> Answer:
            return client.lookup(object_of(line, '{"feature": [[id, ...], ...], ...}'), shared=shared or ())

        refused = answer_lines(file, answer, _table if as_table else None)
    raise typer.Exit(refused)


def _table(answer: Answer) -> Table:
    table = Table("sample", "feature", "dim", "embedding")
    samples = max(map(len, answer.values()))
    shared = [name for name, found in answer.items() if len(found) < samples]
    for name in shared:
        _add_rows(table, "all", name, answer[name], 0)
    table.add_section()
    for sample in range(samples):
        for name in (name for name in answer if name not in shared):
            _add_rows(table, str(sample), name, answer[name], sample)
        table.add_section()
    return table


def _add_rows(table: Table, label: str, name: str, found: Embeddings | JaggedRows, sample: int) -> None:
    for row in found.rows(sample) if isinstance(found, JaggedRows) else found[sample : sample + 1]:
        table.add_row(label, name, str(row.size), brief(row))


_LINE = '{"features": {"feature": [[id, ...], ...], ...}, "dense": {"input": [[number, ...], ...], ...}}'


@takes_tls
def score(
    model: Annotated[str, typer.Argument(help="The model's name. It was exported with --scores.")],
    tls: TlsOf,
    file: LinesArgument = "-",  # type: ignore[assignment]
    url: UrlOption = DEFAULT_URL,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_table: TableOption = False,
    shared: SharedOption = None,
) -> None:
    """Score samples: each line {"features": {...}, "dense": {"input": [[number, ...], ...]}} gives {"output": [...]}.

    "features" has ids for all features of the model, as in `tbe-serve lookup`. "dense" has a row of numbers for each
    sample, by the name of the model's argument; of what has one for each id of a feature, such as the times of a
    history, the rows of each bag. It can be left out if the model has no such arguments.
    A line that cannot be answered is reported. The others are answered, and the exit code is 1. If the server or the
    model cannot be reached, or the model has no scores, nothing is scored.
    """
    with LookupClient(url, model, timeout_s, tls=tls()) as client:
        if not client.info().scores:
            raise ConfigurationError(f"MODEL {model!r}: expected one with scores: export it with --scores")

        def answer(line: bytes) -> Scores:
            return client.score(**_request(line), shared=shared or ())

        refused = answer_lines(file, answer, _scores_table if as_table else None)
    raise typer.Exit(refused)


def _request(line: bytes) -> dict[str, Any]:
    request = object_of(line, _LINE)
    if "features" not in request or not request.keys() <= {"features", "dense"}:
        raise InvalidRequest(f"expected {_LINE}, got the keys {', '.join(map(repr, request)) or 'none'}")
    return request


def _scores_table(scores: Scores) -> Table:
    table = Table("row", *scores)
    for row in range(max(map(len, scores.values()))):  # a score may have a row for each id
        table.add_row(
            str(row), *(brief(each[row].reshape(-1)) if row < len(each) else "" for each in scores.values())
        )
    return table
