"""`tbe-export delta`, `squash` and `compact`: publish rows that changed since an export."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from export.commands.model import export_progress
from export.commands.module import (
    CheckpointOption,
    CheckpointPrefixOption,
    DeltasOption,
    SigningKeyOption,
    build_module,
)
from serving.bundle.load import open_bundle
from serving.errors import ConfigurationError, counted
from serving.files import is_url
from serving.model.config_file import read_config, settings_of
from serving.model.settings import WeightsMemory
from serving.pins import check_pins
from serving.terminal.app import out
from serving.terminal.options import real

if TYPE_CHECKING:
    from export.publish.lineage import PublishedDelta

ModelArgument = Annotated[Path, typer.Argument(help="The model's folder: REPOSITORY/NAME.")]
VersionOption = Annotated[
    int | None, typer.Option(min=1, max=2**63 - 1, help="The version whose rows change. Default: the newest.")
]
TrustedKeysOption = Annotated[
    Path | None,
    typer.Option(
        help="PEM file with Ed25519 public keys: one must have signed the version and each delta. Default: the "
        "public key of --signing-key."
    ),
]


def delta(
    model: ModelArgument,
    rows: Annotated[
        Path | None,
        typer.Option(
            help="A safetensors file of changed rows: `TABLE/ids`, integers [n], and `TABLE/rows`, the trained "
            "floats [n, dim]."
        ),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Instead of --rows: package.module:function that builds the trained model. All rows that differ "
            "from the stored ones are published.",
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    checkpoint_prefix: CheckpointPrefixOption = None,
    version: VersionOption = None,
    max_error: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE=X", help="Largest allowed error of an element, in units of the weights."),
    ] = None,
    deltas: DeltasOption = None,
    signing_key: SigningKeyOption = None,
) -> None:
    """Publish changed rows of a model. Servers with `weights-memory: live` serve them within a second."""
    if (rows is None) == (module is None):
        raise ConfigurationError("expected either --rows or --model, which say where the changed rows are")
    if checkpoint is not None and module is None:
        raise ConfigurationError("--checkpoint: expected --model with it, which names the tables")
    check_pins()
    from export.publish.changes import publish_changes
    from export.publish.delta import publish_delta, read_changed

    common: dict[str, Any] = {
        "version": version,
        "max_error": dict(_limit(text) for text in max_error or ()),
        "deltas": deltas,
        "signing_key": signing_key,
    }
    path = model.absolute()
    if module is None:
        assert rows is not None  # noqa: S101  checked above
        published: PublishedDelta | None = publish_delta(path.parent, path.name, read_changed(rows), **common)
    else:
        trained = build_module(module, meta=checkpoint is not None)
        common |= {"checkpoint": checkpoint, "checkpoint_prefix": checkpoint_prefix}
        published = publish_changes(path.parent, path.name, trained, **common)
    if published is None:
        out.print(f"{model}: no row differs from the stored ones; nothing was published", soft_wrap=True)
        return
    out.print(
        f"{_shown(published.path, deltas)}: {counted(published.rows, 'row')}, delta {published.sequence} of version "
        f"{published.version}",
        soft_wrap=True,
    )
    for note in published.notes:
        out.print(f"note: {note}", soft_wrap=True)
    if settings_of(read_config(model)).weights_memory != WeightsMemory.LIVE:
        out.print(
            f"no server applies it until you run `tbe-serve configure {model} --weights-memory live`", soft_wrap=True
        )


def squash(
    model: ModelArgument,
    version: VersionOption = None,
    until: Annotated[
        int | None, typer.Option(min=1, help="Number of the last delta to squash. Default: the newest.")
    ] = None,
    deltas: DeltasOption = None,
    signing_key: SigningKeyOption = None,
    trusted_keys: TrustedKeysOption = None,
) -> None:
    """Publish the deltas of a version as one delta. A starting server applies it instead of them, which is faster."""
    check_pins()
    from export.publish.delta import squash as publish

    squashed = publish(
        model.absolute().parent,
        model.absolute().name,
        version=version,
        until=until,
        deltas=deltas,
        signing_key=signing_key,
        trusted_keys=trusted_keys,
    )
    out.print(
        f"{_shown(squashed.path, deltas)}: {counted(squashed.rows, 'row')}, deltas up to {squashed.sequence} of "
        f"version {squashed.version} as one",
        soft_wrap=True,
    )


def compact(
    model: ModelArgument,
    version: VersionOption = None,
    until: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of the last delta to include. Later ones are left out for good, which rolls rows back. "
            "Default: the newest, and later deltas continue from there.",
        ),
    ] = None,
    deltas: DeltasOption = None,
    signing_key: SigningKeyOption = None,
    trusted_keys: TrustedKeysOption = None,
) -> None:
    """Publish a version with its deltas as the next version. A starting server then has fewer deltas to apply."""
    check_pins()
    from export.next_version import compact as publish

    with export_progress() as show:
        path = publish(
            model.absolute().parent,
            model.absolute().name,
            version=version,
            until=until,
            deltas=deltas,
            signing_key=signing_key,
            trusted_keys=trusted_keys,
            progress=show,
        )
    manifest = open_bundle(path).manifest
    compacted = manifest.compacted
    then = f"delta {compacted.sequence + 1} is next" if compacted else "it begins a lineage of its own"
    out.print(f"{path}: {manifest.notes[-1]}; {then}", soft_wrap=True)


def _shown(path: Path, deltas: str | None) -> str:
    """The path of a delta, or its URL if deltas are in a store."""
    return str(path) if deltas is None or not is_url(deltas) else "/".join((deltas.rstrip("/"), *path.parts[-3:]))


def _limit(text: str) -> tuple[str, float]:
    table, _, limit = text.rpartition("=")
    if not table:
        raise ConfigurationError(f"--max-error {text}: expected TABLE=X")
    return table, real("--max-error", limit)
