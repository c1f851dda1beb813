"""`tbe-export release`: say which versions of a model are to be served."""

import os
from pathlib import Path
from typing import Annotated

import typer

from export.publish.release import release as write_release
from serving.bundle.release import release_of
from serving.bundle.signature import read_signing_key, signature_of
from serving.terminal.program import out


def release(
    model: Annotated[Path, typer.Argument(help="The model's folder: REPOSITORY/NAME.")],
    versions: Annotated[
        list[int],
        typer.Argument(min=1, max=2**63 - 1, help="What is to be served. The newest answers callers that name none."),
    ],
    signing_key: Annotated[
        Path | None, typer.Option(help="PEM file with the Ed25519 private key that signs the release.")
    ] = None,
) -> None:
    """Have every server that follows the model's releases (`tbe-serve run --follow`) serve these versions.

    To go back, release the older version. Nothing is restarted.
    """
    key = None if signing_key is None else read_signing_key(signing_key)
    written = write_release(model, versions, key)
    path = release_of(model)
    out.print(f"{path}: version {', '.join(map(str, written.versions))}", soft_wrap=True)
    if key is None and os.path.lexists(signature_of(path)):
        out.print(
            "it was signed: where keys are trusted it is refused until it is again, --signing-key", soft_wrap=True
        )
