"""The options that say what a server serves: versions, releases, and which signatures to trust."""

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from serving.bundle.plan import MOST_VERSION
from serving.errors import ConfigurationError
from serving.model.config_file import Pins
from serving.server.private_folder import Trust
from serving.terminal.options import EVERY, as_given, by_name, shared_options

# The longest deadline that lookups should have: docs/clients.md#deadlines-and-retries.
_UNLOAD_AFTER_S = 10.0
_MOST_S = 1_000_000


def _pins(
    *,
    serve: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL=N[,N]",
            help="Serve exactly these versions of a model, and ignore config.pbtxt. The newest of them answers "
            "requests without a version. May be repeated.",
        ),
    ] = None,
) -> Pins:
    return {model: _versions(model, text) for model, text in by_name(serve).items()}


def _versions(model: str, text: str) -> tuple[int, ...]:
    numbers = version_numbers(text)
    if model == EVERY or numbers is None:
        raise ConfigurationError(
            f"--serve {as_given(model, text)}: expected MODEL=N[,N] with version numbers, such as movies=7"
        )
    return numbers


def version_numbers(text: str) -> tuple[int, ...] | None:
    """The versions in a text such as "2,1", or None if it is malformed."""
    numbers = text.split(",")
    if not all(
        number.isascii() and number.isdecimal() and len(number) <= len(str(MOST_VERSION)) for number in numbers
    ):
        return None
    versions = tuple(dict.fromkeys(map(int, numbers)))
    return versions if all(0 < version <= MOST_VERSION for version in versions) else None


def _follow(
    *,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Serve the versions in the models' release files (`tbe-export release`), and follow their changes.",
        ),
    ] = False,
    unload_after_s: Annotated[
        float | None,
        typer.Option(
            help="With --follow: seconds for which a replaced version still answers requests that name it. Default: "
            f"{_UNLOAD_AFTER_S:g}."
        ),
    ] = None,
) -> float | None:
    if not follow and unload_after_s is not None:
        raise ConfigurationError("--unload-after-s: requires --follow")
    if unload_after_s is not None and not 0 <= unload_after_s <= _MOST_S:
        raise ConfigurationError(f"--unload-after-s: expected 0 to {_MOST_S}, got {unload_after_s:g}")
    return (_UNLOAD_AFTER_S if unload_after_s is None else unload_after_s) if follow else None


class TrustedWeights(enum.Enum):
    """Whether weights files are copied into the private folder, or used in the repository."""

    COPY = "copy"
    IN_PLACE = "in-place"


def _trust(
    *,
    trusted_keys: Annotated[
        Path | None,
        typer.Option(help="PEM file with Ed25519 public keys. Serve only bundles signed with one of these keys."),
    ] = None,
    private_folder: Annotated[
        Path | None,
        typer.Option(
            help="With --trusted-keys: folder for copies of served bundles. Default: the system's temporary folder."
        ),
    ] = None,
    trusted_weights: Annotated[
        TrustedWeights,
        typer.Option(
            help="With --trusted-keys: copy weights files as well, or use them in place. in-place trusts every user "
            "who can change them after the check."
        ),
    ] = TrustedWeights.COPY,
    min_version: Annotated[
        list[str] | None,
        typer.Option(metavar="[MODEL=]N", help="With --trusted-keys: refuse versions older than N, even signed."),
    ] = None,
) -> Trust | None:
    if trusted_keys is None:
        if private_folder is not None or min_version or trusted_weights is not TrustedWeights.COPY:
            raise ConfigurationError("--private-folder, --trusted-weights, --min-version: require --trusted-keys")
        return None
    return Trust(
        keys=trusted_keys,
        folder=private_folder,
        weights_in_place=trusted_weights is TrustedWeights.IN_PLACE,
        min_versions={model: _least_version(model, text) for model, text in by_name(min_version).items()},
    )


def _least_version(model: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ConfigurationError(f"--min-version {as_given(model, text)}: expected [MODEL=]N with a version number")
    return int(text)


PinsOf = Callable[[], Pins]
FollowOf = Callable[[], float | None]
TrustOf = Callable[[], Trust | None]
# A command calls `pins()` for the versions to serve, and `follow()` for the seconds for which a replaced version is
# still served (None without --follow). It calls `trust()` for the trusted signatures (None: unsigned bundles are
# served as well).
takes_pins = shared_options("pins", _pins)
takes_follow = shared_options("follow", _follow)
takes_trust = shared_options("trust", _trust)
