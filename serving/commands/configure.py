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
from serving.requests.captured import MOST_WARM_UP_BYTES, WARM_UP, SkippedLines, read_captured
from serving.terminal.app import out
from serving.terminal.options import as_given, by_name, named, shared_options, with_options
from serving.terminal.output import print_json


def _changes(before: ServingSettings, **typed: Any) -> dict[str, Any]:
    changes = {field.name: typed[field.name] for field, _ in table() if typed[field.name] is not None}
    for field, setting in table():
        if kind_of(field) is Mapping and field.name in changes:
            values = changes[field.name]
            may_lack_name = (setting.metavar or "").startswith("[")
            added = by_name(values) if may_lack_name else named(setting.flag or f"--{field.name}", values)
            changes[field.name] = (getattr(before, field.name) or {}) | added
    unset = [field.name for field, setting in table() if setting.unset and typed[f"no_{field.name}"]]
    return changes | dict.fromkeys(unset)


def _options(field: Field[Any], setting: Setting) -> Iterator[tuple[str, tuple[Any, Any]]]:
    kind: Any = setting.typed or kind_of(field)
    option = f"--{field.name.replace('_', '-')}"
    names = [f"{option}/--no-{option[2:]}"] if kind is bool else [setting.flag] if setting.flag else []
    typed = list[str] if kind is Mapping else kind
    yield (
        field.name,
        (Annotated[typed | None, typer.Option(*names, metavar=setting.metavar, help=setting.help)], None),
    )
    if setting.unset:
        yield f"no_{field.name}", (Annotated[bool, typer.Option(f"--no-{option[2:]}", help=setting.unset)], False)


ChangesOf = Callable[[ServingSettings], dict[str, Any]]
# A command calls `changes(before)` for the settings of the command line, as arguments of ServingSettings.
# None means unset. Values of the form NAME=X are added to the values in `before`.
takes_settings = shared_options(
    "changes", with_options(_changes, dict(option for entry in table() for option in _options(*entry)))
)


@takes_settings
def configure(
    model: Annotated[Path, typer.Argument(help="The model's folder: REPOSITORY/NAME.")],
    changes: ChangesOf,
    warm_up: Annotated[
        Path | None, typer.Option(help="File of captured requests that the server answers before the model is ready.")
    ] = None,
    no_warm_up: Annotated[bool, typer.Option("--no-warm-up", help="Remove the warm-up requests.")] = False,
    signing_key: Annotated[
        Path | None,
        typer.Option(
            help="PEM file with an Ed25519 private key to sign the shown settings and the warm-up requests."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show or change the settings of a model.

    A running server applies changed settings at `tbe-serve load`.
    """
    config = read_config(model)
    before = settings_of(config)
    changed = changes(before)
    key = None if signing_key is None else read_signing_key(signing_key)
    if "version" in changed:
        changed["version"] = _version(model, changed["version"])
    settings = replace(before, **changed)
    manifests = _manifests(model)
    _check_applicable(model, manifests, changed)
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
        _print_next_steps(model, is_signed=key is not None)


def _manifests(model: Path) -> Sequence[Manifest]:
    """The manifests of a model's versions."""
    manifests = []
    for version in versions(model):
        with suppress(BundleError):  # other commands report a damaged version
            manifests.append(open_bundle(model / str(version)).manifest)
    return manifests


def _is_applicable(setting: Setting, manifests: Sequence[Manifest]) -> bool:
    """Whether a setting affects any of these versions."""
    return (not setting.is_of_router or any(manifest.hosts for manifest in manifests)) and (
        not setting.is_of_scores or any(manifest.dense_part for manifest in manifests)
    )


def _check_applicable(model: Path, manifests: Sequence[Manifest], changed: Mapping[str, Any]) -> None:
    """Refuse settings for routers or scores that affect no version of the model."""
    for field, setting in table():
        if manifests and changed.get(field.name) is not None and not _is_applicable(setting, manifests):
            expected, got = (
                ("a router", "all ranks of its versions are in the bundle")
                if setting.is_of_router
                else ("a model with scores", "export one with --scores")
            )
            option = setting.flag or f"--{field.name.replace('_', '-')}"
            raise ConfigurationError(f"{option}: expected {expected}, got {model}: {got}")


def _defaults(settings: ServingSettings, manifests: Sequence[Manifest]) -> dict[str, Any]:
    """The default values of applicable settings that are None, by name."""
    return {
        field.name: setting.otherwise
        for field, setting in table()
        if getattr(settings, field.name) is None
        and setting.otherwise is not None
        and _is_applicable(setting, manifests)
    }


def _print_next_steps(model: Path, *, is_signed: bool) -> None:
    """Print how to apply a change."""
    out.print(f"written to {model / CONFIG}; for a running server: tbe-serve load {model.name}", soft_wrap=True)
    if not is_signed and os.path.lexists(signature_of(model / CONFIG)):
        out.print(
            "its signature is now invalid: servers with --trusted-keys refuse it until you sign it, --signing-key",
            soft_wrap=True,
        )


def _version(model: Path, text: str) -> int | None:
    """Parse the number of one of the model's versions. None: the newest."""
    if text == NEWEST:
        return None
    published = versions(model)[::-1]
    if text not in map(str, published):
        raise ConfigurationError(f"version: expected {NEWEST!r} or one of {published} in {model}, got {text!r}")
    return int(text)


def _set_warm_up(model: Path, source: Path) -> None:
    """Copy the captured requests of `source` to a file beside config.pbtxt."""
    skipped = SkippedLines()
    for _ in read_captured(source, skipped, follow=True):
        pass
    for line in skipped.report(source):
        say(line)
    with open_file(source, follow=True) as captured, replacing(model / WARM_UP) as file:
        shutil.copyfileobj(captured, file)


def _sign(model: Path, config: bytes, key: Ed25519PrivateKey) -> None:
    """Sign config.pbtxt and the warm-up requests of a model.

    Args:
        model: the model's folder.
        config: the shown content of config.pbtxt. The file may have changed since.
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
