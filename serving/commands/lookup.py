"""`tbe-serve lookup`: look up embeddings for requests in JSON."""

from typing import Annotated

import typer
from rich.table import Table

from serving.client import DEFAULT_TIMEOUT_S, Answer, LookupClient, Sequence
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
from serving.request.tensors import Embeddings


@takes_tls
def lookup(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    tls: TlsOf,
    file: LinesArgument = "-",  # type: ignore[assignment]
    url: UrlOption = DEFAULT_URL,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_table: TableOption = False,
    once: OnceOption = None,
) -> None:
    """Look embeddings up: each line {"feature": [[id, ...], ...], ...} gives {"feature": [[number, ...], ...], ...}.

    A feature of an EmbeddingCollection gives a list of rows for each sample: [[[number, ...], ...], ...].
    Instead of a list of bags, a feature may have a list of ids, one for each sample, or
    {"values": [...], "lengths": [...], "weights": [...]}.
    A line that cannot be answered is reported, and the others are answered. Then the exit code is 1. Nothing is
    looked up if the server or the model cannot be reached at all.
    """
    with LookupClient(url, model, timeout_s, tls=tls()) as client:
        client.info()

        def answer(line: bytes) -> Answer:
            return client.lookup(object_of(line, '{"feature": [[id, ...], ...], ...}'), once=once or ())

        refused = answer_lines(file, answer, _table if as_table else None)
    raise typer.Exit(refused)


def _table(answer: Answer) -> Table:
    table = Table("sample", "feature", "dim", "embedding")
    samples = max(map(len, answer.values()))
    once = [name for name, found in answer.items() if len(found) < samples]
    for name in once:
        _add_rows(table, "all", name, answer[name], 0)
    table.add_section()
    for sample in range(samples):
        for name in (name for name in answer if name not in once):
            _add_rows(table, str(sample), name, answer[name], sample)
        table.add_section()
    return table


def _add_rows(table: Table, label: str, name: str, found: Embeddings | Sequence, sample: int) -> None:
    for row in found.rows(sample) if isinstance(found, Sequence) else found[sample : sample + 1]:
        table.add_row(label, name, str(row.size), brief(row))
