"""`tbe-serve load`, and the options of `tbe-serve run` for what to serve: versions, releases, signatures to trust."""

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from serving.arguments import check_timeout
from serving.bundle.load import check_published
from serving.bundle.plan import MOST_VERSION
from serving.commands.connection import DEFAULT_URL, UrlOption
from serving.errors import ConfigurationError, ServerUnavailable, ServingError
from serving.model.config_file import Pins
from serving.server import Control
from serving.server.private_folder import Trust
from serving.server.run_file import RunFile, find_run_file
from serving.server.versions import switch
from serving.terminal.app import out
from serving.terminal.options import EVERY, as_given, by_name, shared_options


def load(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    version: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N]",
            help="The version to serve, or several beside one another. Default: the one that config.pbtxt names, or "
            "the newest.",
        ),
    ] = None,
    url: UrlOption = DEFAULT_URL,
    timeout_s: Annotated[float, typer.Option(help="Longest time to load the version, in seconds.")] = 120.0,
) -> None:
    """Serve the newest version of a model, or those given, without losing a request.

    The present version serves until the new one is ready. If the new one cannot be loaded, the present one serves on.
    To serve an older version after a restart too: `tbe-serve configure --version`.

    Call this on the server's machine, as the user that runs it: `tbe-serve run` keeps the key for that user.
    """
    check_timeout(timeout_s)
    wanted = () if version is None else _numbers(version)
    if wanted is None:
        raise ConfigurationError(f"--version {version}: expected N[,N], N a version's number, such as 2 or 2,1")
    run = _run_file(url)
    if version is None and model in run.pinned:
        raise ConfigurationError(f"{model}: is pinned to {_listed(run.pinned[model])} here: name a version")
    if model in run.released:
        raise ConfigurationError(
            f"{model}: its release says what is served here, as --follow says: `tbe-export release`"
        )
    control = Control(address=run.control, key=run.key, timeout_s=timeout_s)
    try:
        if wanted:
            check_published(Path(run.repository) / model, wanted)
        served = Path(run.repository) if run.private is None else run.private.repository
        hosts = run.hosts.get(model)
        switched = switch(control, model, wanted, private=run.private, repository=served, hosts=hosts)
    except ServingError:
        now = control.ready(model)
        out.print(f"{model}: still serves version {_listed(now)}" if now else f"{model}: serves no version")
        raise
    out.print(f"{model}: version {_listed(switched.before)} → {_listed(switched.after)}")


def _run_file(url: str) -> RunFile:
    run = find_run_file(url)
    if run is None:
        raise ServerUnavailable(
            f"{url or repr(url)}: expected the gRPC address of a server that you run here with `tbe-serve run`, "
            "found none: call this on the server's machine, as the server's user"
        )
    return run


def _listed(versions: tuple[int, ...]) -> str:
    return ", ".join(map(str, versions)) or "none"


# The longest deadline that lookups should have: docs/operating.md#clients.
_UNLOAD_AFTER_S = 10.0
_MOST_S = 1_000_000


def _pins(
    *,
    serve: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL=N[,N]",
            help="Serve exactly these versions of a model, whatever config.pbtxt says. The newest of them answers "
            "requests that name no version.",
        ),
    ] = None,
) -> Pins:
    return {model: _versions(model, text) for model, text in by_name(serve).items()}


def _versions(model: str, text: str) -> tuple[int, ...]:
    numbers = _numbers(text)
    if model == EVERY or numbers is None:
        raise ConfigurationError(
            f"--serve {as_given(model, text)}: expected MODEL=N[,N], N a version's number, such as movies=7"
        )
    return numbers


def _numbers(text: str) -> tuple[int, ...] | None:
    """The versions of "2,1"; None: it is another text."""
    numbers = text.split(",")
    if not all(
        number.isascii() and number.isdecimal() and len(number) <= len(str(MOST_VERSION)) for number in numbers
    ):
        return None
    found = tuple(dict.fromkeys(map(int, numbers)))
    return found if all(0 < each <= MOST_VERSION for each in found) else None


def _follow(
    *,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Serve the versions that models' release files say (`tbe-export release`), also when these change.",
        ),
    ] = False,
    unload_after_s: Annotated[
        float | None,
        typer.Option(
            help=f"With --follow: how long an older version serves on, for requests that name it. Default: "
            f"{_UNLOAD_AFTER_S:g}."
        ),
    ] = None,
) -> float | None:
    if not follow and unload_after_s is not None:
        raise ConfigurationError("--unload-after-s: expected --follow with it")
    if unload_after_s is not None and not 0 <= unload_after_s <= _MOST_S:
        raise ConfigurationError(f"--unload-after-s: expected 0 to {_MOST_S}, got {unload_after_s:g}")
    return (_UNLOAD_AFTER_S if unload_after_s is None else unload_after_s) if follow else None


class TrustedWeights(enum.Enum):
    """Whether weights files are copied into the private folder, or stay in the repository."""

    COPY = "copy"
    IN_PLACE = "in-place"


def _trust(
    *,
    trusted_keys: Annotated[
        Path | None,
        typer.Option(
            help="PEM file with Ed25519 public keys. Serve only bundles that `tbe-export` signed with one of them."
        ),
    ] = None,
    private_folder: Annotated[
        Path | None,
        typer.Option(
            help="With --trusted-keys: where served bundles are copied to. Default: the folder for temporary files."
        ),
    ] = None,
    trusted_weights: Annotated[
        TrustedWeights,
        typer.Option(
            help="Whether weights files are copied, too. in-place trusts all who can write to them after the check."
        ),
    ] = TrustedWeights.COPY,
    min_version: Annotated[
        list[str] | None,
        typer.Option(metavar="[MODEL=]N", help="With --trusted-keys: refuse versions older than N, signed or not."),
    ] = None,
) -> Trust | None:
    if trusted_keys is None:
        if private_folder is not None or min_version or trusted_weights is not TrustedWeights.COPY:
            raise ConfigurationError(
                "--private-folder, --trusted-weights, --min-version: expected --trusted-keys with them"
            )
        return None
    return Trust(
        keys=trusted_keys,
        folder=private_folder,
        weights_in_place=trusted_weights is TrustedWeights.IN_PLACE,
        min_versions={model: _least_version(model, text) for model, text in by_name(min_version).items()},
    )


def _least_version(model: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ConfigurationError(f"--min-version {as_given(model, text)}: expected [MODEL=]N, N a version's number")
    return int(text)


PinsOf = Callable[[], Pins]
FollowOf = Callable[[], float | None]
TrustOf = Callable[[], Trust | None]
# A command calls `pins()` for the versions that the options say. It calls `follow()` for the seconds that an older
# version serves on after a release changed. None: releases are not followed. It calls `trust()` for the signatures to
# trust. None: unsigned bundles are served too.
takes_pins = shared_options("pins", _pins)
takes_follow = shared_options("follow", _follow)
takes_trust = shared_options("trust", _trust)
