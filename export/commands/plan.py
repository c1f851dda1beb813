"""`tbe-export plan`: show where tables would go."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from export.commands.model import export_progress
from export.commands.module import CheckpointOption, ModelOption, build_module
from export.commands.settings import Config, takes_settings
from export.commands.show import show_placement, show_ranks, show_remarks, show_transfers
from export.plan.report import report_plan
from serving.errors import ConfigurationError
from serving.pins import check_pins
from serving.terminal.program import out


@takes_settings
def plan(
    model: ModelOption,
    config: Config,
    checkpoint: CheckpointOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, which --plan takes.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw it into this file: .png, .svg or .pdf.")] = None,
) -> None:
    """Show where tables would go: bytes by rank and table, and a request's traffic. Writes no bundle."""
    settings = config()
    check_pins()
    from export.pipeline import plan_model
    from export.plan.picture import draw_plan

    # The rows matter only where `max_error` chooses the dtype.
    module = build_module(model, meta=checkpoint is not None or not settings.max_error)
    with export_progress() as show:
        manifest = plan_model(module, settings, checkpoint=checkpoint, progress=show)
    report = report_plan(manifest, settings.sharding, settings.sums_dtype)
    if picture is not None:
        try:
            draw_plan(report, picture)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--picture {picture}: {error}") from error
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
        return
    show_placement(report)
    show_ranks(report, traffic=True)
    if report.transfers:
        show_transfers(report)
    out.print(f"tables: {len(report.tables)}, bytes: {report.bytes:,}, ranks: {len(report.ranks)}")
    show_remarks(report)
    if picture is not None:
        out.print(f"drawn {picture}", soft_wrap=True)
