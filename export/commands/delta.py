"""`tbe-export delta`: publish the rows that changed since a version was exported."""

from pathlib import Path
from typing import Annotated, Any

import typer

from export.commands.module import CheckpointOption, build_module
from serving.errors import ConfigurationError
from serving.pins import check_pins
from serving.terminal.app import out
from serving.terminal.options import real


def delta(
    model: Annotated[Path, typer.Argument(help="The model's folder: REPOSITORY/NAME.")],
    rows: Annotated[
        Path | None,
        typer.Option(
            help="safetensors with `TABLE/ids`, integers [n], and `TABLE/rows`, floats [n, dim], as trained."
        ),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            "--model", help="package.module:function of the trained model: all rows that are stored otherwise by now."
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    version: Annotated[
        int | None, typer.Option(min=1, max=2**63 - 1, help="The version whose rows change. Default: the newest.")
    ] = None,
    max_error: Annotated[
        list[str] | None, typer.Option(metavar="TABLE=X", help="No element of the table may move by more than X.")
    ] = None,
    deltas: Annotated[
        Path | None,
        typer.Option(help="Folder of all deltas, as `tbe-serve run --deltas`. Default: REPOSITORY.deltas."),
    ] = None,
    signing_key: Annotated[
        Path | None, typer.Option(help="PEM file with the Ed25519 private key that signs the delta.")
    ] = None,
) -> None:
    """Publish changed rows of a model: servers with `weights-memory: live` serve them within a second."""
    if (rows is None) == (module is None):
        raise ConfigurationError("expected --rows, or --model and perhaps --checkpoint: where the changed rows are")
    if checkpoint is not None and module is None:
        raise ConfigurationError("--checkpoint: expected --model too: it says which tables to look for")
    check_pins()
    from export.publish.changes import publish_changes
    from export.publish.delta import publish_delta, read_changed

    common: dict[str, Any] = {
        "version": version,
        "max_error": dict(_limit(text) for text in max_error or ()),
        "deltas": deltas,
        "signing_key": signing_key,
    }
    where = model.absolute().parent, model.absolute().name
    if module is None:
        assert rows is not None  # noqa: S101  one of the two is given
        found = publish_delta(*where, read_changed(rows), **common)
    else:
        trained = build_module(module, meta=checkpoint is not None)
        changes = publish_changes(*where, trained, checkpoint=checkpoint, **common)
        if changes is None:
            out.print(f"{model}: no row differs: nothing is published", soft_wrap=True)
            return
        found = changes
    out.print(f"{found.path}: {found.rows:,} rows, delta {found.sequence} of version {found.version}", soft_wrap=True)


def _limit(text: str) -> tuple[str, float]:
    table, _, limit = text.rpartition("=")
    if not table:
        raise ConfigurationError(f"--max-error {text}: expected TABLE=X")
    return table, real("--max-error", limit)
