"""`tbe-serve lookup`: look up embeddings for requests in JSON."""

import json
import sys
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from serving.client import DEFAULT_TIMEOUT_S, Answer, LookupClient, Sequence
from serving.commands.connection import DEFAULT_URL, TlsOf, UrlOption, say, takes_tls
from serving.errors import InvalidRequest, ServingError
from serving.request.encoding import Features
from serving.request.tensors import Embeddings
from serving.terminal.program import out


@takes_tls
def lookup(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    tls: TlsOf,
    file: Annotated[
        typer.FileBinaryRead, typer.Argument(help="JSON lines, one request each; standard input by default.")
    ] = "-",  # type: ignore[assignment]
    url: UrlOption = DEFAULT_URL,
    timeout_s: Annotated[float, typer.Option(help="Deadline of each request, in seconds.")] = DEFAULT_TIMEOUT_S,
    as_table: Annotated[bool, typer.Option("--table", help="Print a table instead of JSON lines.")] = False,
) -> None:
    """Look embeddings up: each line {"feature": [[id, ...], ...], ...} gives {"feature": [[number, ...], ...], ...}.

    A feature of an EmbeddingCollection gives a list of rows for each sample: [[[number, ...], ...], ...].
    Instead of a list of bags, a feature may have a list of ids, one for each sample, or
    {"values": [...], "lengths": [...], "weights": [...]}.
    A line that cannot be answered is reported, and the others are answered. Then the exit code is 1. Nothing is
    looked up if the server or the model cannot be reached at all.
    """
    refused = False
    where = "" if file is sys.stdin.buffer else f"{file.name}: "
    with LookupClient(url, model, timeout_s, tls=tls()) as client:
        client.info()
        for number, line in enumerate(file, start=1):
            try:
                answer = client.lookup(_request(line))
            except ServingError as error:
                refused = True
                say(f"{where}line {number}: {error}")
            else:
                out.print(_table(answer)) if as_table else print(json.dumps(_plain(answer)), flush=True)
    raise typer.Exit(refused)


def _request(line: bytes) -> Features:
    try:
        request: Any = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or a number of 5,000 digits
        raise InvalidRequest(f"expected JSON: {error}") from error
    if not isinstance(request, dict):
        raise InvalidRequest(f'expected {{"feature": [[id, ...], ...], ...}}, got {line.decode().strip()[:40]!r}')
    return request


def _plain(answer: Answer) -> dict[str, Any]:
    """The embeddings as lists of the shortest decimals that read back as the same numbers.

    A sequence is a list of lists of rows: one for each sample.
    """
    return {
        name: [_decimals(found.rows(sample)) for sample in range(len(found))]
        if isinstance(found, Sequence)
        else _decimals(found)
        for name, found in answer.items()
    }


def _decimals(rows: Embeddings) -> Any:
    return rows.astype(str).astype(np.float64).tolist()


def _table(answer: Answer) -> Table:
    table = Table("sample", "feature", "dim", "embedding")
    for sample in range(len(next(iter(answer.values())))):
        for name, found in answer.items():
            for row in found.rows(sample) if isinstance(found, Sequence) else found[sample : sample + 1]:
                shown = " ".join(f"{number:+.4f}" for number in row[:6])
                table.add_row(str(sample), name, str(row.size), shown + (" …" if row.size > 6 else ""))
        table.add_section()
    return table
