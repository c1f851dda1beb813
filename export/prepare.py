"""What every export begins with: the trained tables, their weights, and a manifest that says what will be written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from export.config import ExportConfig
from export.ids.file import BuiltMaps, build_maps
from export.manifest import describe, with_dense_part, with_position_weights
from export.progress import Progress
from export.scores.dense_part import Scored, dense_part
from export.scores.labelled import LabelledRequest, read_labelled
from export.trained.checkpoint import Checkpoint, WeightSource, open_weights
from export.trained.tables import Trained, collect_tables
from serving.bundle.manifest import Manifest
from serving.bundle.signature import read_signing_key
from serving.errors import ConfigurationError
from serving.request.id_maps import known_of_keys


@dataclass(frozen=True, slots=True)
class Prepared:
    """An export before its rows are read.

    Attributes:
        config: what to export.
        trained: the tables.
        weights: the checkpoint with their rows. It has all of them.
        manifest: of the bundle, without parity and files; of a router where `config.sharding` has hosts as models.
        maps: of the ids of its tables.
        runnable: the trained module; None where it cannot be run.
        scored: the dense part; None: embeddings alone are served.
        labelled: requests with labels that its scores are measured on.
        signing_key: signs bundles, and the settings of new models; None signs nothing.
        progress: called as rows are stored.
    """

    config: ExportConfig
    trained: Trained
    weights: Checkpoint
    manifest: Manifest
    maps: BuiltMaps
    runnable: Trained | None
    scored: Scored | None
    labelled: Sequence[LabelledRequest]
    signing_key: Ed25519PrivateKey | None
    progress: Callable[[Progress], None]


def prepare(
    module: nn.Module,
    config: ExportConfig | None,
    checkpoint: WeightSource,
    signing_key: Path | None,
    progress: Callable[[Progress], None],
    dense: nn.Module | None = None,
) -> Prepared:
    """Collect the tables of `module`, and decide how they are stored and where; arguments as `export_model`."""
    config = config or ExportConfig()
    if dense is not None and not config.scores:
        raise ConfigurationError("dense: expected scores beside it: ExportConfig(scores=True)")
    key = None if signing_key is None else read_signing_key(signing_key)
    labelled = [] if config.labelled is None else read_labelled(config.labelled)
    trained = collect_tables(module)
    weights = open_weights(module, trained.tables, checkpoint)
    for table in trained.tables:
        weights.check(table)
    manifest = describe(trained.tables, config, lambda: weights, progress)
    manifest = with_position_weights(manifest, trained.tables, weights)
    maps = build_maps(trained.tables, weights)
    manifest = msgspec.structs.replace(maps.described(manifest), left_out=trained.found.left_out)
    scored = None
    if config.scores:
        given = None if checkpoint is None else weights
        known = known_of_keys(maps.known, manifest)
        scored = dense_part(trained, manifest, known, config.dense_widths, config.dense_dtype, given, dense)
        manifest = with_dense_part(manifest, scored.part)
    # With a checkpoint, the weights are not in the module: it cannot answer.
    runnable = trained if checkpoint is None else None
    return Prepared(config, trained, weights, manifest, maps, runnable, scored, labelled, key, progress)
