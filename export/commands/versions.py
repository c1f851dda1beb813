"""`tbe-export inspect`, `verify`, `push`, `release` and `prune`: work on published versions."""

import os
from pathlib import Path
from typing import Annotated

import typer

from export.commands.module import (
    TRAINED_MEMORY_HELP,
    CheckpointOption,
    CheckpointPrefixOption,
    DeltasOption,
    build_module,
    named_example,
)
from export.commands.show import (
    show_cached,
    show_deltas,
    show_hosts,
    show_parity,
    show_placement,
    show_ranks,
    show_remarks,
    show_scores,
    show_tables,
    show_verification,
)
from export.plan.report import report_plan
from export.plan.sharding import Sharding
from export.publish.published import bundle_of, read_deltas
from export.publish.published import prune as prune_versions
from export.publish.published import prune_squashed as prune_squashed_deltas
from export.publish.published import release as write_release
from export.publish.push import check_stored, repository_at
from export.publish.push import push as push_model
from export.values import size_bytes, size_text
from serving.bundle.lineage import deltas_folder
from serving.bundle.load import check_published, open_bundle
from serving.bundle.manifest import MANIFEST
from serving.bundle.release import release_path
from serving.bundle.signature import TrustedKeys, read_signing_key, signature_of
from serving.errors import ConfigurationError
from serving.files import is_url
from serving.model.config_file import read_config, settings_of
from serving.model.settings import WeightsMemory
from serving.pins import check_pins
from serving.store import Store
from serving.terminal.app import bytes_bar, complain, out
from serving.terminal.output import print_json


def inspect(
    bundle: Annotated[Path, typer.Argument(help="A version: REPOSITORY/NAME/VERSION.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Show a bundle: tables, dtypes, bytes before and after, shards, features, package versions, parity."""
    opened = open_bundle(bundle)
    manifest = opened.manifest
    if as_json:
        print_json((bundle / MANIFEST).read_bytes().rstrip(b"\n"))
        return
    show_tables(manifest)
    if len(manifest.plan.ranks) > 1:
        report = report_plan(manifest, Sharding())
        show_placement(report)
        show_ranks(report, traffic=False)
    show_hosts(manifest)
    show_parity(manifest.parity)
    show_scores(manifest, manifest.dense_part)
    show_remarks(manifest)
    show_cached(bundle, manifest)
    show_deltas(opened)
    out.print("made with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))


def verify(
    bundle: Annotated[
        Path,
        typer.Argument(
            help="A version, REPOSITORY/NAME/VERSION; or a model, REPOSITORY/NAME, for the version that it serves."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="package.module:function that builds the trained model, to compare rows, answers and scores with."
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    checkpoint_prefix: CheckpointPrefixOption = None,
    example: Annotated[
        str | None,
        typer.Option(help="package.module:name of the arguments of one call, as for `tbe-export model --example`."),
    ] = None,
    labelled: Annotated[
        Path | None,
        typer.Option(help="JSON lines with labels, as for `tbe-export model --labelled`, to measure the AUC on."),
    ] = None,
    trained_memory: Annotated[str | None, typer.Option(help=TRAINED_MEMORY_HELP)] = None,
    trusted_keys: Annotated[
        Path | None, typer.Option(help="PEM file with Ed25519 public keys. One of them must have signed the bundle.")
    ] = None,
    deltas: DeltasOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read every byte of a bundle and its deltas, and check its answers at each step. Exits with 1 if one differs."""
    if model is None:
        needs_model = {"--checkpoint": checkpoint, "--example": example, "--labelled": labelled}
        for option, value in needs_model.items():
            if value is not None:
                raise ConfigurationError(f"{option}: expected --model with it, the model to compare the bundle with")
    limit = None if trained_memory is None else size_bytes("trained_memory", trained_memory, 0)
    trusted = None if trusted_keys is None else TrustedKeys.read(trusted_keys)
    # Before the model is built, which takes long: a wrong path or a damaged file is named at once.
    path = open_bundle(bundle_of(bundle, trusted), trusted).path
    check_pins()
    from export.parity.verify import ComparedModel, as_json
    from export.parity.verify import verify as verify_any
    from export.trained.model_copy import on_cpu
    from export.trained.tables import collect_tables

    compared = None
    if model is not None:
        call = None if example is None else named_example(example)
        module = on_cpu(build_module(model, meta=checkpoint is not None))
        trained = collect_tables(module, trace=call is None)
        compared = ComparedModel(trained, checkpoint, checkpoint_prefix, call, labelled, limit)
    verification = verify_any(path, compared, trusted=trusted)
    count, problems = read_deltas(verification.bundle, deltas)
    if json_:
        print_json(as_json(verification))
    else:
        manifest = verification.bundle.manifest
        show_verification(verification)
        show_scores(manifest, verification.dense_part)
        if verification.source is not None:
            out.print(f"compared with {verification.source}", soft_wrap=True)
        size = sum(file.size_bytes for file in manifest.files.values())
        out.print(f"{len(manifest.files)} files ({size:,} bytes) match their digests", soft_wrap=True)
        if count:
            out.print(f"{count:,} deltas were read")
        for path in verification.absent:
            out.print(f"{path}: missing: its rows were not read, and no answers were compared", soft_wrap=True)
        if not verification.measured:
            out.print(
                "float ↔ quantized, trained: as recorded at export; measure them again with --model and --checkpoint",
                soft_wrap=True,
            )
        elif not verification.is_run:
            floats = size_text(sum(4 * table.rows * table.dim for table in manifest.tables))
            out.print(
                f"trained was not measured: the tables take {floats} as FP32, more than half of the free memory or "
                "--trained-memory",
                soft_wrap=True,
            )
    failures = *verification.failures, *problems
    for failure in failures:
        complain("tbe-export", failure)
    raise typer.Exit(bool(failures))


def push(
    model: Annotated[Path, typer.Argument(help="The model's folder: REPOSITORY/NAME.")],
    url: Annotated[str, typer.Argument(help="The repository in a store, such as s3://bucket/models.")],
    settings: Annotated[
        bool,
        typer.Option("--settings", help="Replace the settings in the store: config.pbtxt and the warm-up requests."),
    ] = False,
) -> None:
    """Upload a model and its hosts' models to a store: settings, and the versions and release that it does not have.

    The manifest.json of a version is uploaded last. An interrupted push publishes nothing; run it again to resume.
    """
    with bytes_bar("pushing") as show:
        for written in push_model(model, Store(url), settings=settings, progress=show):
            out.print(f"published {written}", soft_wrap=True)


def release(
    model: Annotated[
        str, typer.Argument(help="The model: REPOSITORY/NAME, a folder or a URL such as s3://bucket/models/movies.")
    ],
    versions: Annotated[
        list[int],
        typer.Argument(
            min=1, max=2**63 - 1, help="Versions to serve. The newest answers requests that name no version."
        ),
    ],
    signing_key: Annotated[
        Path | None, typer.Option(help="PEM file with the Ed25519 private key that signs the release.")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(help="First read every file of the versions, and compare it with its digest."),
    ] = True,
) -> None:
    """Make every server that follows the model's releases (`tbe-serve run --follow`) serve these versions.

    To roll back, release the older version; --no-verify does so at once. No server restarts.
    """
    key = None if signing_key is None else read_signing_key(signing_key)
    repository, _, name = (model.rstrip("/") if is_url(model) else os.path.abspath(model)).rpartition("/")
    with repository_at(repository or "/", name) as folder:
        if verify and is_url(model):
            check_published(folder / name, versions)
            for version in versions:
                check_stored(Store(repository), folder / name / str(version))
        written = write_release(folder / name, versions, key, verify=verify and not is_url(model))
        path = release_path(folder / name)
        was_signed = key is None and os.path.lexists(signature_of(path))
    out.print(f"{repository}/{path.name}: version {', '.join(map(str, written.versions))}", soft_wrap=True)
    if was_signed:
        out.print(
            "the last release was signed, this one is not: servers with trusted keys refuse it until you release "
            "with --signing-key",
            soft_wrap=True,
        )


def prune(
    model: Annotated[Path, typer.Argument(help="The model's folder: REPOSITORY/NAME.")],
    keep: Annotated[int, typer.Option(help="Number of newest versions that are always kept.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; print what would be removed.")] = False,
    deltas: DeltasOption = None,
    squashed: Annotated[
        bool,
        typer.Option("--squashed", help="Also remove deltas that a squashed delta replaces for every version."),
    ] = False,
) -> None:
    """Remove old versions of a model, and their deltas.

    Versions that a server on this machine has open, and released ones, are kept.
    """
    takes_deltas = settings_of(read_config(model)).weights_memory == WeightsMemory.LIVE
    if takes_deltas and deltas is None and not (deltas_folder(model.parent) / model.name).exists():
        complain(
            "tbe-export",
            f"{model}: its deltas are not beside the repository, and are kept: name their folder with --deltas",
        )
    for fate in prune_versions(model, keep, dry_run=dry_run, deltas=deltas):
        removed = "would be removed" if dry_run else "removed"
        if fate.deltas:
            removed += f", and {fate.deltas:,} {'delta' if fate.deltas == 1 else 'deltas'} that no version needs"
        out.print(f"{model / str(fate.version)}: {fate.kept_because or removed}", soft_wrap=True)
    if squashed:
        count = prune_squashed_deltas(model, dry_run=dry_run, deltas=deltas)
        removed = "would be removed" if dry_run else "removed"
        out.print(f"{model}: {count:,} squashed deltas: {removed}", soft_wrap=True)
