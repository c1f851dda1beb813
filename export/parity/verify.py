"""Check that a published bundle is what was exported: its files, its answers and, given the weights, its rows."""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from export.errors import ModelError
from export.ids.file import build_maps
from export.manifest import with_position_weights
from export.parity.answers import Answers, answer_probe
from export.parity.copies import differing_copies
from export.parity.recorded import recorded_parity
from export.rows.tally import Tally
from export.trained.checkpoint import Checkpoint, blocks
from export.trained.tables import TrainedTable
from serving.bundle.manifest import Agreement, Parity
from serving.bundle.opening import Bundle, newest, open_bundle, verify_digests
from serving.bundle.signature import TrustedKeys
from serving.files.strict import as_text
from serving.model.config_file import CONFIG, read_config, settings_of
from serving.ranks.program import load_program
from serving.reference import read_rows


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found.

    Attributes:
        bundle: the bundle.
        parity: of each table.
        failures: a line for each. There are none in a good bundle.
        measured: whether `Parity.quantized` was measured now. Else it is what the export recorded.
        absent: bundles of a router's hosts that are not in its repository. Where there are some, no answers were
            compared, and `parity` is what the export recorded.
    """

    bundle: Bundle
    parity: tuple[Parity, ...]
    failures: tuple[str, ...]
    measured: bool
    absent: tuple[Path, ...] = ()


def verify_bundle(
    path: Path,
    trained: tuple[TrainedTable, ...] | None = None,
    weights: Checkpoint | None = None,
    trusted: TrustedKeys | None = None,
) -> Verification:
    """Read every byte of a bundle, compare its copies, and answer a probe: by numpy, uncompiled, compiled, reloaded.

    Args:
        path: the bundle, <model>/<version>.
        trained: the tables that it was exported from. With `weights`, every stored row is compared with them.
        weights: the checkpoint with the rows of `trained`.
        trusted: one of these keys must have signed the bundle. None: anybody may have made it.

    Raises:
        BundleError: none of the keys signed it, a file differs from its digest, the bundle cannot be opened, or its
            manifest lacks the parity of a table.
        ModelError: the bundle holds other tables than `trained`.
        CheckpointError: `weights` does not hold the tables.
        ParityError: a fresh process cannot answer from it.
    """
    bundle = open_bundle(path, trusted)
    verify_digests(bundle)
    return compare(bundle, answer_probe(path, bundle.manifest, load_program(bundle)), trained, weights)


def compare(
    bundle: Bundle,
    answers: Answers,
    trained: tuple[TrainedTable, ...] | None,
    weights: Checkpoint | None,
) -> Verification:
    """What `answers` to a probe, and the rows of a bundle, say of it; arguments as `verify_bundle`.

    Raises:
        BundleError: the manifest lacks the parity of a table.
        ModelError, CheckpointError: as `verify_bundle`.
    """
    manifest = bundle.manifest
    recorded = recorded_parity(bundle)
    quantized = {name: parity.quantized for name, parity in recorded.items()}
    if trained is not None and weights is not None:
        quantized = _compare_rows(bundle, trained, weights)
    limits = {name: parity.limit for name, parity in recorded.items()}
    failures = [*answers.refusals(manifest), *differing_copies(bundle.path, manifest)]
    failures += [
        f"table {name!r}: row {agreement.worst_row} differs by {agreement.largest:.3g} from the weights given, "
        f"expected at most {limits[name]:.3g}: is this what it was exported from?"
        for name, agreement in quantized.items()
        if not agreement.largest <= limits[name]
    ]
    if trained is not None and weights is not None:
        expected = with_position_weights(manifest, trained, weights)
        failures += [
            f"feature {feature.name!r}: its position weights are not those given: is this what it was exported from?"
            for feature, given in zip(manifest.features, expected.features, strict=True)
            if feature != given
        ]
        failures += [
            f"table {name!r}: its map of ids is not the one given: is this what it was exported from?"
            for name in build_maps(trained, weights).differing(bundle.path, manifest)
        ]
    parity = tuple(
        answers.parity(manifest, table, quantized[table.name], limits[table.name]) for table in manifest.tables
    )
    return Verification(bundle, parity, tuple(failures), trained is not None)


def bundle_of(path: Path, trusted: TrustedKeys | None = None) -> Path:
    """The bundle that `path` names.

    Args:
        path: a bundle, <model>/<version>, or the folder of a model. The model's settings then say which version.
        trusted: one of these keys must have signed the settings. None: anybody may have written them.

    Raises:
        BundleError: `trusted` did not sign the settings, or there is no version.
        ConfigurationError: the settings cannot be read.
    """
    if not os.path.lexists(path / CONFIG):
        return path
    return path / str(settings_of(read_config(path, trusted)).version or newest(path))


def _compare_rows(bundle: Bundle, trained: tuple[TrainedTable, ...], weights: Checkpoint) -> dict[str, Agreement]:
    """How far the stored rows of each table are from the float ones, by table."""
    manifest = bundle.manifest
    found = {table.name: (table.rows, table.dim) for table in trained}
    expected = {table.name: (table.rows, table.dim) for table in manifest.tables}
    if found != expected:
        raise ModelError(f"{bundle.path}: expected a model with tables {expected}, got {found}")
    by_name = {table.name: table for table in trained}
    pieces = manifest.plan.pieces_by_table
    agreements = {}
    for stored in manifest.tables:
        tally = Tally()
        table = by_name[stored.name]
        weights.check(table)
        for start, rows in blocks(table, weights):
            ids = np.arange(start, start + len(rows))
            numbers, _ = read_rows(bundle.path, manifest, pieces[stored.name], stored, ids)
            tally.add(start, rows.to(torch.float64).numpy(), numbers)
        agreements[stored.name] = tally.agreement
    return agreements


def as_json(verification: Verification) -> str:
    """A verification as JSON: {bundle, ok, failures, quantized_measured, tables: [parity of each]}."""
    seen = {
        "bundle": as_text(verification.bundle.path),
        "ok": not verification.failures,
        "failures": verification.failures,
        "quantized_measured": verification.measured,
        "tables": verification.parity,
    }
    return msgspec.json.format(msgspec.json.encode(seen), indent=1).decode()
