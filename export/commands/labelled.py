"""The options of `tbe-export compare` for labelled rows, and the settings file that it recommends."""

import glob
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from export.commands.settings import Settings, export_config, merge_settings, read_settings, written_settings
from export.compare.dtype_study import DtypeOptions, DtypeStudy
from export.compare.labelled_rows import LabelledRows
from export.config import ExportConfig
from export.plan.sharding import Sharding
from serving.batch.columns import read_column_names
from serving.bundle.formats import WeightDtype
from serving.errors import ConfigurationError
from serving.requests.input_forms import Nulls
from serving.terminal.options import shared_options

_MAX_AUC_LOSS = 0.0005


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledOptions:
    """What is measured on labelled rows, and how the model is exported.

    Attributes:
        measured: rows, limit and dtypes.
        settings: of the export, as written.
    """

    measured: DtypeOptions
    settings: Settings

    def config(self, checkpoint_prefix: str | None) -> ExportConfig:
        """The export to measure: its tables in FP32 on one rank.

        Raises:
            ConfigurationError: a setting cannot be used.
        """
        config = export_config(merge_settings(self.settings, {"checkpoint_prefix": checkpoint_prefix}))
        return replace(
            config,
            dtype={"*": WeightDtype.FP32},
            max_error={},
            sharding=Sharding(),
            serving=None,
            labelled=None,
            user_side=(),
        )

    def recommended(self, study: DtypeStudy) -> str:
        """The text of the settings file for `tbe-export model --config` that `study` recommends."""
        bundle = study.recommended
        on, rows = ("labelled", study.choosing) if study.held_out is None else ("held-out", study.held_out)
        loss = (bundle.held_out or bundle.measured).auc
        dtypes = {glob.escape(table): dtype for table, dtype in bundle.dtypes.items()}
        return (
            f"# AUC {loss.auc:.5f}, a loss of {loss.loss:.5f} ({loss.low:.5f} to {loss.high:.5f}), "
            f"on {rows.rows} {on} rows.\n" + written_settings({**self.settings, "dtype": dtypes})
        )


def _labelled_options(
    labelled: Annotated[
        Path | None,
        typer.Option(
            help="Rows with labels, on which the AUC of each dtype is measured: a parquet file or a folder of them, "
            "with a column for each feature and dense input; or JSON lines as for `tbe-export model --labelled`."
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The column of --labelled with 0 or 1 for each row.")
    ] = None,
    columns: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file with the columns of --labelled whose names differ from the model's inputs, as for "
            "`tbe-serve score-files --columns`."
        ),
    ] = None,
    nulls: Annotated[
        Nulls | None,
        typer.Option(help="'refuse' null lists and ids (default), or read a null list as an 'empty' one."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The output that --labelled is about, if the model has several with one number."
        ),
    ] = None,
    max_auc_loss: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Recommend the smallest bundle that is certain to lose no more AUC than this; "
            f"{_MAX_AUC_LOSS} by default.",
        ),
    ] = None,
    example: Annotated[
        str | None,
        typer.Option(help="package.module:name of the arguments of one call, as for `tbe-export model --example`."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="The settings file of the export, such as its id_policy and dense_widths. The recommended one has "
            "them too, with other dtypes."
        ),
    ] = None,
) -> LabelledOptions | None:
    if labelled is None:
        needs_labelled: dict[str, Any] = {
            "label": label, "columns": columns, "nulls": nulls, "output": output, "max_auc_loss": max_auc_loss,
            "example": example, "config": config,
        }  # fmt: skip
        for option, value in needs_labelled.items():
            if value is not None:
                raise ConfigurationError(f"{option}: expected --labelled with it")
        return None
    settings = {} if config is None else read_settings(config)
    # The recommended dtypes replace these two.
    settings = {name: value for name, value in settings.items() if name not in ("dtype", "max_error")}
    return LabelledOptions(
        measured=DtypeOptions(
            rows=LabelledRows(labelled, label, read_column_names(columns), nulls or "refuse"),
            output=output,
            max_auc_loss=_MAX_AUC_LOSS if max_auc_loss is None else max_auc_loss,
        ),
        settings=merge_settings(settings, {"scores": True, "example": example}),
    )


# A command calls `labelled()` for the LabelledOptions of these options, or None. It raises ConfigurationError.
takes_labelled = shared_options("labelled", _labelled_options)
