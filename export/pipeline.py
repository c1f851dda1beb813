"""From a trained module to a published bundle: every step in its order."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import nn

from export.config import ExportConfig
from export.errors import PublishError
from export.manifest import describe
from export.parity.answers import Answers, answer_probe
from export.parity.limits import check_parity
from export.parity.overflow import overflow_notes
from export.parity.trained_answers import compare_trained, trained_answers
from export.program.compile import compile_program, save_program
from export.progress import Progress, float_bytes
from export.publish.draft import draft
from export.rows.store_blocks import store_rows
from export.rows.table_error import TableError
from export.trained.checkpoint import Checkpoint, WeightSource, open_weights
from export.trained.tables import Trained, TrainedTable, collect_tables
from serving.bundle.digests import digest_file
from serving.bundle.manifest import MANIFEST, MODEL, PROGRAM, Manifest, Parity, write_manifest
from serving.bundle.opening import open_bundle
from serving.bundle.signature import read_signing_key
from serving.bundle.weights import weights_paths
from serving.errors import BundleError
from serving.model.template import model_py


def export_model(
    module: nn.Module,
    repository: Path | str,
    name: str,
    config: ExportConfig | None = None,
    version: int | None = None,
    *,
    checkpoint: WeightSource = None,
    signing_key: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Quantize, plan, compile and check the embedding tables of `module`, then publish them as a bundle.

    After an error nothing is published, and no earlier version has changed.

    Args:
        module: holds one or more EmbeddingBagCollections. Every module around them must hand on its ids unchanged.
            What it does with pooled embeddings is left out of the bundle (`Manifest.left_out`).
        repository: Triton's model repository; made if it is missing.
        name: the model's name in the repository.
        config: dtypes, id policies and limits by table; INT8 and `error` for all where None.
        version: the version's number; the next free one where None.
        checkpoint: the weights: a file, a folder, or a Checkpoint of tables that you read yourself. None takes those
            in `module` itself.
        signing_key: a PEM file with an Ed25519 private key. It signs the bundle, and the settings of a new model
            (`serving.bundle.signature`). None signs nothing.
        progress: called as rows are stored.

    Returns:
        The bundle's path, `<repository>/<name>/<version>`.

    Raises:
        ModelError: the module's tables cannot be served, or a module around them changes ids or weights.
        ConfigurationError: a setting, or the signing key, cannot be used.
        CheckpointError: the checkpoint does not hold the tables.
        QuantizeError: a row does not fit its dtype.
        PlanError: the tables do not fit the ranks.
        ParityError: a table's answers move further than its limit, or the module itself answers otherwise.
        PublishError: the repository cannot take the bundle.
    """
    config = config or ExportConfig()
    key = None if signing_key is None else read_signing_key(signing_key)
    trained = collect_tables(module)
    weights = open_weights(module, trained.tables, checkpoint)
    for table in trained.tables:
        weights.check(table)
    manifest = describe(trained.tables, config, lambda: weights, progress)
    manifest = msgspec.structs.replace(manifest, left_out=trained.found.left_out)
    program = compile_program(manifest)
    with draft(Path(repository), name, version, manifest, config.serving, key) as new:
        errors = _store_rows(new.path, trained.tables, manifest, weights, progress)
        total = float_bytes(*trained.tables)
        progress(Progress("parity", total, total))
        with new.syncing():
            manifest = _write_program(new.path, manifest, program)
            answers = answer_probe(new.path, manifest, program)
            # With a checkpoint, the weights are not in the module: it cannot answer.
            runnable = trained if checkpoint is None else None
            parity = _check_parity(manifest, errors, config, answers, runnable)
            notes = tuple(overflow_notes(manifest, errors, config.sharding))
            write_manifest(new.path, msgspec.structs.replace(manifest, parity=parity, notes=notes))
        _read_back(new.path)
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
    return describe(trained, config, lambda: open_weights(module, trained, checkpoint), progress)


def _store_rows(
    directory: Path,
    trained: Sequence[TrainedTable],
    manifest: Manifest,
    weights: Checkpoint,
    progress: Callable[[Progress], None],
) -> dict[str, TableError]:
    """Write the ranks' weights files.

    Returns:
        How far the rows of each table moved.
    """
    errors: dict[str, TableError] = {}
    total = float_bytes(*trained)
    done = 0
    files = weights_paths(directory, manifest)
    for name, error, elements in store_rows(files, trained, manifest, weights):
        errors[name] = error
        done += 4 * elements
        progress(Progress(name, done, total))
    return errors


def _write_program(directory: Path, manifest: Manifest, program: torch.jit.ScriptModule) -> Manifest:
    """Complete the draft: what Triton starts, the program, and a manifest with the digests of all files.

    Returns:
        That manifest.
    """
    (directory / MODEL).write_text(model_py())
    save_program(program, directory / PROGRAM)
    files = {path.name: digest_file(path) for path in sorted(directory.iterdir()) if path.name != MANIFEST}
    manifest = msgspec.structs.replace(manifest, files=files)
    write_manifest(directory, manifest)
    return manifest


def _check_parity(
    manifest: Manifest,
    errors: dict[str, TableError],
    config: ExportConfig,
    answers: Answers,
    runnable: Trained | None,
) -> tuple[Parity, ...]:
    """Compare all answers to the probe; also those of the trained module, where it is `runnable`."""
    limits = {table.name: config.max_error_of(table.name) for table in manifest.tables}
    parity = check_parity(manifest, errors, limits, answers)
    own = {} if runnable is None else trained_answers(runnable, manifest, answers.probe)
    agreements = compare_trained(own, manifest, answers, errors)
    return tuple(msgspec.structs.replace(each, trained=agreements.get(each.table)) for each in parity)


def _read_back(directory: Path) -> None:
    """Open the draft as serving does, so that no bundle is published that serving would refuse."""
    try:
        open_bundle(directory)
    except BundleError as error:
        raise PublishError(f"the draft of this version could not be served: {error}") from error
