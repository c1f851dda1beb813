"""`tbe-export compare`: measure shardings and dtypes, and write a report."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import MofNCompleteColumn

from export.commands.labelled import LabelledOptions, takes_labelled
from export.commands.module import CheckpointOption, CheckpointPrefixOption, build_module
from export.commands.options import parsed_by_table
from export.commands.settings import by_table
from export.compare.study import STRATEGIES, StudyOptions
from export.plan.sharding import check_patterns, last_match
from export.values import size_bytes, weight_dtype
from serving.bundle.formats import WeightDtype
from serving.errors import ConfigurationError
from serving.files import as_text
from serving.pins import check_pins
from serving.terminal import app
from serving.terminal.app import progress_bar
from serving.terminal.options import real

if TYPE_CHECKING:
    from export.compare.baseline import ComparedTables
    from export.trained.checkpoint import Checkpoint
    from export.trained.tables import TrainedTable


@takes_labelled
def compare(
    labelled: Callable[[], LabelledOptions | None],
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
    batch_size: Annotated[int | None, typer.Option(help="Samples in a request; 128 by default.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds for which each placement is measured; 1 by default.")
    ] = None,
) -> None:
    """Shard the same tables in several ways, measure each, and write a report: speed, memory, and what to choose.

    With --labelled, measure the AUC of each dtype instead, and recommend the smallest bundle that keeps it. Shardings
    are then measured if one of their options is given, such as --strategy or --ranks.
    """
    labelled_options = labelled()
    dtypes = [weight_dtype("dtype", name) for name in dtype or ()]
    about_shardings = (strategy, ranks, ranks_per_host, memory_per_rank, pooling_factors, batch_size, seconds)
    options = None
    if labelled_options is None or any(value not in (None, []) for value in about_shardings):
        options = StudyOptions(
            strategies=strategy or STRATEGIES,
            ranks=ranks or (2, 4),
            dtypes=dtypes or (WeightDtype.INT8, WeightDtype.INT4),
            ranks_per_host=ranks_per_host,
            memory_bytes=None if memory_per_rank is None else size_bytes("memory_per_rank", memory_per_rank),
            batch_size=128 if batch_size is None else batch_size,
            seconds=1.0 if seconds is None else seconds,
        )
    if (model is None) == (tables is None):
        raise ConfigurationError("expected either --model or --tables")
    if tables is not None and checkpoint is not None:
        raise ConfigurationError("--checkpoint: expected --model with it: tables of a TOML file have no weights")
    if tables is not None and labelled_options is not None:
        raise ConfigurationError("--labelled: expected --model with it: tables of a TOML file have no scores")
    check_pins()
    from export.compare.make_study import make_study
    from export.compare.measure_dtypes import measure_dtypes
    from export.compare.page import RECOMMENDED, findings, write_report
    from export.prepare import prepare

    command = as_text(shlex.join(["tbe-export", *sys.argv[1:]]))
    dtype_study = settings = None
    with progress_bar(40, "measuring errors", MofNCompleteColumn()) as show:
        if labelled_options is None:
            compared = _compared_tables(model, checkpoint, checkpoint_prefix, tables, pooling_factors)
            out.mkdir(parents=True, exist_ok=True)  # fails before the study, which takes minutes
        else:
            module = build_module(str(model), meta=checkpoint is not None)
            config = labelled_options.config(checkpoint_prefix)
            prepared = prepare(module, config, checkpoint, None, lambda _: None)
            compared = _with_pooling_factors(prepared.trained.tables, prepared.weights, pooling_factors)
            out.mkdir(parents=True, exist_ok=True)
            of_labelled = labelled_options.measured
            dtype_study = measure_dtypes(prepared, replace(of_labelled, dtypes=dtypes or of_labelled.dtypes), show)
            settings = labelled_options.recommended(dtype_study)
        study = make_study(compared, options, command, show, dtype_study)
    page, *files = write_report(study, out, settings)
    for finding in findings(study):
        app.out.print(f"* {finding}", soft_wrap=True)
    for placement in study.placements:
        if placement.error is not None:
            app.complain(
                "tbe-export", f"{placement.strategy} on {placement.ranks} ranks, {placement.dtype}: {placement.error}"
            )
    app.out.print(f"written {page}, and {', '.join(file.name for file in files)} beside it", soft_wrap=True)
    if settings is not None:
        app.out.print(f"next: tbe-export model --config {out / RECOMMENDED} …", soft_wrap=True)


def _compared_tables(
    model: str | None,
    checkpoint: Path | None,
    checkpoint_prefix: str | None,
    file: Path | None,
    pooling_factors: list[str] | None,
) -> "ComparedTables":
    from export.commands.settings import read_tables
    from export.trained.generated_checkpoint import generated_checkpoint
    from export.trained.model_weights import open_weights
    from export.trained.tables import collect_tables

    if file is not None:
        trained, factors = read_tables(file)
        return _with_pooling_factors(trained, generated_checkpoint(trained), pooling_factors, factors)
    module = build_module(str(model), meta=checkpoint is not None)
    collected = collect_tables(module)
    weights = open_weights(module, collected, checkpoint, checkpoint_prefix)
    for table in collected.tables:
        weights.check(table)
    return _with_pooling_factors(collected.tables, weights, pooling_factors)


def _with_pooling_factors(
    trained: "Sequence[TrainedTable]",
    weights: "Checkpoint",
    typed: list[str] | None,
    of_file: Mapping[str, float] | None = None,
) -> "ComparedTables":
    """Tables with the pooling factors that were typed, or else those of a tables file, which has random rows."""
    from export.compare.baseline import ComparedTables

    by_pattern = parsed_by_table("pooling_factors", real, by_table(typed) or {})
    check_patterns("pooling_factors", by_pattern, [table.name for table in trained])
    factors = of_file or {}
    return ComparedTables(
        trained=trained,
        weights=weights,
        pooling_factors={t.name: last_match(by_pattern, t.name, factors.get(t.name, 1.0)) for t in trained},
        generated=of_file is not None,
    )
