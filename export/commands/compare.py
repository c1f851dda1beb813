"""`tbe-export compare`: measure shardings and dtypes, and write a report."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import MofNCompleteColumn

from export.commands.module import CheckpointOption, CheckpointPrefixOption, build_module
from export.commands.options import parsed_by_table
from export.commands.settings import by_table
from export.compare.study import STRATEGIES, StudyOptions
from export.plan.sharding import check_patterns, last_match
from export.values import size_bytes, weight_dtype
from serving.errors import ConfigurationError
from serving.files import as_text
from serving.pins import check_pins
from serving.terminal import app
from serving.terminal.app import progress_bar
from serving.terminal.options import real

if TYPE_CHECKING:
    from export.compare.baseline import ComparedTables


def compare(
    out: Annotated[Path, typer.Option(help="The folder for report.html, the figures and study.json.")],
    model: Annotated[
        str | None, typer.Option(help="package.module:function that builds the module, without arguments.")
    ] = None,
    checkpoint: CheckpointOption = None,
    checkpoint_prefix: CheckpointPrefixOption = None,
    tables: Annotated[
        Path | None,
        typer.Option(help="Instead of a model: a TOML file with [tables.NAME] of rows, dim and pooling_factor."),
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(STRATEGIES)}; all by default; may be given again.")
    ] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="How many ranks, 2 and 4 by default.")] = None,
    ranks_per_host: Annotated[int | None, typer.Option(help="Ranks on each host; by default all are on one.")] = None,
    memory_per_rank: Annotated[
        str | None, typer.Option(help="What a rank can hold, such as 16GB; by default this machine's memory ÷ ranks.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="int8 and int4 by default; may be given again.")] = None,
    pooling_factors: Annotated[
        list[str] | None,
        typer.Option(
            "--pooling-factor",
            metavar="[TABLE=]X",
            help="Average number of ids in a bag; by default what the TOML file says, or 1.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Samples in a request.")] = 128,
    seconds: Annotated[float, typer.Option(help="How long each placement is measured.")] = 1.0,
) -> None:
    """Place the same tables in every way, measure each, and write a report: what is fast, what fits, what to take."""
    options = StudyOptions(
        strategies=strategy or STRATEGIES,
        ranks=ranks or (2, 4),
        dtypes=[weight_dtype("dtype", each) for each in dtype or ("int8", "int4")],
        ranks_per_host=ranks_per_host,
        memory_bytes=None if memory_per_rank is None else size_bytes("memory_per_rank", memory_per_rank),
        batch_size=batch_size,
        seconds=seconds,
    )
    if (model is None) == (tables is None):
        raise ConfigurationError("expected one of --model and --tables")
    if tables is not None and checkpoint is not None:
        raise ConfigurationError("--checkpoint: expected --model with it: tables of a TOML file have no weights")
    check_pins()
    from export.compare.make_study import make_study
    from export.compare.page import findings, write_report

    compared = _compared_tables(model, checkpoint, checkpoint_prefix, tables, pooling_factors)
    out.mkdir(parents=True, exist_ok=True)  # before the minutes that the study takes
    command = as_text(shlex.join(["tbe-export", *sys.argv[1:]]))
    with progress_bar(40, "measuring errors", MofNCompleteColumn()) as show:
        study = make_study(compared, options, command, show)
    page, *others = write_report(study, out)
    for finding in findings(study):
        app.out.print(f"* {finding}", soft_wrap=True)
    for placement in study.placements:
        if placement.error is not None:
            app.complain(
                "tbe-export", f"{placement.strategy} on {placement.ranks} ranks, {placement.dtype}: {placement.error}"
            )
    app.out.print(f"written {page}, and {', '.join(other.name for other in others)} beside it", soft_wrap=True)


def _compared_tables(
    model: str | None,
    checkpoint: Path | None,
    checkpoint_prefix: str | None,
    file: Path | None,
    pooling_factors: list[str] | None,
) -> "ComparedTables":
    from export.commands.settings import read_tables
    from export.compare.baseline import ComparedTables
    from export.trained.generated_checkpoint import generated_checkpoint
    from export.trained.model_weights import open_weights
    from export.trained.tables import collect_tables

    if file is not None:
        trained, factors = read_tables(file)
        weights = generated_checkpoint(trained)
    else:
        module = build_module(str(model), meta=checkpoint is not None)
        collected, factors = collect_tables(module), {}
        trained = collected.tables
        weights = open_weights(module, collected, checkpoint, checkpoint_prefix)
        for table in trained:
            weights.check(table)
    given = parsed_by_table("pooling_factors", real, by_table(pooling_factors) or {})
    check_patterns("pooling_factors", given, [table.name for table in trained])
    return ComparedTables(
        trained=trained,
        weights=weights,
        pooling_factors={t.name: last_match(given, t.name, factors.get(t.name, 1.0)) for t in trained},
        generated=file is not None,
    )
