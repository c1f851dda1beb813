"""From a trained module to a published bundle: every step in its order."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from torch import nn

from export.config import ExportConfig
from export.hosts.export import HostsExport
from export.manifest import describe
from export.parity.answers import answer_probe
from export.parity.fresh_process import FreshProcess
from export.parity.overflow import overflow_notes
from export.prepare import prepare
from export.program.compile import compile_program
from export.progress import Progress, float_bytes
from export.publish.draft import draft
from export.scores.labelled import measured
from export.steps import limits_of, parity_of, read_back, scores_of, store, write_program
from export.trained.checkpoint import WeightSource, open_weights
from export.trained.tables import collect_tables
from serving.bundle.manifest import Manifest, write_manifest
from serving.bundle.weights import weights_paths


def export_model(
    module: nn.Module,
    repository: Path | str,
    name: str,
    config: ExportConfig | None = None,
    version: int | None = None,
    *,
    checkpoint: WeightSource = None,
    dense: nn.Module | None = None,
    signing_key: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Quantize, plan, compile and check the embedding tables of `module`, then publish them as a bundle.

    After an error nothing is published, and no earlier version has changed.

    Args:
        module: holds one or more EmbeddingBagCollections or EmbeddingCollections, perhaps behind position weights or
            managed collision modules. Every module around them must hand on its ids unchanged.
            What it does with pooled embeddings is left out of the bundle (`Manifest.left_out`), unless
            `config.scores` is set.
        repository: Triton's model repository; made if it is missing.
        name: the model's name in the repository.
        config: dtypes, id policies and limits by table; INT8 and `error` for all where None.
        version: the version's number; the next free one where None.
        checkpoint: the weights: a file, a folder, or a Checkpoint of tables that you read yourself. None takes those
            in `module` itself.
        dense: with `config.scores`, takes the place of what follows the collections, where that cannot be followed.
            Its forward takes the pooled embeddings by feature, `dict[str, Tensor]` [B, dim] each, and dense inputs
            [B, width] by name, and answers scores [B, …]. TorchScript compiles it with its own weights. Nothing
            compares its scores with those of `module`.
        signing_key: a PEM file with an Ed25519 private key. It signs the bundle, and the settings of a new model
            (`serving.bundle.signature`). None signs nothing.
        progress: called as rows are stored.

    Returns:
        The bundle's path, `<repository>/<name>/<version>`.

    Raises:
        ModelError: the module's tables cannot be served, or a module around them changes ids or weights; what
            follows the collections cannot be followed or compiled.
        ConfigurationError: a setting, or the signing key, cannot be used.
        CheckpointError: the checkpoint does not hold the tables.
        QuantizeError: a row does not fit its dtype.
        PlanError: the tables do not fit the ranks.
        ParityError: a table's answers move further than its limit, or the module itself answers otherwise.
        PublishError: the repository cannot take the bundle.
    """
    prepared = prepare(module, config, checkpoint, signing_key, progress, dense)
    if prepared.config.sharding.hosts_as_models:
        return HostsExport(prepared, Path(repository), name).publish(version)
    config, trained, manifest = prepared.config, prepared.trained.tables, prepared.manifest
    program = compile_program(manifest)
    new_draft = draft(Path(repository), name, version, manifest, config.serving, prepared.signing_key)
    with FreshProcess() as fresh, new_draft as new:
        prepared.maps.write(new.path)
        weights = weights_paths(new.path, manifest)
        errors, digests = store(weights, trained, manifest, prepared.weights, progress)
        known = {path.name: digests[rank] for rank, path in weights.items()}
        progress(Progress("parity", total := float_bytes(*trained), total))
        with new.syncing():
            manifest = write_program(new.path, manifest, program, known, prepared.scored)
            answers = answer_probe(new.path, manifest, program, fresh)
            parity = parity_of(manifest, errors, limits_of(manifest, config), answers, prepared.runnable)
            notes = tuple(overflow_notes(manifest, errors, config.sharding))
            part = scores_of(prepared.scored, answers)
            manifest = msgspec.structs.replace(manifest, parity=parity, notes=notes, dense_part=part)
            write_manifest(new.path, manifest)
            if prepared.scored is not None and prepared.labelled:
                part = measured(new.path, prepared.scored, prepared.labelled)
                write_manifest(new.path, msgspec.structs.replace(manifest, dense_part=part))
        read_back(new.path)
        return new.publish()


def plan_model(
    module: nn.Module,
    config: ExportConfig,
    *,
    checkpoint: WeightSource = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """Describe what `export_model` would write: dtypes, plan and byte offsets.

    Rows are read only where `max_error` leaves a dtype to be chosen.

    Raises:
        ModelError, ConfigurationError, CheckpointError, QuantizeError, PlanError: as `export_model`.
    """
    trained = collect_tables(module).tables
    if checkpoint is not None:  # it has to hold the tables, even where the plan needs no row
        weights = open_weights(module, trained, checkpoint)
        for table in trained:
            weights.check(table)
    return describe(trained, config, lambda: open_weights(module, trained, checkpoint), progress)
