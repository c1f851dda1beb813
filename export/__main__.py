"""The command `tbe-export`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich import progress as bars

from export import ExportConfig, ExportError, export_model, shown
from export.checkpoint import open_weights
from export.compare.command import compare
from export.errors import ConfigError
from export.options import CheckpointOption, ModelOption, build_module, takes_settings
from export.pipeline import Progress, plan_model
from export.plan_picture import draw_plan
from export.plan_report import PlanReport, report_plan
from export.prune import prune as prune_versions
from export.sharding import Sharding
from export.tables import collect_tables
from export.verify import as_json, bundle_of, verify_bundle
from serving.bundle import MANIFEST, Manifest, open_bundle
from serving.signature import TrustedKeys
from serving.terminal import Command, complain, err, new_program, out


class _Command(Command):
    told = (ExportError, *Command.told)


app = new_program(
    "tbe-export", "Export the embedding tables of a trained TorchRec model as a bundle that Triton serves."
)
app.command(cls=_Command)(compare)

BundleArgument = Annotated[Path, typer.Argument(help="A version: REPOSITORY/NAME/VERSION.")]
Config = Callable[[], ExportConfig]


@app.command(cls=_Command)
@takes_settings
def model(
    model: ModelOption,
    repository: Annotated[Path, typer.Option(help="Triton's model repository; made if it is missing.")],
    name: Annotated[str, typer.Option(help="The model's name in the repository.")],
    config: Config,
    checkpoint: CheckpointOption = None,
    version: Annotated[int | None, typer.Option(help="The version's number; else the next free one.")] = None,
    signing_key: Annotated[
        Path | None,
        typer.Option(help="PEM file with the Ed25519 private key that signs the bundle, and a new model's settings."),
    ] = None,
) -> None:
    """Quantize, shard, compile and check the tables of a trained model, then publish them as a bundle.

    Nothing is published unless it exits with 0.
    """
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
    manifest = open_bundle(path).manifest
    out.print(shown.tables_table(manifest))
    if shown.is_sharded(manifest.plan):
        report = report_plan(manifest, settings.sharding)
        out.print(shown.ranks_table(report, traffic=False))
        _remark(report)
    out.print(shown.parity_table(manifest.parity))
    _remark(manifest)
    out.print(f"published {path}", soft_wrap=True)
    out.print(f"next: tbe-serve run {repository}", soft_wrap=True)


@app.command(cls=_Command)
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
    # Weights matter only where the dtype is to be chosen by what it does to them.
    module = build_module(model, meta=checkpoint is not None or not settings.max_error)
    with _progress_bar() as show:
        manifest = plan_model(module, settings, checkpoint=checkpoint, progress=show)
    report = report_plan(manifest, settings.sharding)
    if picture is not None:
        try:
            draw_plan(report, picture)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--picture {picture}: {error}") from error
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
        return
    out.print(shown.placement_table(report))
    out.print(shown.ranks_table(report, traffic=True))
    out.print(f"tables: {len(report.tables)}, bytes: {report.bytes:,}, ranks: {len(report.ranks)}")
    _remark(report)
    if picture is not None:
        out.print(f"drawn {picture}", soft_wrap=True)


@app.command(cls=_Command)
def inspect(
    bundle: BundleArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest itself.")] = False,
) -> None:
    """Show what a bundle holds: tables, dtypes, bytes before and after, shards, features, versions, parity."""
    manifest = open_bundle(bundle).manifest
    if as_json:
        print((bundle / MANIFEST).read_text(), end="")
        return
    out.print(shown.tables_table(manifest))
    if shown.is_sharded(manifest.plan):
        report = report_plan(manifest, Sharding())
        out.print(shown.placement_table(report))
        out.print(shown.ranks_table(report, traffic=False))
    out.print(shown.parity_table(manifest.parity))
    _remark(manifest)
    out.print("made with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))


@app.command(cls=_Command)
def verify(
    bundle: Annotated[
        Path, typer.Argument(help="A version: REPOSITORY/NAME/VERSION; or REPOSITORY/NAME, the one it is to serve.")
    ],
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
    if checkpoint is not None and model is None:
        raise ConfigError("--checkpoint: expected --model too: it says which tables to look for")
    trained = weights = None
    if model is not None:
        module = build_module(model, meta=checkpoint is not None)
        trained = collect_tables(module).tables
        weights = open_weights(module, trained, checkpoint)
    trusted = None if trusted_keys is None else TrustedKeys.read(trusted_keys)
    verification = verify_bundle(bundle_of(bundle, trusted), trained, weights, trusted)
    if json_:
        print(as_json(verification))
    else:
        out.print(shown.verification_table(verification))
        manifest = verification.bundle.manifest
        size = sum(file.size_bytes for file in manifest.files.values())
        out.print(f"{len(manifest.files)} files ({size:,} bytes) have their digests", soft_wrap=True)
        if not verification.measured:
            out.print("float ↔ quantized: as recorded at export; measure it anew with --model and --checkpoint")
    for failure in verification.failures:
        complain("tbe-export", failure)
    raise typer.Exit(bool(verification.failures))


@app.command(cls=_Command)
def prune(
    model: Annotated[Path, typer.Argument(help="The model's folder: REPOSITORY/NAME.")],
    keep: Annotated[int, typer.Option(help="How many of the newest versions stay, whatever happens.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove old versions of a model; never one that a server on this host has open or config.pbtxt asks for."""
    for fate in prune_versions(model, keep, dry_run=dry_run):
        removed = "would be removed" if dry_run else "removed"
        out.print(f"{model / str(fate.version)}: {fate.kept or removed}", soft_wrap=True)


def _remark(noted: Manifest | PlanReport) -> None:
    for line in shown.remarks(noted):
        out.print(line, soft_wrap=True)


@contextmanager
def _progress_bar() -> Iterator[Callable[[Progress], None]]:
    with bars.Progress(
        bars.TextColumn("{task.description:<16}", markup=False),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    ) as bar:
        task = bar.add_task("reading", total=None)

        def show(progress: Progress) -> None:
            bar.update(task, description=progress.step, completed=progress.done, total=progress.total)

        yield show


if __name__ == "__main__":
    app()
