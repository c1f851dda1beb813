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
    out: Annotated[Path, typer.Option(help="Folder to write report.html, the figures and study.json to.")],
    model: Annotated[
        str | None, typer.Option(help="package.module:function that builds the trained module, without arguments.")
    ] = None,
    checkpoint: CheckpointOption = None,
    checkpoint_prefix: CheckpointPrefixOption = None,
    tables: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --model: a TOML file that describes tables, each as [tables.NAME] with rows, dim and "
            "pooling_factor."
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help=f"How tables are sharded: {', '.join(STRATEGIES)}; all by default. May be repeated."),
    ] = None,
    ranks: Annotated[
        list[int] | None, typer.Option(help="Number of ranks; 2 and 4 by default. May be repeated.")
    ] = None,
    ranks_per_host: Annotated[
        int | None, typer.Option(help="Ranks on each host; by default all are on one host.")
    ] = None,
    memory_per_rank: Annotated[
        str | None, typer.Option(help="Memory of a rank, such as 16GB; by default this machine's memory ÷ ranks.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Dtype of stored rows; int8 and int4 by default. May be repeated.")
    ] = None,
    pooling_factors: Annotated[
        list[str] | None,
        typer.Option(
            "--pooling-factor",
            metavar="[TABLE=]X",
            help="Mean number of ids in a bag; by default as in the TOML file, or 1.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Samples in a request.")] = 128,
    seconds: Annotated[float, typer.Option(help="Seconds for which each placement is measured.")] = 1.0,
) -> None:
    """Shard the same tables in several ways, measure each, and write a report: speed, memory, and what to choose."""
    options = StudyOptions(
        strategies=strategy or STRATEGIES,
        ranks=ranks or (2, 4),
        dtypes=[weight_dtype("dtype", name) for name in dtype or ("int8", "int4")],
        ranks_per_host=ranks_per_host,
        memory_bytes=None if memory_per_rank is None else size_bytes("memory_per_rank", memory_per_rank),
        batch_size=batch_size,
        seconds=seconds,
    )
    if (model is None) == (tables is None):
        raise ConfigurationError("expected either --model or --tables")
    if tables is not None and checkpoint is not None:
        raise ConfigurationError("--checkpoint: expected --model with it: tables of a TOML file have no weights")
    check_pins()
    from export.compare.make_study import make_study
    from export.compare.page import findings, write_report

    compared = _compared_tables(model, checkpoint, checkpoint_prefix, tables, pooling_factors)
    out.mkdir(parents=True, exist_ok=True)  # fails before the study, which takes minutes
    command = as_text(shlex.join(["tbe-export", *sys.argv[1:]]))
    with progress_bar(40, "measuring errors", MofNCompleteColumn()) as show:
        study = make_study(compared, options, command, show)
    page, *files = write_report(study, out)
    for finding in findings(study):
        app.out.print(f"* {finding}", soft_wrap=True)
    for placement in study.placements:
        if placement.error is not None:
            app.complain(
                "tbe-export", f"{placement.strategy} on {placement.ranks} ranks, {placement.dtype}: {placement.error}"
            )
    app.out.print(f"written {page}, and {', '.join(file.name for file in files)} beside it", soft_wrap=True)


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
    by_pattern = parsed_by_table("pooling_factors", real, by_table(pooling_factors) or {})
    check_patterns("pooling_factors", by_pattern, [table.name for table in trained])
    return ComparedTables(
        trained=trained,
        weights=weights,
        pooling_factors={t.name: last_match(by_pattern, t.name, factors.get(t.name, 1.0)) for t in trained},
        generated=file is not None,
    )
