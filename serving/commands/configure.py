"""`tbe-serve configure`: show and change the settings of a served model."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, asdict, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.table import Table

from serving.bundle.load import open_bundle, versions
from serving.bundle.manifest import Manifest
from serving.bundle.signature import read_signing_key, sign, signature_of
from serving.commands.connection import say
from serving.errors import BundleError, ConfigurationError
from serving.files import open_file, read_file, replacing
from serving.model.config_file import CONFIG, apply_settings, read_config, settings_of, write_config
from serving.model.settings import NEWEST, ServingSettings, Setting, kind_of, table
from serving.requests.captured import MOST_WARM_UP_BYTES, WARM_UP, PassedOver, read_captured
from serving.terminal.app import out
from serving.terminal.options import as_given, by_name, named, shared_options, with_options
from serving.terminal.output import print_json


def _changes(before: ServingSettings, **typed: Any) -> dict[str, Any]:
    given = {each.name: typed[each.name] for each, _ in table() if typed[each.name] is not None}
    for each, setting in table():
        if kind_of(each) is Mapping and each.name in given:
            values = given[each.name]
            may_lack_name = (setting.metavar or "").startswith("[")
            added = by_name(values) if may_lack_name else named(setting.flag or f"--{each.name}", values)
            given[each.name] = (getattr(before, each.name) or {}) | added
    unset = [each.name for each, setting in table() if setting.unset and typed[f"no_{each.name}"]]
    return given | dict.fromkeys(unset)


def _options(each: Field[Any], setting: Setting) -> Iterator[tuple[str, tuple[Any, Any]]]:
    kind: Any = setting.typed or kind_of(each)
    option = f"--{each.name.replace('_', '-')}"
    names = [f"{option}/--no-{option[2:]}"] if kind is bool else [setting.flag] if setting.flag else []
    typed = list[str] if kind is Mapping else kind
    yield each.name, (Annotated[typed | None, typer.Option(*names, metavar=setting.metavar, help=setting.help)], None)
    if setting.unset:
        yield f"no_{each.name}", (Annotated[bool, typer.Option(f"--no-{option[2:]}", help=setting.unset)], False)


ChangesOf = Callable[[ServingSettings], dict[str, Any]]
# A command calls `changes(before)` for the settings that were typed, as arguments of ServingSettings. None: unset.
# Values of the form NAME=X are added to those in `before`.
takes_settings = shared_options(
    "changes", with_options(_changes, dict(option for each in table() for option in _options(*each)))
)


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
    """Show or change the settings of a model.

    A running server uses changed settings after `tbe-serve load`.
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
        print_json(msgspec.json.encode({**asdict(settings), **defaults, "warm_up": warms_up}))
        return
    out.print(_as_table(settings, defaults, warms_up))
    if changed or no_warm_up or warm_up is not None:
        _tell_what_follows(model, is_signed=key is not None)


def _manifests(model: Path) -> Sequence[Manifest]:
    """The manifests of a model's versions."""
    found = []
    for version in versions(model):
        with suppress(BundleError):  # other commands report a damaged version
            found.append(open_bundle(model / str(version)).manifest)
    return found


def _is_meant(setting: Setting, manifests: Sequence[Manifest]) -> bool:
    """Whether any version uses a setting."""
    return (not setting.is_of_router or any(manifest.hosts for manifest in manifests)) and (
        not setting.is_of_scores or any(manifest.dense_part for manifest in manifests)
    )


def _check_meant(model: Path, manifests: Sequence[Manifest], changed: Mapping[str, Any]) -> None:
    """Refuse settings for routers, or for scores, if no version of the model uses them."""
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
    """The values that hold for settings that are None, by name."""
    return {
        each.name: setting.otherwise
        for each, setting in table()
        if getattr(settings, each.name) is None and setting.otherwise is not None and _is_meant(setting, manifests)
    }


def _tell_what_follows(model: Path, *, is_signed: bool) -> None:
    """Print what to do after a change."""
    out.print(f"written to {model / CONFIG}; a running server takes it: tbe-serve load {model.name}", soft_wrap=True)
    if not is_signed and os.path.lexists(signature_of(model / CONFIG)):
        out.print(
            "it was signed: where keys are trusted it is refused until it is again, --signing-key", soft_wrap=True
        )


def _version(model: Path, text: str) -> int | None:
    """The number of one of the model's versions. None: the newest."""
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
        model: the model's folder.
        config: the content of config.pbtxt that was shown. The file may have changed since.
        key: the private key.
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
