"""The options that `tbe-export model` and `tbe-export plan` share, and the module that they are about."""

import importlib
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

from export.config import ExportConfig
from export.errors import ConfigError, ModelError
from export.settings import Settings, ShardingSettings, by_table, export_config, merge_settings
from export.toml_file import read_toml
from serving.options import shared_options

ModelOption = Annotated[str, typer.Option(help="package.module:function that builds the module, without arguments.")]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        help="A state dict of torch.save, safetensors, or a torch.distributed.checkpoint folder; "
        "else the module's own weights."
    ),
]
_Tables = list[str] | None


def _settings(
    *,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with these settings; options count after it.")
    ] = None,
    dtype: Annotated[
        _Tables,
        typer.Option(
            metavar="[TABLE=]DTYPE",
            help="fp32, fp16, int8 (default), int4 or int2; TABLE is a name or glob, the last that matches counts.",
        ),
    ] = None,
    id_policy: Annotated[
        _Tables,
        typer.Option(
            metavar="[TABLE=]POLICY",
            help="error (default) refuses ids outside the table, zero skips them, default_row:N reads row N instead.",
        ),
    ] = None,
    max_error: Annotated[
        _Tables,
        typer.Option(
            metavar="[TABLE=]X",
            help="No element may move by more than X, in units of the weights: where no dtype is given, the "
            "smallest that keeps this is taken, else the export fails if the given one does not.",
        ),
    ] = None,
    output_dtype: Annotated[str | None, typer.Option(help="fp32 (default) or fp16.")] = None,
    ranks: Annotated[int | None, typer.Option(help="How many ranks, on all hosts together; 1 by default.")] = None,
    ranks_per_host: Annotated[int | None, typer.Option(help="How many on each host; else all on one.")] = None,
    memory_per_rank: Annotated[
        str | None, typer.Option(help="What a rank can hold, as 16GB; else this machine's memory ÷ ranks.")
    ] = None,
    types: Annotated[
        _Tables,
        typer.Option(
            "--sharding",
            metavar="[TABLE=]TYPE",
            help="auto (TorchRec's planner, default), auto-simple (row-wise over 1 M rows, else column-wise over "
            "256 columns, else table-wise), or table_wise, row_wise, column_wise, table_row_wise, "
            "table_column_wise, grid_shard, data_parallel.",
        ),
    ] = None,
    row_wise_over: Annotated[int | None, typer.Option(help="auto-simple's rows.")] = None,
    column_wise_over: Annotated[int | None, typer.Option(help="auto-simple's columns.")] = None,
    min_partition: Annotated[
        _Tables, typer.Option(metavar="[TABLE=]N", help="How narrow a block of columns may be.")
    ] = None,
    pooling_factors: Annotated[
        _Tables,
        typer.Option(
            "--pooling-factor", metavar="[TABLE=]X", help="Ids in a bag on average, for planning; 1 by default."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples in a request, for planning; 512 by default.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="An explicit plan instead: JSON as `tbe-export plan --json` prints it.")
    ] = None,
) -> ExportConfig:
    said = Settings(
        dtype=by_table(dtype),
        id_policy=by_table(id_policy),
        max_error=by_table(max_error),
        output_dtype=output_dtype,
        sharding=ShardingSettings(
            ranks=ranks,
            ranks_per_host=ranks_per_host,
            memory_per_rank=memory_per_rank,
            types=by_table(types),
            pooling_factors=by_table(pooling_factors),
            min_partition=by_table(min_partition),
            batch_size=batch_size,
            row_wise_over=row_wise_over,
            column_wise_over=column_wise_over,
            plan=None if plan is None else str(plan),
        ),
    )
    return export_config(said if config is None else merge_settings(read_toml(config, Settings), said))


# A command gets `config()`, which reads the options above or raises ConfigError.
takes_settings = shared_options("config", _settings)


def build_module(spec: str, *, meta: bool) -> nn.Module:
    """Call the function that `spec` names; on the meta device, where tables take no memory, if `meta`.

    Raises:
        ConfigError: there is no such function.
        ModelError: it raised something, or returned no module.
    """
    package, _, function = spec.partition(":")
    sys.path.insert(0, "")  # as `python -m` does: what lies in the working directory can be named
    try:
        build = getattr(importlib.import_module(package), function)
        with torch.device("meta" if meta else "cpu"):
            module = build()
    except (Exception, SystemExit) as error:  # it is other people's code
        said = f"{type(error).__name__}: {error}"
        if place := _last_own_line(error):
            raise ModelError(f"--model {spec}: {said} ({place}); --verbose shows how it came there") from error
        raise ConfigError(f"--model {spec}: expected package.module:function, without arguments: {said}") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"--model {spec}: expected a torch.nn.Module, got {type(module).__name__}")
    return module


def _last_own_line(error: BaseException) -> str | None:
    """Where `error` left the user's own code, "file:line"; None where none of that ran."""
    installed = (*sysconfig.get_paths().values(), str(Path(__file__).parent), "<frozen")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(installed)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None
