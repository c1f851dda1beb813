"""The command `tbe-export`."""

import importlib
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import torch
import typer
from rich import box
from rich import progress as bars
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import nn

from export import ExportConfig, ExportError, export_model, pipeline
from export.errors import ConfigError, ModelError
from export.verify import verify_bundle
from serving.bundle import MANIFEST, IdPolicy, Manifest, OutputDtype, WeightDtype, open_bundle
from serving.errors import BundleError

T = TypeVar("T")
E = TypeVar("E", bound=Enum)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it would read [TABLE=] as a style
    help="Export the embedding tables of a trained TorchRec model as a bundle that Triton serves.",
)
_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)


@app.command()
def model(
    model: Annotated[str, typer.Option(help="package.module:function that builds the module, without arguments.")],
    repository: Annotated[Path, typer.Option(help="Triton's model repository; made if it is missing.")],
    name: Annotated[str, typer.Option(help="The model's name in the repository.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="A state dict of torch.save, safetensors, or a torch.distributed.checkpoint folder; "
            "else the module's own weights."
        ),
    ] = None,
    version: Annotated[int | None, typer.Option(help="The version's number; else the next free one.")] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TABLE=]DTYPE",
            help="fp32, fp16, int8 (default), int4 or int2; TABLE is a name or glob, the last that matches counts.",
        ),
    ] = None,
    id_policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TABLE=]POLICY", help="error (default) refuses ids outside the table, zero skips them."
        ),
    ] = None,
    max_error: Annotated[
        list[str] | None,
        typer.Option(metavar="[TABLE=]X", help="Fail if an element moves by more than X, in units of the weights."),
    ] = None,
    output_dtype: Annotated[str, typer.Option(help="fp32 or fp16.")] = "fp32",
) -> None:
    """Quantize, compile and check the tables of a trained model, then publish them as a bundle."""
    try:
        config = ExportConfig(
            dtype=_by_table(dtype, lambda text: _member("--dtype", WeightDtype, text.upper())),
            id_policy=_by_table(id_policy, lambda text: _member("--id-policy", IdPolicy, text.lower())),
            max_error=_by_table(max_error, lambda text: _number("--max-error", text)),
            output_dtype=_member("--output-dtype", OutputDtype, output_dtype.upper()),
        )
        module = _build(model, meta=checkpoint is not None)
        with _progress_bar() as bar:
            task = bar.add_task("reading", total=None)

            def show(progress: pipeline.Progress) -> None:
                bar.update(task, description=progress.step, completed=progress.done, total=progress.total)

            path = export_model(module, repository, name, config, version, checkpoint=checkpoint, progress=show)
    except ExportError as error:
        _err.print("Nothing was published.")
        _fail(error)
    _out.print(_parity_table(open_bundle(path).manifest))
    _out.print(f"published {path}", soft_wrap=True)
    _out.print(f"next: tbe-serve run {repository}", soft_wrap=True)


@app.command()
def inspect(
    bundle: Annotated[Path, typer.Argument(help="A version: REPOSITORY/NAME/VERSION.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest itself.")] = False,
) -> None:
    """Show what a bundle holds: tables, dtypes, bytes before and after, features, versions, parity."""
    try:
        manifest = open_bundle(bundle).manifest
    except BundleError as error:
        _fail(error)
    if as_json:
        print((bundle / MANIFEST).read_text(), end="")
        return
    _out.print(_tables_table(manifest))
    _out.print(_parity_table(manifest))
    _out.print("made with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))


@app.command()
def verify(bundle: Annotated[Path, typer.Argument(help="A version: REPOSITORY/NAME/VERSION.")]) -> None:
    """Read every byte of a bundle and check what it answers; exits with 1 if anything differs."""
    try:
        manifest = verify_bundle(bundle).manifest
    except (BundleError, ExportError) as error:
        _fail(error)
    size = sum(file.size_bytes for file in manifest.files.values())
    _out.print(
        f"{bundle}: {len(manifest.files)} files ({size:,} bytes) and the answers of "
        f"{len(manifest.tables)} tables are as exported",
        soft_wrap=True,
    )


def _build(spec: str, *, meta: bool) -> nn.Module:
    """Call the function that `spec` names; on the meta device, where tables take no memory, if `meta`."""
    package, _, function = spec.partition(":")
    sys.path.insert(0, "")  # as `python -m` does: what lies in the working directory can be named
    try:
        build = getattr(importlib.import_module(package), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--model {spec}: expected package.module:function: {error}") from error
    with torch.device("meta" if meta else "cpu"):
        module = build()
    if not isinstance(module, nn.Module):
        raise ModelError(f"--model {spec}: expected a torch.nn.Module, got {type(module).__name__}")
    return module


def _by_table(given: list[str] | None, parse: Callable[[str], T]) -> dict[str, T]:
    """["int8", "item*=fp16"] to {"*": INT8, "item*": FP16}."""
    settings: dict[str, T] = {}
    for each in given or ():
        pattern, _, text = each.rpartition("=")
        # A pattern given again counts where it is given last.
        settings.pop(pattern or "*", None)
        settings[pattern or "*"] = parse(text)
    return settings


def _member(option: str, kind: type[E], text: str) -> E:
    try:
        return kind(text)
    except ValueError as error:
        names = ", ".join(str(member.value).lower() for member in kind)
        raise ConfigError(f"{option}: expected one of {names}, got {text.lower()!r}") from error


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{option}: expected a number, got {text!r}") from error


def _progress_bar() -> bars.Progress:
    return bars.Progress(
        bars.TextColumn("{task.description:<16}"),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        console=_err,
        transient=True,
    )


def _tables_table(manifest: Manifest) -> Table:
    table = Table(title="tables", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("table", no_wrap=True)
    table.add_column("features", min_width=12, overflow="fold")
    for name in ("shape", "pooling", "dtype", "ids out", "float", "stored"):
        table.add_column(name, justify="right", no_wrap=True)
    for spec in manifest.tables:
        features = ", ".join(feature.name for feature in manifest.features if feature.table == spec.name)
        table.add_row(
            spec.name,
            features,
            f"{spec.rows:,} × {spec.dim}",
            spec.pooling.value + (" weighted" if spec.weighted else ""),
            spec.dtype.value,
            spec.id_policy.value,
            _size(4 * spec.rows * spec.dim),
            _size(spec.rows * spec.row_bytes),
        )
    return table


def _size(size_bytes: int) -> str:
    return decimal(size_bytes).replace("bytes", "B")


def _parity_table(manifest: Manifest) -> Table:
    table = Table(title="largest error of an element, step by step from the float table", title_justify="left")
    table.add_column("table")
    for name in ("shape", "dtype", "quantized", "limit", "scripted", "reloaded"):
        table.add_column(name, justify="right", no_wrap=True)
    for spec, parity in zip(manifest.tables, manifest.parity, strict=True):
        errors = (parity.quantized, parity.limit, parity.scripted, parity.reloaded)
        shown = [f"{error:.1e}" if error else "0" for error in errors]
        table.add_row(spec.name, f"{spec.rows:,} × {spec.dim}", spec.dtype.value, *shown)
    return table


def _fail(error: ExportError | BundleError) -> NoReturn:
    _err.print(f"tbe-export: {error}", markup=False, soft_wrap=True)
    raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
