"""`tbe-export verify`: check that a bundle is as it was exported."""

from pathlib import Path
from typing import Annotated

import typer

from export.commands.module import CheckpointOption, build_module
from export.commands.show import show_scores, show_verification
from export.publish.served import bundle_of
from serving.bundle.signature import TrustedKeys
from serving.errors import ConfigurationError
from serving.pins import check_pins
from serving.terminal.program import complain, out


def verify(
    bundle: Annotated[
        Path, typer.Argument(help="A version: REPOSITORY/NAME/VERSION; or REPOSITORY/NAME, the one it is to serve.")
    ],
    model: Annotated[
        str | None, typer.Option(help="package.module:function of the model, to compare with its float rows.")
    ] = None,
    checkpoint: CheckpointOption = None,
    trusted_keys: Annotated[
        Path | None, typer.Option(help="PEM file with Ed25519 public keys. One of them must have signed the bundle.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read every byte of a bundle and check what it answers, at every step; exits with 1 if anything differs."""
    if checkpoint is not None and model is None:
        raise ConfigurationError("--checkpoint: expected --model too: it says which tables to look for")
    check_pins()
    from export.hosts.verify import verify as verify_any
    from export.parity.verify import as_json
    from export.trained.tables import collect_tables

    trained = None if model is None else collect_tables(build_module(model, meta=checkpoint is not None))
    trusted = None if trusted_keys is None else TrustedKeys.read(trusted_keys)
    verification = verify_any(bundle_of(bundle, trusted), trained, checkpoint, trusted)
    if json_:
        print(as_json(verification))
    else:
        manifest = verification.bundle.manifest
        show_verification(verification)
        show_scores(manifest, verification.dense_part)
        size = sum(file.size_bytes for file in manifest.files.values())
        out.print(f"{len(manifest.files)} files ({size:,} bytes) have their digests", soft_wrap=True)
        for path in verification.absent:
            out.print(f"{path}: not here: its rows were not read, and no answers were compared", soft_wrap=True)
        if not verification.measured:
            out.print("float ↔ quantized: as recorded at export; measure it anew with --model and --checkpoint")
    for failure in verification.failures:
        complain("tbe-export", failure)
    raise typer.Exit(bool(verification.failures))
