"""`tbe-serve configure`: show and change the settings of a served model."""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.table import Table

from serving.bundle.manifest import Manifest
from serving.bundle.opening import open_bundle, versions
from serving.bundle.signature import read_signing_key, sign, signature_of
from serving.commands.connection import say
from serving.commands.settings import ChangesOf, takes_settings
from serving.errors import BundleError, ConfigurationError
from serving.files.reading import open_file, read_file
from serving.files.replacing import replacing
from serving.model.config_file import CONFIG, apply_settings, read_config, settings_of, write_config
from serving.model.settings import NEWEST, ServingSettings, Setting, table
from serving.request.captured import MOST_WARM_UP_BYTES, WARM_UP, PassedOver, read_captured
from serving.terminal.options import as_given
from serving.terminal.program import out


@takes_settings
def configure(
    model: Annotated[Path, typer.Argument(help="The model's folder: REPOSITORY/NAME.")],
    changes: ChangesOf,
    warm_up: Annotated[
        Path | None, typer.Option(help="Captured requests to answer before the model is ready.")
    ] = None,
    no_warm_up: Annotated[bool, typer.Option("--no-warm-up", help="Remove the warm-up requests.")] = False,
    signing_key: Annotated[
        Path | None,
        typer.Option(help="PEM file with an Ed25519 private key: sign the settings as shown, and the warm-up."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how a model is served, or change it.

    A running server serves it so after `tbe-serve load`.
    """
    config = read_config(model)
    before = settings_of(config)
    changed = changes(before)
    key = None if signing_key is None else read_signing_key(signing_key)
    if "version" in changed:
        changed["version"] = _version(model, changed["version"])
    settings = replace(before, **changed)
    manifests = _manifests(model)
    _check_meant(model, manifests, changed)
    if no_warm_up:
        (model / WARM_UP).unlink(missing_ok=True)
    elif warm_up is not None:
        _set_warm_up(model, warm_up)
    if changed or key is not None:
        apply_settings(config, settings)
        content = write_config(model, config)
        if key is not None:
            _sign(model, content, key)
    warms_up = os.path.lexists(model / WARM_UP)
    defaults = _defaults(settings, manifests)
    if as_json:
        print(msgspec.json.encode({**asdict(settings), **defaults, "warm_up": warms_up}).decode())
        return
    out.print(_as_table(settings, defaults, warms_up))
    if changed or no_warm_up or warm_up is not None:
        _tell_what_follows(model, is_signed=key is not None)


def _manifests(model: Path) -> Sequence[Manifest]:
    """Of the versions of a model."""
    found = []
    for version in versions(model):
        with suppress(BundleError):  # a damaged version is for others to report
            found.append(open_bundle(model / str(version)).manifest)
    return found


def _is_meant(setting: Setting, manifests: Sequence[Manifest]) -> bool:
    """Whether some version has a use for a setting."""
    return (not setting.is_of_router or any(each.hosts for each in manifests)) and (
        not setting.is_of_scores or any(each.dense_part for each in manifests)
    )


def _check_meant(model: Path, manifests: Sequence[Manifest], changed: Mapping[str, Any]) -> None:
    """Refuse what only a router, or a model with scores, has a use for, where no version of the model is one."""
    for each, setting in table():
        if manifests and changed.get(each.name) is not None and not _is_meant(setting, manifests):
            expected, got = (
                ("a router", "all ranks of its versions are in the bundle")
                if setting.is_of_router
                else ("a model with scores", "export one with --scores")
            )
            option = setting.flag or f"--{each.name.replace('_', '-')}"
            raise ConfigurationError(f"{option}: expected {expected}, got {model}: {got}")


def _defaults(settings: ServingSettings, manifests: Sequence[Manifest]) -> dict[str, Any]:
    """What holds in place of settings that are None, by name."""
    return {
        each.name: setting.otherwise
        for each, setting in table()
        if getattr(settings, each.name) is None and setting.otherwise is not None and _is_meant(setting, manifests)
    }


def _tell_what_follows(model: Path, *, is_signed: bool) -> None:
    """Print what has to be done after a change."""
    out.print(f"written to {model / CONFIG}; a running server takes it: tbe-serve load {model.name}", soft_wrap=True)
    if not is_signed and os.path.lexists(signature_of(model / CONFIG)):
        out.print(
            "it was signed: where keys are trusted it is refused until it is again, --signing-key", soft_wrap=True
        )


def _version(model: Path, text: str) -> int | None:
    """The number of one of the model's versions; None for the newest."""
    if text == NEWEST:
        return None
    there = versions(model)[::-1]
    if text not in map(str, there):
        raise ConfigurationError(f"version: expected {NEWEST!r} or one of {there} in {model}, got {text!r}")
    return int(text)


def _set_warm_up(model: Path, source: Path) -> None:
    """Copy `source` to a file beside config.pbtxt, if it has captured requests."""
    passed_over = PassedOver()
    for _ in read_captured(source, passed_over, follow=True):
        pass
    for line in passed_over.said(source):
        say(line)
    with open_file(source, follow=True) as captured, replacing(model / WARM_UP) as file:
        shutil.copyfileobj(captured, file)


def _sign(model: Path, config: bytes, key: Ed25519PrivateKey) -> None:
    """Sign config.pbtxt and the warm-up requests of a model.

    Args:
        config: the content of config.pbtxt that was shown. The file may have changed since.
    """
    name = Path(os.path.abspath(model)).name
    try:
        sign(model / CONFIG, config, key, name)
        if os.path.lexists(warm_up := model / WARM_UP):
            sign(warm_up, read_file(warm_up, MOST_WARM_UP_BYTES), key, name)
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: cannot be signed: {error.strerror}") from error


def _as_table(settings: ServingSettings, defaults: Mapping[str, Any], warms_up: bool) -> Table:
    shown = Table.grid(padding=(0, 2))
    values = asdict(settings) | {"version": settings.version or NEWEST, "warm_up": "yes" if warms_up else "no"}
    for name, value in values.items():
        text = f"{_text(defaults[name])} (default)" if name in defaults else _text(value)
        shown.add_row(name.replace("_", "-"), text)
    return shown


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(as_given(name, text) for name, text in value.items())
    return "none" if value is None else f"{value:,}" if type(value) is int else str(value)
