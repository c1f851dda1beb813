"""The command `tbe-export`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich import progress as bars
from rich.console import Console

from export import ExportConfig, ExportError, export_model, shown
from export.checkpoint import open_weights
from export.compare.command import compare
from export.options import CheckpointOption, ModelOption, build_module, takes_settings
from export.pipeline import Progress, plan_model
from export.plan_picture import draw_plan
from export.plan_report import report_plan
from export.prune import prune as prune_versions
from export.sharding import Sharding
from export.tables import collect_tables
from export.verify import as_json, verify_bundle
from serving.bundle import MANIFEST, Manifest, open_bundle
from serving.errors import BundleError, ServingError
from serving.signature import TrustedKeys

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it would read [TABLE=] as a style
    help="Export the embedding tables of a trained TorchRec model as a bundle that Triton serves.",
)
_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)

app.command()(compare)

BundleArgument = Annotated[Path, typer.Argument(help="A version: REPOSITORY/NAME/VERSION.")]
Config = Callable[[], ExportConfig]


@app.command()
@takes_settings
def model(
    model: ModelOption,
    repository: Annotated[Path, typer.Option(help="Triton's model repository; made if it is missing.")],
    name: Annotated[str, typer.Option(help="The model's name in the repository.")],
    config: Config,
    checkpoint: CheckpointOption = None,
    version: Annotated[int | None, typer.Option(help="The version's number; else the next free one.")] = None,
    signing_key: Annotated[
        Path | None, typer.Option(help="PEM file with the Ed25519 private key that signs the bundle.")
    ] = None,
) -> None:
    """Quantize, shard, compile and check the tables of a trained model, then publish them as a bundle."""
    try:
        settings = config()
        module = build_module(model, meta=checkpoint is not None)
        with _progress_bar() as show:
            path = export_model(
                module,
                repository,
                name,
                settings,
                version,
                checkpoint=checkpoint,
                signing_key=signing_key,
                progress=show,
            )
    except ExportError as error:
        _err.print("Nothing was published.")
        _fail(error)
    manifest = open_bundle(path).manifest
    _out.print(shown.tables_table(manifest))
    if shown.is_sharded(manifest.plan):
        _out.print(shown.ranks_table(report_plan(manifest, settings.sharding), traffic=False))
    _out.print(shown.parity_table(manifest.parity))
    _remark(manifest)
    _out.print(f"published {path}", soft_wrap=True)
    _out.print(f"next: tbe-serve run {repository}", soft_wrap=True)


@app.command()
@takes_settings
def plan(
    model: ModelOption,
    config: Config,
    checkpoint: CheckpointOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, which --plan takes.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw it into this file: .png, .svg or .pdf.")] = None,
) -> None:
    """Show where tables would go: bytes by rank and table, and a request's traffic. Writes no bundle."""
    try:
        settings = config()
        # Weights matter only where the dtype is to be chosen by what it does to them.
        module = build_module(model, meta=checkpoint is not None or not settings.max_error)
        with _progress_bar() as show:
            manifest = plan_model(module, settings, checkpoint=checkpoint, progress=show)
    except ExportError as error:
        _fail(error)
    report = report_plan(manifest, settings.sharding)
    if picture is not None:
        try:
            draw_plan(report, picture)
        except (OSError, ValueError) as error:
            _fail(f"--picture {picture}: {error}")
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
        return
    _out.print(shown.placement_table(report))
    _out.print(shown.ranks_table(report, traffic=True))
    _out.print(f"tables: {len(report.tables)}, bytes: {report.bytes:,}, ranks: {len(report.ranks)}")
    if picture is not None:
        _out.print(f"drawn {picture}", soft_wrap=True)


@app.command()
def inspect(
    bundle: BundleArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest itself.")] = False,
) -> None:
    """Show what a bundle holds: tables, dtypes, bytes before and after, shards, features, versions, parity."""
    try:
        manifest = open_bundle(bundle).manifest
    except BundleError as error:
        _fail(error)
    if as_json:
        print((bundle / MANIFEST).read_text(), end="")
        return
    _out.print(shown.tables_table(manifest))
    if shown.is_sharded(manifest.plan):
        report = report_plan(manifest, Sharding())
        _out.print(shown.placement_table(report))
        _out.print(shown.ranks_table(report, traffic=False))
    _out.print(shown.parity_table(manifest.parity))
    _remark(manifest)
    _out.print("made with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))


@app.command()
def verify(
    bundle: BundleArgument,
    model: Annotated[
        str | None, typer.Option(help="package.module:function of the model, to compare with its float rows.")
    ] = None,
    checkpoint: CheckpointOption = None,
    trusted_keys: Annotated[
        Path | None, typer.Option(help="PEM file with Ed25519 public keys, one of which must have signed it.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read every byte of a bundle and check what it answers, at every step; exits with 1 if anything differs."""
    try:
        if checkpoint is not None and model is None:
            _fail("--checkpoint: expected --model too: it says which tables to look for")
        trained = weights = None
        if model is not None:
            module = build_module(model, meta=checkpoint is not None)
            trained = collect_tables(module).tables
            weights = open_weights(module, trained, checkpoint)
        verification = verify_bundle(
            bundle, trained, weights, None if trusted_keys is None else TrustedKeys.read(trusted_keys)
        )
    except (ServingError, ExportError) as error:
        _fail(error)
    if json_:
        print(as_json(verification))
    else:
        _out.print(shown.verification_table(verification))
        manifest = verification.bundle.manifest
        size = sum(file.size_bytes for file in manifest.files.values())
        _out.print(f"{len(manifest.files)} files ({size:,} bytes) have their digests", soft_wrap=True)
        if not verification.measured:
            _out.print("float ↔ quantized: as recorded at export; measure it anew with --model and --checkpoint")
    for failure in verification.failures:
        _err.print(f"tbe-export: {failure}", markup=False, soft_wrap=True)
    raise typer.Exit(bool(verification.failures))


@app.command()
def prune(
    model: Annotated[Path, typer.Argument(help="The model's folder: REPOSITORY/NAME.")],
    keep: Annotated[int, typer.Option(help="How many of the newest versions stay, whatever happens.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove old versions of a model; never one that a server on this host has open or config.pbtxt asks for."""
    try:
        for fate in prune_versions(model, keep, dry_run=dry_run):
            removed = "would be removed" if dry_run else "removed"
            _out.print(f"{model / str(fate.version)}: {fate.kept or removed}", soft_wrap=True)
    except ExportError as error:
        _fail(error)


def _remark(manifest: Manifest) -> None:
    for line in shown.remarks(manifest):
        _out.print(line, markup=False, soft_wrap=True)


@contextmanager
def _progress_bar() -> Iterator[Callable[[Progress], None]]:
    with bars.Progress(
        bars.TextColumn("{task.description:<16}"),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        console=_err,
        transient=True,
    ) as bar:
        task = bar.add_task("reading", total=None)

        def show(progress: Progress) -> None:
            bar.update(task, description=progress.step, completed=progress.done, total=progress.total)

        yield show


def _fail(error: ExportError | ServingError | str) -> NoReturn:
    _err.print(f"tbe-export: {error}", markup=False, soft_wrap=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
