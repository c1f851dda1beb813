"""The whole way from a trained module to a published bundle."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from export.checkpoint import Checkpoint, WeightSource, open_weights
from export.choose import smallest_dtype
from export.config import ExportConfig
from export.errors import ConfigError
from export.model_config import model_py
from export.parity import TableError, answer_probe, check_parity
from export.planner import plan_shards
from export.program import compile_program, save_program
from export.publish import draft
from export.quantize import check_dim
from export.store import store_rows
from export.tables import TrainedTable, collect_tables
from serving.bundle import (
    FORMAT_VERSION,
    MANIFEST,
    MODEL,
    PROGRAM,
    Feature,
    Manifest,
    Table,
    WeightDtype,
    write_manifest,
)
from serving.digests import digest_file
from serving.errors import ConfigurationError
from serving.pins import installed
from serving.signature import read_signing_key, sign


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
        module: holds one or more EmbeddingBagCollections; what else it holds does not matter.
        repository: Triton's model repository; made if it is missing.
        name: the model's name in it.
        config: dtypes, id policies and limits by table; INT8 and `error` where None.
        version: the version's number; the next free one where None.
        checkpoint: where the weights are: a file, a folder, or a Checkpoint of tables that you read yourself; in
            `module` itself where None.
        signing_key: a PEM file with the Ed25519 private key that signs the bundle (`serving.signature`); it is not
            signed where None.
        progress: called as rows are stored.

    Returns:
        The bundle's path, `<repository>/<name>/<version>`.

    Raises:
        ModelError: the module's tables cannot be served.
        ConfigError: a setting, or the signing key, cannot be used.
        CheckpointError: the checkpoint does not hold them.
        QuantizeError: a row does not fit its dtype.
        PlanError: the tables do not fit the ranks.
        ParityError: a table's answers moved further than its limit.
        PublishError: the repository cannot take the bundle.

    Whatever is raised, nothing was published and no earlier version was touched.
    """
    config = config or ExportConfig()
    key = None if signing_key is None else _signing_key(signing_key)
    trained = collect_tables(module)
    weights = open_weights(module, trained, checkpoint)
    for table in trained:
        weights.check(table)
    manifest = describe(trained, config, lambda: weights, progress)
    program = compile_program(manifest)
    with draft(Path(repository), name, version, manifest, config.serving) as new:
        errors = _store(new.path, trained, manifest, weights, progress)
        progress(Progress("parity", *[_float_bytes(*trained)] * 2))
        with new.syncing():
            _check_parity(new.path, manifest, program, errors, config)
            if key is not None:
                sign(new.path / MANIFEST, key)
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
    trained = collect_tables(module)
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
    features = tuple(Feature(name=name, table=table.name) for table in trained for name in table.features)
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
) -> None:
    """Write the rest of the draft, answer a probe at each step, and record how they agree."""
    (directory / MODEL).write_text(model_py())
    save_program(program, directory / PROGRAM)
    files = {path.name: digest_file(path) for path in sorted(directory.iterdir()) if path.name != MANIFEST}
    manifest = msgspec.structs.replace(manifest, files=files)
    write_manifest(directory, manifest)

    limits = {table.name: config.max_error_of(table.name) for table in manifest.tables}
    parity = check_parity(manifest, errors, limits, answer_probe(directory, manifest, program))
    write_manifest(directory, msgspec.structs.replace(manifest, parity=parity))


def _signing_key(path: Path) -> Ed25519PrivateKey:
    try:
        return read_signing_key(path)
    except ConfigurationError as error:
        raise ConfigError(str(error)) from error


def _float_bytes(*tables: TrainedTable) -> int:
    return sum(4 * table.rows * table.dim for table in tables)
