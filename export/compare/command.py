"""`tbe-export compare`: the study as a command."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import progress as bars

from export.checkpoint import open_weights
from export.compare.asked import STRATEGIES, Options, Tables
from export.compare.page import findings, write_report
from export.compare.run import run_study
from export.compare.tables_file import read_tables
from export.errors import ConfigError
from export.generated import generated_checkpoint
from export.matching import check_patterns, last_match
from export.options import CheckpointOption, build_module
from export.settings import by_table, dtype_named, factors_by_table, size_bytes
from export.tables import collect_tables
from serving import terminal
from serving.strict import as_text


def compare(
    out: Annotated[Path, typer.Option(help="The folder for report.html, the figures and study.json.")],
    model: Annotated[
        str | None, typer.Option(help="package.module:function that builds the module, without arguments.")
    ] = None,
    checkpoint: CheckpointOption = None,
    tables: Annotated[
        Path | None,
        typer.Option(help="Instead of a model: a TOML file with [tables.NAME] of rows, dim and pooling_factor."),
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(STRATEGIES)}; all by default; may be given again.")
    ] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="How many ranks, 2 and 4 by default.")] = None,
    ranks_per_host: Annotated[int | None, typer.Option(help="How many on each host; else all on one.")] = None,
    memory_per_rank: Annotated[
        str | None, typer.Option(help="What a rank can hold, as 16GB; else this machine's memory ÷ ranks.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="int8 and int4 by default; may be given again.")] = None,
    pooling_factors: Annotated[
        list[str] | None,
        typer.Option(
            "--pooling-factor",
            metavar="[TABLE=]X",
            help="Ids in a bag on average; 1, or what the TOML file says, by default.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Samples in a request.")] = 128,
    seconds: Annotated[float, typer.Option(help="How long each placement is measured.")] = 1.0,
) -> None:
    """Place the same tables in every way, measure each, and write a report: what is fast, what fits, what to take."""
    compared = _tables(model, checkpoint, tables, pooling_factors)
    options = Options(
        strategies=strategy or STRATEGIES,
        ranks=ranks or (2, 4),
        dtypes=[dtype_named(each) for each in dtype or ("int8", "int4")],
        ranks_per_host=ranks_per_host,
        memory_bytes=None if memory_per_rank is None else size_bytes(memory_per_rank),
        batch_size=batch_size,
        seconds=seconds,
    )
    out.mkdir(parents=True, exist_ok=True)  # before the minutes that the study takes
    command = as_text(shlex.join(["tbe-export", *sys.argv[1:]]))
    with bars.Progress(
        bars.TextColumn("{task.description:<40}", markup=False),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        console=terminal.err,
        transient=True,
        disable=not terminal.err.is_terminal,
    ) as bar:
        task = bar.add_task("measuring errors", total=None)
        study = run_study(
            compared,
            options,
            command,
            lambda what, done, steps: bar.update(task, description=what, completed=done, total=steps),
        )
    page, *others = write_report(study, out)
    for finding in findings(study):
        terminal.out.print(f"* {finding}", soft_wrap=True)
    for each in study.placements:
        if each.error is not None:
            terminal.complain("tbe-export", f"{each.strategy} on {each.ranks} ranks, {each.dtype}: {each.error}")
    terminal.out.print(f"written {page}, and {', '.join(other.name for other in others)} beside it", soft_wrap=True)


def _tables(
    model: str | None, checkpoint: Path | None, file: Path | None, pooling_factors: list[str] | None
) -> Tables:
    if (model is None) == (file is None):
        raise ConfigError("expected one of --model and --tables")
    if file is not None:
        if checkpoint is not None:
            raise ConfigError("--checkpoint: expected --model with it: the tables of a TOML file have no weights")
        trained, factors = read_tables(file)
        weights = generated_checkpoint(trained)
    else:
        module = build_module(str(model), meta=checkpoint is not None)
        trained, factors = collect_tables(module).tables, {}
        weights = open_weights(module, trained, checkpoint)
        for table in trained:
            weights.check(table)
    given = factors_by_table(by_table(pooling_factors))
    check_patterns("pooling_factors", given, [table.name for table in trained])
    return Tables(
        trained=trained,
        weights=weights,
        pooling_factors={t.name: last_match(given, t.name, factors.get(t.name, 1.0)) for t in trained},
        generated=file is not None,
    )
