"""`tbe-serve score`: the scores of a whole model for requests in JSON."""

from typing import Annotated, Any

import typer
from rich.table import Table

from serving.client import DEFAULT_TIMEOUT_S, LookupClient, Scores
from serving.commands.connection import DEFAULT_URL, TlsOf, UrlOption, takes_tls
from serving.commands.json_lines import (
    LinesArgument,
    OnceOption,
    TableOption,
    TimeoutOption,
    answer_lines,
    brief,
    object_of,
)
from serving.errors import ConfigurationError, InvalidRequest

_LINE = '{"features": {"feature": [[id, ...], ...], ...}, "dense": {"input": [[number, ...], ...], ...}}'


@takes_tls
def score(
    model: Annotated[str, typer.Argument(help="The model's name. It was exported with --scores.")],
    tls: TlsOf,
    file: LinesArgument = "-",  # type: ignore[assignment]
    url: UrlOption = DEFAULT_URL,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_table: TableOption = False,
    once: OnceOption = None,
) -> None:
    """Score samples: each line {"features": {...}, "dense": {"input": [[number, ...], ...]}} gives {"output": [...]}.

    "features" has ids for all features of the model, as `tbe-serve lookup` takes them. "dense" has a row of numbers
    for each sample, by the name of the model's argument; it can be left out where the model has no such arguments.
    A line that cannot be answered is reported, and the others are answered. Then the exit code is 1. Nothing is
    scored if the server or the model cannot be reached at all, or the model has no scores.
    """
    with LookupClient(url, model, timeout_s, tls=tls()) as client:
        if not client.info().scores:
            raise ConfigurationError(f"MODEL {model!r}: expected one with scores: export it with --scores")

        def answer(line: bytes) -> Scores:
            return client.score(**_request(line), once=once or ())

        refused = answer_lines(file, answer, _table if as_table else None)
    raise typer.Exit(refused)


def _request(line: bytes) -> dict[str, Any]:
    request = object_of(line, _LINE)
    if "features" not in request or not request.keys() <= {"features", "dense"}:
        raise InvalidRequest(f"expected {_LINE}, got the keys {', '.join(map(repr, request)) or 'none'}")
    return request


def _table(scores: Scores) -> Table:
    table = Table("sample", *scores)
    for sample in range(len(next(iter(scores.values())))):
        table.add_row(str(sample), *(brief(rows[sample].reshape(-1)) for rows in scores.values()))
    return table
