"""Check that a published bundle is what was exported: its files, its answers and, given the weights, its rows."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from export.errors import ModelError
from export.ids.file import build_maps
from export.manifest import with_position_weights
from export.parity.answers import Answers
from export.parity.copies import differing_copies
from export.parity.recorded import recorded_parity
from export.rows.tally import Tally
from export.trained.checkpoint import Checkpoint, blocks, open_weights
from export.trained.tables import Trained, TrainedTable
from serving.bundle.manifest import Agreement, Parity
from serving.bundle.opening import Bundle
from serving.bundle.scores import DensePart
from serving.files.strict import as_text
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
            compared, and `parity` and `dense_part` are what the export recorded.
        dense_part: with its parity, measured now as far as it can be; None: the bundle has no scores.
    """

    bundle: Bundle
    parity: tuple[Parity, ...]
    failures: tuple[str, ...]
    measured: bool
    absent: tuple[Path, ...] = ()
    dense_part: DensePart | None = None


def compare(
    bundle: Bundle,
    answers: Answers,
    trained: Trained | None,
    checkpoint: Checkpoint | None,
) -> Verification:
    """What `answers` to a probe, and the rows of a bundle, say of it.

    Args:
        bundle: its digests agree.
        answers: by numpy, uncompiled, compiled, and reloaded.
        trained: what it was exported from. Every stored row is compared with its float one.
        checkpoint: has the rows of `trained`; None: the module itself has them.

    Raises:
        BundleError: the manifest lacks the parity of a table.
        ModelError: the bundle holds other tables than `trained`.
        CheckpointError: the rows are not all there.
    """
    manifest = bundle.manifest
    recorded = recorded_parity(bundle)
    quantized = {name: parity.quantized for name, parity in recorded.items()}
    weights = None if trained is None else open_weights(trained.module, trained.tables, checkpoint)
    if trained is not None and weights is not None:
        quantized = _compare_rows(bundle, trained.tables, weights)
    limits = {name: parity.limit for name, parity in recorded.items()}
    failures = [*answers.refusals(manifest), *differing_copies(bundle.path, manifest)]
    failures += [
        f"table {name!r}: row {agreement.worst_row} differs by {agreement.largest:.3g} from the weights given, "
        f"expected at most {limits[name]:.3g}: is this what it was exported from?"
        for name, agreement in quantized.items()
        if not agreement.largest <= limits[name]
    ]
    if trained is not None and weights is not None:
        expected = with_position_weights(manifest, trained.tables, weights)
        failures += [
            f"feature {feature.name!r}: its position weights are not those given: is this what it was exported from?"
            for feature, given in zip(manifest.features, expected.features, strict=True)
            if feature != given
        ]
        failures += [
            f"table {name!r}: its map of ids is not the one given: is this what it was exported from?"
            for name in build_maps(trained.tables, weights).differing(bundle.path, manifest)
        ]
    parity = tuple(
        answers.parity(manifest, table, quantized[table.name], limits[table.name]) for table in manifest.tables
    )
    return Verification(bundle, parity, tuple(failures), trained is not None, dense_part=manifest.dense_part)


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
    """A verification as JSON: {bundle, ok, failures, quantized_measured, tables: [parity of each], dense_part}."""
    seen = {
        "bundle": as_text(verification.bundle.path),
        "ok": not verification.failures,
        "failures": verification.failures,
        "quantized_measured": verification.measured,
        "tables": verification.parity,
        "dense_part": verification.dense_part,
    }
    return msgspec.json.format(msgspec.json.encode(seen), indent=1).decode()
