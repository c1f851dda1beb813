"""The options of a server that serves only signed bundles."""

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from serving.errors import ConfigurationError
from serving.server.launch.private import Trust
from serving.terminal.options import as_given, by_name, shared_options


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
        min_versions={model: _version(model, text) for model, text in by_name(min_version).items()},
    )


def _version(model: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ConfigurationError(f"--min-version {as_given(model, text)}: expected [MODEL=]N, N a version's number")
    return int(text)


TrustOf = Callable[[], Trust | None]
# A command calls `trust()` for the signatures to trust. None: unsigned bundles are served too.
takes_trust = shared_options("trust", _trust)
