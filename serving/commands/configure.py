"""`tbe-serve configure`: how a model is served."""

import os
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.table import Table

from serving.atomic import replacing
from serving.bundle import versions
from serving.capture import MOST_WARM_UP_BYTES, WARM_UP, read_captured
from serving.config_file import CONFIG, apply_settings, read_config, settings_of, write_config
from serving.errors import ConfigurationError
from serving.files import open_file, read_file
from serving.settings import ServingSettings
from serving.signature import read_signing_key, sign, signature_of
from serving.terminal import out

NEWEST = "newest"


def configure(
    model: Annotated[Path, typer.Argument(help="The model's folder: REPOSITORY/NAME.")],
    instances: Annotated[
        int | None, typer.Option(help="Processes that answer; a core each, one copy of the weights.")
    ] = None,
    merged_requests: Annotated[
        int | None, typer.Option(help="Most requests that are answered by one TBE call.")
    ] = None,
    queue_requests: Annotated[
        int | None, typer.Option(help="Most requests that wait; more are refused. 0: any number.")
    ] = None,
    queue_timeout_ms: Annotated[
        int | None, typer.Option(help="How long a request may wait. 0: as long as its caller.")
    ] = None,
    max_request_ids: Annotated[int | None, typer.Option(help="Most ids of a request.")] = None,
    max_request_samples: Annotated[int | None, typer.Option(help="Most samples of a request.")] = None,
    max_call_ids: Annotated[int | None, typer.Option(help="Most ids of a TBE call; more take several.")] = None,
    max_call_samples: Annotated[int | None, typer.Option(help="Most samples of a TBE call.")] = None,
    max_busy_ms: Annotated[
        int | None, typer.Option(help="Of what waits together, what is not answered within this is refused.")
    ] = None,
    version: Annotated[str | None, typer.Option(help=f"The version to serve, or '{NEWEST}' (default).")] = None,
    verify_weights: Annotated[
        bool | None,
        typer.Option(
            "--verify-weights/--no-verify-weights",
            help="Compare the weights with their digests before they serve: a second or so for each GB.",
        ),
    ] = None,
    capture: Annotated[
        str | None, typer.Option(help="Folder that takes refused requests for replay (ids alone).")
    ] = None,
    no_capture: Annotated[bool, typer.Option("--no-capture", help="Capture nothing.")] = False,
    capture_slow_ms: Annotated[float | None, typer.Option(help="Capture slow calls too.")] = None,
    no_capture_slow_ms: Annotated[
        bool, typer.Option("--no-capture-slow-ms", help="Capture no call for being slow.")
    ] = False,
    capture_max_bytes: Annotated[int | None, typer.Option(help="How large the captured file may grow.")] = None,
    warm_up: Annotated[
        Path | None, typer.Option(help="Captured requests to answer before the model is ready.")
    ] = None,
    no_warm_up: Annotated[bool, typer.Option("--no-warm-up", help="Be ready at once.")] = False,
    signing_key: Annotated[
        Path | None,
        typer.Option(help="PEM file with the Ed25519 private key: sign how the model is served, as this shows it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how a model is served, or change it; the server does so after `tbe-serve load`, or its next start."""
    given = locals()  # an option for each setting
    said = {each.name: given[each.name] for each in fields(ServingSettings) if given[each.name] is not None}
    said |= {name: None for name in ("capture", "capture_slow_ms") if given[f"no_{name}"]}
    key = None if signing_key is None else read_signing_key(signing_key)
    if version is not None:
        said["version"] = _version(model, version)
    config = read_config(model)
    settings = replace(settings_of(config), **said)
    if no_warm_up:
        (model / WARM_UP).unlink(missing_ok=True)
    elif warm_up is not None:
        _set_warm_up(model, warm_up)
    if said or key is not None:
        apply_settings(config, settings)
        content = write_config(model, config)
        if key is not None:
            _sign(model, content, key)
    warms = os.path.lexists(model / WARM_UP)
    if as_json:
        print(msgspec.json.encode({**asdict(settings), "warm_up": warms}).decode())
        return
    out.print(_table(settings, warms))
    if said or no_warm_up or warm_up is not None:
        out.print(
            f"written to {model / CONFIG}; a running server takes it: tbe-serve load {model.name}", soft_wrap=True
        )
        if key is None and os.path.lexists(signature_of(model / CONFIG)):
            out.print(
                "it was signed: where keys are trusted it is refused until it is again, --signing-key", soft_wrap=True
            )


def _version(model: Path, text: str) -> int | None:
    if text == NEWEST:
        return None
    there = versions(model)[::-1]
    if text not in map(str, there):
        raise ConfigurationError(f"version: expected {NEWEST!r} or one of {there} in {model}, got {text!r}")
    return int(text)


def _set_warm_up(model: Path, source: Path) -> None:
    """Put a copy beside config.pbtxt, at once, if all of it can be read."""
    for _ in read_captured(source, follow=True):
        pass
    with open_file(source, follow=True) as captured, replacing(model / WARM_UP) as file:
        shutil.copyfileobj(captured, file)


def _sign(model: Path, config: bytes, key: Ed25519PrivateKey) -> None:
    """Sign what was shown of a model, whatever its files have become meanwhile."""
    name = Path(os.path.abspath(model)).name
    try:
        sign(model / CONFIG, config, key, name)
        if os.path.lexists(warm_up := model / WARM_UP):
            sign(warm_up, read_file(warm_up, MOST_WARM_UP_BYTES), key, name)
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: cannot be signed: {error.strerror}") from error


def _table(settings: ServingSettings, warms: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    shown = asdict(settings) | {"version": settings.version or NEWEST, "warm_up": "yes" if warms else "no"}
    for name, value in shown.items():
        text = "none" if value is None else f"{value:,}" if type(value) is int else str(value)
        table.add_row(name.replace("_", "-"), text)
    return table
