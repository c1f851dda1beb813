"""`tbe-export delta`, `squash` and `compact`: rows that changed since an export, in one file, and in a version."""

from pathlib import Path
from typing import Annotated, Any

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
from serving.errors import ConfigurationError
from serving.files import is_url
from serving.model.config_file import read_config, settings_of
from serving.model.settings import WeightsMemory
from serving.pins import check_pins
from serving.terminal.app import out
from serving.terminal.options import real

ModelArgument = Annotated[Path, typer.Argument(help="The model's folder: REPOSITORY/NAME.")]
VersionOption = Annotated[
    int | None, typer.Option(min=1, max=2**63 - 1, help="The version whose rows change. Default: the newest.")
]

TrustedKeysOption = Annotated[
    Path | None,
    typer.Option(
        help="PEM file with Ed25519 public keys: one must have signed the version and each delta. Default: that of "
        "--signing-key."
    ),
]


def delta(
    model: ModelArgument,
    rows: Annotated[
        Path | None,
        typer.Option(
            help="safetensors with `TABLE/ids`, integers [n], and `TABLE/rows`, floats [n, dim], as trained."
        ),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="package.module:function of the trained model: all rows that differ from the stored ones are "
            "published.",
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    checkpoint_prefix: CheckpointPrefixOption = None,
    version: VersionOption = None,
    max_error: Annotated[
        list[str] | None, typer.Option(metavar="TABLE=X", help="No element of the table may move by more than X.")
    ] = None,
    deltas: DeltasOption = None,
    signing_key: SigningKeyOption = None,
) -> None:
    """Publish changed rows of a model: servers with `weights-memory: live` serve them within a second."""
    if (rows is None) == (module is None):
        raise ConfigurationError(
            "expected --rows, or --model, perhaps with --checkpoint: one of them has the changed rows"
        )
    if checkpoint is not None and module is None:
        raise ConfigurationError("--checkpoint: expected --model too: it says which tables to look for")
    check_pins()
    from export.publish.changes import publish_changes
    from export.publish.delta import publish_delta, read_changed

    common: dict[str, Any] = {
        "version": version,
        "max_error": dict(_limit(text) for text in max_error or ()),
        "deltas": deltas,
        "signing_key": signing_key,
    }
    where = model.absolute().parent, model.absolute().name
    if module is None:
        assert rows is not None  # noqa: S101  one of the two is given
        found = publish_delta(*where, read_changed(rows), **common)
    else:
        trained = build_module(module, meta=checkpoint is not None)
        common |= {"checkpoint": checkpoint, "checkpoint_prefix": checkpoint_prefix}
        changes = publish_changes(*where, trained, **common)
        if changes is None:
            out.print(f"{model}: no row differs: nothing is published", soft_wrap=True)
            return
        found = changes
    out.print(
        f"{_shown(found.path, deltas)}: {found.rows:,} rows, delta {found.sequence} of version {found.version}",
        soft_wrap=True,
    )
    for note in found.notes:
        out.print(f"note: {note}", soft_wrap=True)
    if settings_of(read_config(model)).weights_memory != WeightsMemory.LIVE:
        out.print(f"no server applies it: `tbe-serve configure {model} --weights-memory live`", soft_wrap=True)


def squash(
    model: ModelArgument,
    version: VersionOption = None,
    until: Annotated[
        int | None, typer.Option(min=1, help="The last delta that is squashed. Default: the newest.")
    ] = None,
    deltas: DeltasOption = None,
    signing_key: SigningKeyOption = None,
    trusted_keys: TrustedKeysOption = None,
) -> None:
    """Publish the deltas of a version as one, which a server that starts applies in their place."""
    check_pins()
    from export.publish.delta import squash as publish

    found = publish(
        model.absolute().parent,
        model.absolute().name,
        version=version,
        until=until,
        deltas=deltas,
        signing_key=signing_key,
        trusted_keys=trusted_keys,
    )
    said = f"deltas up to {found.sequence} of version {found.version}, as one"
    out.print(f"{_shown(found.path, deltas)}: {found.rows:,} rows, {said}", soft_wrap=True)


def compact(
    model: ModelArgument,
    version: VersionOption = None,
    until: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The last delta that the new version takes. Later ones are left out for good: rows are rolled back.",
        ),
    ] = None,
    deltas: DeltasOption = None,
    signing_key: SigningKeyOption = None,
    trusted_keys: TrustedKeysOption = None,
) -> None:
    """Publish a version and its deltas as the next version: a server that starts has less to apply."""
    check_pins()
    from export.next_version import compact as publish

    with export_progress() as show:
        published = publish(
            model.absolute().parent,
            model.absolute().name,
            version=version,
            until=until,
            deltas=deltas,
            signing_key=signing_key,
            trusted_keys=trusted_keys,
            progress=show,
        )
    found = open_bundle(published)
    goes_on = found.manifest.compacted
    then = f"delta {goes_on.sequence + 1} is next" if goes_on else "it begins a lineage of its own"
    out.print(f"{found.path}: {found.manifest.notes[-1]}; {then}", soft_wrap=True)


def _shown(path: Path, deltas: str | None) -> str:
    """Where a delta is, as a reader can find it: in the store, if that has it."""
    return str(path) if deltas is None or not is_url(deltas) else "/".join((deltas.rstrip("/"), *path.parts[-3:]))


def _limit(text: str) -> tuple[str, float]:
    table, _, limit = text.rpartition("=")
    if not table:
        raise ConfigurationError(f"--max-error {text}: expected TABLE=X")
    return table, real("--max-error", limit)
