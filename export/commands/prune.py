"""`tbe-export prune`: remove old versions of a model."""

from pathlib import Path
from typing import Annotated

import typer

from export.publish.prune import prune as prune_versions
from serving.terminal.program import out


def prune(
    model: Annotated[Path, typer.Argument(help="The model's folder: REPOSITORY/NAME.")],
    keep: Annotated[int, typer.Option(help="How many of the newest versions stay, whatever happens.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove old versions of a model; never one that a server on this host has open, or that is to be served."""
    for fate in prune_versions(model, keep, dry_run=dry_run):
        removed = "would be removed" if dry_run else "removed"
        out.print(f"{model / str(fate.version)}: {fate.kept or removed}", soft_wrap=True)
