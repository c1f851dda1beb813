"""`tbe-serve lookup`: embeddings for lines of JSON."""

import json
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from serving.client import DEFAULT_TIMEOUT_S, Answer, LookupClient
from serving.commands.terminal import DEFAULT_URL, TlsOf, UrlOption, fail, out, say, takes_tls
from serving.encoding import Features
from serving.errors import InvalidRequest, ServingError


@takes_tls
def lookup(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    tls: TlsOf,
    file: Annotated[
        typer.FileText, typer.Argument(help="JSON lines, one request each; standard input by default.")
    ] = "-",  # type: ignore[assignment]
    url: UrlOption = DEFAULT_URL,
    timeout_s: Annotated[float, typer.Option(help="Deadline of each request, in seconds.")] = DEFAULT_TIMEOUT_S,
    as_table: Annotated[bool, typer.Option("--table", help="Print a table instead of JSON lines.")] = False,
) -> None:
    """Look embeddings up: each line {"feature": [[id, ...], ...], ...} gives {"feature": [[number, ...], ...], ...}.

    Instead of a list of bags, a feature may have {"values": [...], "lengths": [...], "weights": [...]}.
    A line that cannot be answered is reported, the others are answered, and the exit code is 1.
    """
    refused = False
    try:
        with LookupClient(url, model, timeout_s, tls=tls()) as client:
            for number, line in enumerate(file, start=1):
                try:
                    answer = client.lookup(_request(line))
                except InvalidRequest as error:
                    refused = True
                    say(f"line {number}: {error}")
                else:
                    out.print(_table(answer)) if as_table else print(json.dumps(_plain(answer)), flush=True)
    except ServingError as error:
        fail(error)
    raise typer.Exit(refused)


def _request(line: str) -> Features:
    try:
        request: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidRequest(f"expected JSON: {error}") from error
    if not isinstance(request, dict):
        raise InvalidRequest(f'expected {{"feature": [[id, ...], ...], ...}}, got {line.strip()[:40]!r}')
    return {name: _bags(name, bags) for name, bags in request.items()}


def _bags(name: str, bags: Any) -> Any:
    if not isinstance(bags, dict):
        return bags
    if not {"values", "lengths"} <= bags.keys() <= {"values", "lengths", "weights"}:
        raise InvalidRequest(f"feature {name!r}: expected values, lengths and perhaps weights, got {list(bags)}")
    return tuple(bags[key] for key in ("values", "lengths", "weights") if key in bags)


def _plain(answer: Answer) -> dict[str, Any]:
    """The shortest decimals that read back as the same numbers."""
    return {name: rows.astype(str).astype(np.float64).tolist() for name, rows in answer.items()}


def _table(answer: Answer) -> Table:
    table = Table("sample", "feature", "dim", "embedding")
    for sample in range(len(next(iter(answer.values())))):
        for name, rows in answer.items():
            row = rows[sample]
            shown = " ".join(f"{number:+.4f}" for number in row[:6])
            table.add_row(str(sample), name, str(row.size), shown + (" …" if row.size > 6 else ""))
        table.add_section()
    return table
