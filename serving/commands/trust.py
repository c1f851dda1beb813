"""What a server serves where keys are trusted, as options."""

import enum
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from serving.errors import ConfigurationError
from serving.options import shared_options
from serving.server.private import Trust


class Weights(enum.Enum):
    """Whether weights are copied into the private folder."""

    COPY = "copy"
    IN_PLACE = "in-place"


def _trust(
    *,
    trusted_keys: Annotated[
        Path | None,
        typer.Option(help="PEM file with Ed25519 public keys: serve only what `tbe-export --signing-key` signed."),
    ] = None,
    private_folder: Annotated[
        Path | None,
        typer.Option(
            help="Where the copy that is served with --trusted-keys is made; else in the folder for temporary files."
        ),
    ] = None,
    trusted_weights: Annotated[
        Weights, typer.Option(help="Whether weights are copied too; in-place trusts who writes them after the check.")
    ] = Weights.COPY,
    min_version: Annotated[
        list[str] | None,
        typer.Option(metavar="[MODEL=]N", help="With --trusted-keys: refuse older versions, though they are signed."),
    ] = None,
) -> Trust | None:
    if trusted_keys is None:
        if private_folder is not None or min_version or trusted_weights is not Weights.COPY:
            raise ConfigurationError(
                "--private-folder, --trusted-weights, --min-version: expected --trusted-keys with them"
            )
        return None
    return Trust(
        keys=trusted_keys,
        folder=private_folder,
        weights_in_place=trusted_weights is Weights.IN_PLACE,
        min_versions=_min_versions(min_version or ()),
    )


def _min_versions(given: Sequence[str]) -> dict[str, int]:
    floors = {}
    for each in given:
        model, _, text = each.rpartition("=")
        if not (text.isascii() and text.isdecimal()):
            raise ConfigurationError(f"--min-version {each}: expected [MODEL=]N, N a version's number")
        floors[model] = int(text)
    return floors


TrustOf = Callable[[], Trust | None]
# A command gets `trust()`: whose signatures count, or None where no option asks for any.
takes_trust = shared_options("trust", _trust)
