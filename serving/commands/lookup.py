"""`tbe-serve lookup` and `tbe-serve score`: one request per line of JSON."""

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
from serving.requests.input_forms import Nulls
from serving.requests.types import Array, Embeddings
from serving.terminal.app import out
from serving.terminal.output import is_read, lost, print_json

Answered = TypeVar("Answered", bound=Mapping[str, Any])
LinesArgument = Annotated[
    typer.FileBinaryRead, typer.Argument(help="File with one JSON request per line. Default: standard input.")
]
TimeoutOption = Annotated[float, typer.Option(help="Deadline of each request, in seconds.")]
TableOption = Annotated[bool, typer.Option("--table", help="Print a table instead of JSON lines.")]
SharedOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A feature with one bag, or a dense input with one row, that all samples of a line share, such as the "
        "user's features in ranking. May be repeated."
    ),
]

NullsOption = Annotated[
    Nulls,
    typer.Option(
        help="`empty` reads a null bag as an empty one, and leaves null ids out, together with their weights."
    ),
]


def answer_lines(
    file: typer.FileBinaryRead, answer: Callable[[bytes], Answered], table: Callable[[Answered], Table] | None
) -> bool:
    """Print the answer to each line of a file, skipping blank lines, and report lines that fail.

    Args:
        file: the lines.
        answer: answers a line. It may raise a ServingError.
        table: makes a table of an answer. None: print a JSON line.

    Returns:
        Whether a line failed or an answer could not be printed.
    """
    refused = False
    where = "" if file is sys.stdin.buffer else f"{file.name}: "
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            arrays = answer(line)
        except ServingError as error:
            refused = True
            say(f"{where}line {number}: {error}")
        else:
            print_arrays(arrays) if table is None else out.print(table(arrays))
            if not is_read():  # `| head`, or a full disk
                break
    return refused or lost() is not None


def object_of(line: bytes, expected: str) -> dict[str, Any]:
    """Parse a line as a JSON object.

    Args:
        line: untrusted input.
        expected: the form of the object, for the message.

    Raises:
        InvalidRequest: the line is not a JSON object, or an object in it has a key twice.
    """
    try:
        request: Any = json.loads(line.decode(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number of 5,000 digits
        raise InvalidRequest(f"expected JSON, {expected}: {error}") from error
    if not isinstance(request, dict):
        raise InvalidRequest(f"expected {expected}, got {line.decode().strip()[:40]!r}")
    return request


def _unique_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Python would take the last of several values of a key."""
    values = dict(items)
    if len(values) < len(items):
        keys = [key for key, _ in items]
        key = next(key for key in keys if keys.count(key) > 1)
        raise InvalidRequest(f"expected each key of a JSON object once, got {key!r} {keys.count(key)} times")
    return values


def print_arrays(arrays: Mapping[str, Array | JaggedRows]) -> None:
    """Print arrays as a JSON line. Each number is the shortest decimal that reads back as the same float.

    JaggedRows are printed as a list of rows for each sample.
    """
    plain = {
        name: [_decimals(array.rows(sample)) for sample in range(len(array))]
        if isinstance(array, JaggedRows)
        else _decimals(array)
        for name, array in arrays.items()
    }
    print_json(json.dumps(plain))


def _decimals(rows: Array) -> Any:
    """Convert to lists: floats by their shortest decimal, integers and booleans unchanged."""
    return rows.astype(str).astype(np.float64).tolist() if rows.dtype.kind == "f" else rows.tolist()


def brief(row: Array) -> str:
    """The first six numbers of a one-dimensional array, for a table cell."""
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
    nulls: NullsOption = "refuse",
) -> None:
    """Look up embeddings. Input lines: {"feature": [[id, ...], ...], ...}, one bag of ids for each sample.

    Output lines: {"feature": [[number, ...], ...], ...}. A feature of an EmbeddingCollection has a list of rows for
    each sample: [[[number, ...], ...], ...]. Instead of bags, a feature may have a list of ids, one for each sample,
    or {"values": [...], "lengths": [...], "weights": [...]}.
    Lines that fail are reported, the other lines are answered, and the exit code is 1. If the server or the model
    cannot be reached, nothing is looked up.
    """
    with LookupClient(url, model, timeout_s, tls=tls()) as client:
        client.info()

        def answer(line: bytes) -> Answer:
            request = object_of(line, '{"feature": [[id, ...], ...], ...}')
            return client.lookup(request, shared=shared or (), nulls=nulls)

        refused = answer_lines(file, answer, _table if as_table else None)
    raise typer.Exit(refused)


def _table(answer: Answer) -> Table:
    table = Table("sample", "feature", "dim", "embedding")
    samples = max(map(len, answer.values()))
    shared = [name for name, embeddings in answer.items() if len(embeddings) < samples]
    for name in shared:
        _add_rows(table, "all", name, answer[name], 0)
    table.add_section()
    for sample in range(samples):
        for name in (name for name in answer if name not in shared):
            _add_rows(table, str(sample), name, answer[name], sample)
        table.add_section()
    return table


def _add_rows(table: Table, label: str, name: str, embeddings: Embeddings | JaggedRows, sample: int) -> None:
    rows = embeddings.rows(sample) if isinstance(embeddings, JaggedRows) else embeddings[sample : sample + 1]
    for row in rows:
        table.add_row(label, name, str(row.size), brief(row))


_LINE = '{"features": {"feature": [[id, ...], ...], ...}, "dense": {"input": [[number, ...], ...], ...}}'


@takes_tls
def score(
    model: Annotated[str, typer.Argument(help="Name of a model that was exported with --scores.")],
    tls: TlsOf,
    file: LinesArgument = "-",  # type: ignore[assignment]
    url: UrlOption = DEFAULT_URL,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_table: TableOption = False,
    shared: SharedOption = None,
    nulls: NullsOption = "refuse",
) -> None:
    """Score samples. Input lines: {"features": {...}, "dense": {"input": [[number, ...], ...]}}.

    Output lines: {"output": [...]}. "features" has ids for all features of the model, as in `tbe-serve lookup`.
    "dense" has the model's other arguments by name, one row of numbers for each sample. An argument with one row for
    each id of a feature, such as the times of a history, has a list of rows for each bag. Omit "dense" if the model
    has no such arguments.
    Lines that fail are reported, the other lines are answered, and the exit code is 1. If the server or the model
    cannot be reached, or the model has no scores, nothing is scored.
    """
    with LookupClient(url, model, timeout_s, tls=tls()) as client:
        if not client.info().scores:
            raise ConfigurationError(f"MODEL {model!r}: expected a model with scores: export it with --scores")

        def answer(line: bytes) -> Scores:
            return client.score(**_request(line), shared=shared or (), nulls=nulls)

        refused = answer_lines(file, answer, _scores_table if as_table else None)
    raise typer.Exit(refused)


def _request(line: bytes) -> dict[str, Any]:
    request = object_of(line, _LINE)
    if "features" not in request or not request.keys() <= {"features", "dense"}:
        raise InvalidRequest(f"expected {_LINE}, got the keys {', '.join(map(repr, request)) or 'none'}")
    return request


def _scores_table(scores: Scores) -> Table:
    table = Table("row", *scores)
    for row in range(max(map(len, scores.values()))):  # an output may have one row for each id
        cells = (brief(array[row].reshape(-1)) if row < len(array) else "" for array in scores.values())
        table.add_row(str(row), *cells)
    return table
