"""`tbe-export inspect`: show what a bundle holds."""

from pathlib import Path
from typing import Annotated

import typer

from export.commands.show import (
    show_cached,
    show_hosts,
    show_parity,
    show_placement,
    show_ranks,
    show_remarks,
    show_scores,
    show_tables,
)
from export.plan.report import report_plan
from export.plan.sharding import Sharding
from serving.bundle.manifest import MANIFEST
from serving.bundle.opening import open_bundle
from serving.terminal.program import out


def inspect(
    bundle: Annotated[Path, typer.Argument(help="A version: REPOSITORY/NAME/VERSION.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest itself.")] = False,
) -> None:
    """Show what a bundle holds: tables, dtypes, bytes before and after, shards, features, versions, parity."""
    manifest = open_bundle(bundle).manifest
    if as_json:
        print((bundle / MANIFEST).read_text(), end="")
        return
    show_tables(manifest)
    if len(manifest.plan.ranks) > 1:
        report = report_plan(manifest, Sharding())
        show_placement(report)
        show_ranks(report, traffic=False)
    show_hosts(manifest)
    show_parity(manifest.parity)
    show_scores(manifest, manifest.dense_part)
    show_remarks(manifest)
    show_cached(bundle, manifest)
    out.print("made with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
