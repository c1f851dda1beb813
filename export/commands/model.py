"""`tbe-export plan`, `model` and `publish-router`: plan the placement of a model's tables, and export bundles."""

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer

from export.commands.module import CheckpointOption, DeltasOption, ModelOption, SigningKeyOption, build_module
from export.commands.settings import Config, as_written, takes_settings
from export.commands.show import (
    show_memory,
    show_parity,
    show_placement,
    show_published,
    show_ranks,
    show_remarks,
    show_scores,
    show_tables,
    show_transfers,
)
from export.config import ExportConfig, Progress
from export.plan.report import report_plan
from export.publish.push import repository_at
from export.values import size_text
from serving.bundle.load import open_bundle, versions
from serving.bundle.manifest import Manifest
from serving.errors import ConfigurationError
from serving.files import as_text, is_url
from serving.pins import check_pins
from serving.terminal.app import Show, bytes_bar, out
from serving.terminal.output import print_json


def _steps(show: Show) -> Callable[[Progress], None]:
    """Make a callback for the progress of an export from a progress bar's."""
    return lambda progress: show(progress.step, progress.done, progress.total)


@contextmanager
def export_progress() -> Iterator[Callable[[Progress], None]]:
    """Show a bar for an export, in bytes."""
    with bytes_bar("reading") as show:
        yield _steps(show)


@takes_settings
def model(
    model: ModelOption,
    repository: Annotated[
        str,
        typer.Option(
            help="Triton's model repository: a folder, which is made if it is missing, or a URL such as "
            "s3://bucket/models. For a URL the bundle is written to a temporary folder first, then uploaded."
        ),
    ],
    name: Annotated[str, typer.Option(help="The model's name in the repository.")],
    config: Config,
    checkpoint: CheckpointOption = None,
    version: Annotated[int | None, typer.Option(help="Number of the version; by default the next free one.")] = None,
    signing_key: SigningKeyOption = None,
    continue_deltas: Annotated[
        bool,
        typer.Option(
            help="Continue the deltas of the newest version: publish rows that differ from it as a delta first. "
            "Later deltas apply to both versions."
        ),
    ] = False,
    deltas: DeltasOption = None,
    only_hosts: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N]",
            help="Export the bundles of these hosts only, and read only their rows. When all hosts are exported, "
            "`tbe-export publish-router` publishes the router's bundle. Needs --hosts-as-models and --version.",
        ),
    ] = None,
) -> None:
    """Quantize, shard, compile and check the tables of a trained model, then publish them as a bundle.

    If the exit status is not 0, nothing was published.
    """
    settings = config()
    hosts = None if only_hosts is None else _numbers(only_hosts)
    if is_url(repository) and (hosts is not None or continue_deltas):
        raise ConfigurationError(
            "--repository: expected a folder with --only-hosts or --continue-deltas: `tbe-serve pull` fills one, "
            "`tbe-export push` publishes it"
        )
    if hosts is not None and version is None:
        raise ConfigurationError(
            "--only-hosts: expected --version with it: all bundles of a set have the same number"
        )
    if hosts is not None and continue_deltas:
        raise ConfigurationError("--continue-deltas: expected all hosts at once, without --only-hosts")
    if continue_deltas and not versions(Path(repository) / name):
        raise ConfigurationError(
            f"--continue-deltas: expected versions in {repository}/{name}: export the first version without it"
        )
    if deltas is not None and not continue_deltas:
        raise ConfigurationError("--deltas: expected --continue-deltas with it")
    check_pins()
    from export.machines import export_hosts
    from export.next_version import export_next
    from export.pipeline import export_model
    from export.trained.loaded_tables import default_most_bytes

    if checkpoint is not None and hosts is None and settings.trained_memory_bytes is None:
        settings = replace(settings, trained_memory_bytes=default_most_bytes())
    module = build_module(model, meta=checkpoint is not None)
    with bytes_bar("reading") as show, repository_at(repository, name, show) as folder:
        common: dict[str, Any] = {"checkpoint": checkpoint, "signing_key": signing_key, "progress": _steps(show)}
        if hosts is not None:
            paths = export_hosts(module, folder, name, hosts, settings, cast(int, version), **common)
        elif continue_deltas:
            paths = [export_next(module, folder, name, settings, version, deltas=deltas, **common)]
        else:
            paths = [export_model(module, folder, name, settings, version, **common)]
        manifests = [open_bundle(path).manifest for path in paths]
    if hosts is not None:
        for path in paths:
            out.print(f"published {path}", soft_wrap=True)
        out.print(
            "next, when all hosts are exported: tbe-export publish-router, with the same options", soft_wrap=True
        )
    else:
        _show_export(paths[0], manifests[0], settings, repository)
        if checkpoint is not None:
            bundle = f"REPOSITORY/{name}/{paths[0].name}" if is_url(repository) else str(paths[0])
            _show_not_run(bundle, manifests[0], settings, model, checkpoint, config)


def _show_export(path: Path, manifest: Manifest, settings: ExportConfig, repository: str) -> None:
    """Print a published bundle, and the next command to run."""
    show_tables(manifest)
    if len(manifest.plan.ranks) > 1:
        report = report_plan(manifest, settings.sharding)
        show_ranks(report, traffic=False)
        show_remarks(report)
    show_parity(manifest.parity)
    show_scores(manifest, manifest.dense_part)
    show_remarks(manifest)
    if manifest.compacted is not None:
        out.print(f"deltas up to {manifest.sequence} are part of its rows: {manifest.sequence + 1} is next")
    if is_url(repository):
        out.print(f"published {repository.rstrip('/')}/{path.parent.name}/{path.name}", soft_wrap=True)
        out.print(f"next: tbe-serve run {repository}", soft_wrap=True)
    else:
        show_published(path, manifest)


def _show_not_run(
    bundle: str, manifest: Manifest, settings: ExportConfig, model: str, checkpoint: Path, config: Config
) -> None:
    """If the tables were too large to run the trained model, print the command that runs it on a larger machine."""
    size, most = sum(4 * table.rows * table.dim for table in manifest.tables), settings.trained_memory_bytes or 0
    if size <= most:
        return
    command = ["tbe-export", "verify", bundle, "--model", model, "--checkpoint", str(checkpoint)]
    for name in ("checkpoint_prefix", "example", "labelled"):
        if (value := as_written(config, name)) is not None:
            command += [f"--{name.replace('_', '-')}", value]
    command += ["--trained-memory", size_text(size + size // 100).replace(" ", "")]
    out.print(
        f"trained was not measured: the tables take {size_text(size)} as FP32, more than {size_text(most)} "
        "(--trained-memory; by default half of the free memory). To measure it, run this on a larger machine:",
        soft_wrap=True,
    )
    out.print(f"  {as_text(shlex.join(command))}", soft_wrap=True)


def _numbers(text: str) -> list[int]:
    """Parse `--only-hosts`."""
    if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text):
        raise ConfigurationError(f"--only-hosts: expected numbers of hosts, such as 3 or 0,1, got {text!r}")
    return [int(number) for number in text.split(",")]


@takes_settings
def publish_router(
    model: ModelOption,
    repository: Annotated[Path, typer.Option(help="Triton's model repository, with the bundles of all hosts.")],
    name: Annotated[str, typer.Option(help="The router's name in the repository.")],
    version: Annotated[int, typer.Option(help="The version, which the bundles of all hosts have too.")],
    config: Config,
    checkpoint: CheckpointOption = None,
    signing_key: SigningKeyOption = None,
) -> None:
    """Publish the router's bundle after `tbe-export model --only-hosts`, with the same options, exported all hosts.

    The bundles of all hosts are read and compared with their digests. A missing or different bundle is reported.
    """
    settings = config()
    check_pins()
    from export.machines import complete_hosts

    module = build_module(model, meta=checkpoint is not None)
    with export_progress() as show:
        path = complete_hosts(
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
    show_parity(manifest.parity)
    show_scores(manifest, manifest.dense_part)
    show_remarks(manifest)
    show_published(path, manifest)
    if checkpoint is not None:
        _show_not_run(str(path), manifest, settings, model, checkpoint, config)


@takes_settings
def plan(
    model: ModelOption,
    config: Config,
    checkpoint: CheckpointOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, which --plan takes.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Also draw the plan to this file: .png, .svg or .pdf.")] = None,
) -> None:
    """Show how tables would be sharded: bytes of ranks and tables, and the traffic of a request. Writes no bundle."""
    settings = config()
    check_pins()
    from export.pipeline import plan_model
    from export.plan.picture import draw_plan

    # Rows are read only if `max_error` chooses the dtype.
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
        print_json(msgspec.json.format(msgspec.json.encode(report), indent=1))
        return
    show_placement(report)
    show_ranks(report, traffic=True)
    if report.transfers:
        show_transfers(report)
    out.print(f"tables: {len(report.tables)}, bytes: {report.bytes:,}, ranks: {len(report.ranks)}")
    show_memory(manifest, report)
    show_remarks(report)
    if picture is not None:
        out.print(f"drawn {picture}", soft_wrap=True)
