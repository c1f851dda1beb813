"""Requests as JSON lines, each answered or reported: what `tbe-serve lookup` and `score` share."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from rich.table import Table

from serving.client import Sequence
from serving.commands.connection import say
from serving.errors import InvalidRequest, ServingError
from serving.request.tensors import Array
from serving.terminal.program import out

Answered = TypeVar("Answered", bound=Mapping[str, Any])
LinesArgument = Annotated[
    typer.FileBinaryRead, typer.Argument(help="JSON lines, one request each; standard input by default.")
]
TimeoutOption = Annotated[float, typer.Option(help="Deadline of each request, in seconds.")]
TableOption = Annotated[bool, typer.Option("--table", help="Print a table instead of JSON lines.")]
OnceOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A feature with one bag in each line, or a dense input with one row: it counts for all samples of the "
        "line, as the user's do in ranking. May be given several times."
    ),
]


def answer_lines(
    file: typer.FileBinaryRead, answer: Callable[[bytes], Answered], table: Callable[[Answered], Table] | None
) -> bool:
    """Print an answer to each line of a file that is not blank, and report the lines that cannot be answered.

    Args:
        file: the lines.
        answer: answers one; may raise a ServingError.
        table: how an answer is shown. None: as a JSON line.

    Returns:
        Whether there are lines that cannot be answered.
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
    return refused


def object_of(line: bytes, expected: str) -> dict[str, Any]:
    """The JSON object in a line.

    Args:
        line: of a file that anybody may have written.
        expected: what it looks like.

    Raises:
        InvalidRequest: there is none.
    """
    try:
        request: Any = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or a number of 5,000 digits
        raise InvalidRequest(f"expected JSON: {error}") from error
    if not isinstance(request, dict):
        raise InvalidRequest(f"expected {expected}, got {line.decode().strip()[:40]!r}")
    return request


def print_arrays(arrays: Mapping[str, Array | Sequence]) -> None:
    """Print arrays as a JSON line. Their numbers are the shortest decimals that read back as the same.

    A sequence is a list of lists of rows: one for each sample.
    """
    plain = {
        name: [_decimals(found.rows(sample)) for sample in range(len(found))]
        if isinstance(found, Sequence)
        else _decimals(found)
        for name, found in arrays.items()
    }
    print(json.dumps(plain), flush=True)


def _decimals(rows: Array) -> Any:
    return rows.astype(str).astype(np.float64).tolist()


def brief(row: Array) -> str:
    """The first numbers of an array of one dimension, for a column of a table."""
    return " ".join(f"{number:+.4f}" for number in row[:6]) + (" …" if row.size > 6 else "")
