"""The whole way from a trained module to a published bundle."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from export.checkpoint import Checkpoint, WeightSource, open_weights
from export.choose import smallest_dtype
from export.config import ExportConfig
from export.errors import ConfigError, PublishError
from export.overflow import overflow_notes
from export.parity import TableError, answer_probe, check_parity
from export.planner import plan_shards
from export.program import compile_program, save_program
from export.publish import draft
from export.quantize import check_dim
from export.store import store_rows
from export.tables import TrainedTable, collect_tables
from export.trained_answers import Answer, compare_trained, trained_answers
from serving.bundle import (
    FORMAT_VERSION,
    MANIFEST,
    MODEL,
    PROGRAM,
    Feature,
    Manifest,
    Table,
    WeightDtype,
    open_bundle,
    write_manifest,
)
from serving.digests import digest_file
from serving.errors import BundleError, ConfigurationError
from serving.kjt import Tensors
from serving.pins import installed
from serving.signature import read_signing_key
from serving.template import model_py


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an export is: `done` of `total` bytes of float rows, now on `step`."""

    step: str
    done: int
    total: int


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
    """Quantize, compile and check the embedding tables of `module`, then publish them as a bundle.

    Args:
        module: holds one or more EmbeddingBagCollections. Every module around them has to hand the ids that it is
            given on to them as they are; what it does with their answers is left out (`Manifest.left_out`).
        repository: Triton's model repository; made if it is missing.
        name: the model's name in it.
        config: dtypes, id policies and limits by table; INT8 and `error` where None.
        version: the version's number; the next free one where None.
        checkpoint: where the weights are: a file, a folder, or a Checkpoint of tables that you read yourself; in
            `module` itself where None.
        signing_key: a PEM file with the Ed25519 private key that signs the bundle, and the settings of a new model
            (`serving.signature`); nothing is signed where None.
        progress: called as rows are stored.

    Returns:
        The bundle's path, `<repository>/<name>/<version>`.

    Raises:
        ModelError: the module's tables cannot be served, or something around them changes ids or weights.
        ConfigError: a setting, or the signing key, cannot be used.
        CheckpointError: the checkpoint does not hold them.
        QuantizeError: a row does not fit its dtype.
        PlanError: the tables do not fit the ranks.
        ParityError: a table's answers moved further than its limit, or the module itself answers otherwise.
        PublishError: the repository cannot take the bundle.

    Whatever is raised, nothing was published and no earlier version was touched.
    """
    config = config or ExportConfig()
    key = None if signing_key is None else _signing_key(signing_key)
    trained = collect_tables(module)
    weights = open_weights(module, trained.tables, checkpoint)
    for table in trained.tables:
        weights.check(table)
    manifest = describe(trained.tables, config, lambda: weights, progress)
    manifest = msgspec.structs.replace(manifest, left_out=trained.found.left_out)
    program = compile_program(manifest)
    with draft(Path(repository), name, version, manifest, config.serving, key) as new:
        errors = _store(new.path, trained.tables, manifest, weights, progress)
        progress(Progress("parity", *[_float_bytes(*trained.tables)] * 2))
        with new.syncing():
            # A checkpoint's weights are not in the module, which cannot be run then.
            run = partial(trained_answers, trained) if checkpoint is None else _cannot_run
            _check_parity(new.path, manifest, program, errors, config, run)
        _read_back(new.path)
        return new.publish()


def plan_model(
    module: nn.Module,
    config: ExportConfig,
    *,
    checkpoint: WeightSource = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """What `export_model` would write, as far as it is known before: dtypes, plan, byte offsets.

    Weights are read only where `max_error` leaves a dtype to be chosen.

    Raises:
        ModelError, ConfigError, CheckpointError, QuantizeError, PlanError: as `export_model`.
    """
    trained = collect_tables(module).tables
    return describe(trained, config, lambda: open_weights(module, trained, checkpoint), progress)


def describe(
    trained: Sequence[TrainedTable],
    config: ExportConfig,
    weights: Callable[[], Checkpoint],
    progress: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """The manifest of a bundle of `trained`, as far as it is known before anything is stored.

    Raises:
        ConfigError, CheckpointError, QuantizeError, PlanError: as `export_model`.
    """
    config.check_patterns(table.name for table in trained)
    dtypes = _dtypes(trained, config, weights, progress)
    tables = tuple(
        Table(
            name=table.name,
            rows=table.rows,
            dim=table.dim,
            pooling=table.pooling,
            weighted=table.weighted,
            dtype=dtypes[table.name],
            id_policy=config.id_policy_of(table.name),
        )
        for table in trained
    )
    for table in tables:
        if table.policy_error is not None:
            raise ConfigError(f"table {table.name!r}: {table.policy_error}")
    features = tuple(_features(trained))
    return Manifest(
        format_version=FORMAT_VERSION,
        features=features,
        tables=tables,
        output_dtype=config.output_dtype,
        plan=plan_shards(tables, features, config.sharding),
        parity=(),
        exported_at=time.time(),
        versions=installed(),
        files={},
    )


def _features(trained: Sequence[TrainedTable]) -> Iterator[Feature]:
    """In the order of their keys, so that those of one key are side by side."""
    named = [
        Feature(name=name, table=table.name, shared_key=None if key == name else key)
        for table in trained
        for key, name in zip(table.keys, table.features, strict=True)
    ]
    keys = list(dict.fromkeys(feature.key for feature in named))
    yield from sorted(named, key=lambda feature: keys.index(feature.key))


def _dtypes(
    trained: Sequence[TrainedTable],
    config: ExportConfig,
    weights: Callable[[], Checkpoint],
    progress: Callable[[Progress], None],
) -> dict[str, WeightDtype]:
    """Each table's dtype as asked; the smallest within its limit where only a limit was asked."""
    limits = {t.name: config.max_error_of(t.name) for t in trained if config.dtype_of(t.name) is None}
    total = _float_bytes(*(table for table in trained if limits.get(table.name) is not None))
    done = 0

    def count(elements: int) -> None:
        nonlocal done
        done += 4 * elements
        progress(Progress("choosing dtypes", done, total))

    dtypes = {}
    for table in trained:
        dtype = config.dtype_of(table.name) or WeightDtype.INT8
        if (limit := limits.get(table.name)) is not None:
            dtype = smallest_dtype(table, weights(), limit, count)
        check_dim(table.name, table.dim, dtype)
        dtypes[table.name] = dtype
    return dtypes


def _store(
    directory: Path,
    trained: Sequence[TrainedTable],
    manifest: Manifest,
    weights: Checkpoint,
    progress: Callable[[Progress], None],
) -> dict[str, TableError]:
    """Write the ranks' files; how far each table's rows moved."""
    errors: dict[str, TableError] = {}
    total = _float_bytes(*trained)
    done = 0
    for name, error, elements in store_rows(directory, trained, manifest, weights):
        errors[name] = error
        done += 4 * elements
        progress(Progress(name, done, total))
    return errors


def _check_parity(
    directory: Path,
    manifest: Manifest,
    program: torch.jit.ScriptModule,
    errors: dict[str, TableError],
    config: ExportConfig,
    run_trained: Callable[[Manifest, Tensors], dict[str, Answer]],
) -> None:
    """Write the rest of the draft, answer a probe at each step, and record how they agree."""
    (directory / MODEL).write_text(model_py())
    save_program(program, directory / PROGRAM)
    files = {path.name: digest_file(path) for path in sorted(directory.iterdir()) if path.name != MANIFEST}
    manifest = msgspec.structs.replace(manifest, files=files)
    write_manifest(directory, manifest)

    limits = {table.name: config.max_error_of(table.name) for table in manifest.tables}
    answers = answer_probe(directory, manifest, program)
    parity = check_parity(manifest, errors, limits, answers)
    trained = compare_trained(run_trained(manifest, answers.probe), manifest, answers, errors)
    parity = tuple(msgspec.structs.replace(each, trained=trained.get(each.table)) for each in parity)
    notes = tuple(overflow_notes(manifest, errors, config.sharding))
    write_manifest(directory, msgspec.structs.replace(manifest, parity=parity, notes=notes))


def _read_back(directory: Path) -> None:
    """Nothing is published that serving would refuse."""
    try:
        open_bundle(directory)
    except BundleError as error:
        raise PublishError(f"the draft of this version could not be served: {error}") from error


def _cannot_run(manifest: Manifest, probe: Tensors) -> dict[str, Answer]:  # noqa: ARG001
    return {}


def _signing_key(path: Path) -> Ed25519PrivateKey:
    try:
        return read_signing_key(path)
    except ConfigurationError as error:
        raise ConfigError(str(error)) from error


def _float_bytes(*tables: TrainedTable) -> int:
    return sum(4 * table.rows * table.dim for table in tables)
