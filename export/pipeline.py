"""The whole way from a trained module to a published bundle."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import nn

from export.checkpoint import Checkpoint, module_weights, open_checkpoint
from export.config import ExportConfig
from export.model_config import model_py
from export.parity import TableError, compare
from export.planner import plan_one_rank
from export.probe import make_probe, pool, run_program, run_reloaded
from export.program import compile_program, save_program
from export.publish import draft
from export.quantize import check_dim, quantize
from export.tables import TrainedTable, collect_tables
from serving.bundle import (
    FORMAT_VERSION,
    MANIFEST,
    MODEL,
    PROGRAM,
    Feature,
    Manifest,
    Table,
    digest_file,
    write_manifest,
)
from serving.engine import map_weights
from serving.pins import installed

# Rows travel in blocks of about this many float bytes: few enough to stay in a core's cache on the way.
_BLOCK_BYTES = 1 << 20


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
    checkpoint: Path | str | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Quantize, compile and check the embedding tables of `module`, then publish them as a bundle.

    Args:
        module: holds one or more EmbeddingBagCollections; what else it holds does not matter.
        repository: Triton's model repository; made if it is missing.
        name: the model's name in it.
        config: dtypes, id policies and limits by table; INT8 and `error` where None.
        version: the version's number; the next free one where None.
        checkpoint: where the weights are; in `module` itself where None.
        progress: called as rows are stored.

    Returns:
        The bundle's path, `<repository>/<name>/<version>`.

    Raises:
        ModelError: the module's tables cannot be served.
        CheckpointError: the checkpoint does not hold them.
        QuantizeError: a row does not fit its dtype.
        ParityError: a table's answers moved further than its limit.
        PublishError: the repository cannot take the bundle.

    Whatever is raised, nothing was published and no earlier version was touched.
    """
    config = config or ExportConfig()
    trained = collect_tables(module)
    config.check_patterns(table.name for table in trained)
    weights = open_checkpoint(checkpoint) if checkpoint is not None else module_weights(module, trained)
    for table in trained:
        check_dim(table.name, table.dim, config.dtype_of(table.name))
        weights.check(table)

    manifest = _manifest(trained, config)
    program = compile_program(manifest)
    with draft(Path(repository), name, version, manifest) as new:
        errors = _store_rows(new.path, trained, manifest, weights, progress)
        progress(Progress("parity", *[sum(_float_bytes(table) for table in trained)] * 2))
        _check_parity(new.path, manifest, program, errors, config)
        return new.publish()


def _manifest(trained: Sequence[TrainedTable], config: ExportConfig) -> Manifest:
    tables = tuple(
        Table(
            name=table.name,
            rows=table.rows,
            dim=table.dim,
            pooling=table.pooling,
            weighted=table.weighted,
            dtype=config.dtype_of(table.name),
            id_policy=config.id_policy_of(table.name),
        )
        for table in trained
    )
    return Manifest(
        format_version=FORMAT_VERSION,
        features=tuple(Feature(name=name, table=table.name) for table in trained for name in table.features),
        tables=tables,
        output_dtype=config.output_dtype,
        plan=plan_one_rank(tables),
        parity=(),
        versions=installed(),
        files={},
    )


def _store_rows(
    directory: Path,
    trained: Sequence[TrainedTable],
    manifest: Manifest,
    weights: Checkpoint,
    progress: Callable[[Progress], None],
) -> dict[str, TableError]:
    """Write the rank's file block by block, comparing each block with its float rows on the way."""
    errors: dict[str, TableError] = {}
    total = sum(_float_bytes(table) for table in trained)
    done = 0
    with (directory / manifest.plan.ranks[0].weights).open("wb") as file:
        for table, stored, shard in zip(trained, manifest.tables, manifest.plan.shards, strict=True):
            file.seek(shard.offset_bytes)
            error = errors[table.name] = TableError(stored.dtype)
            block = max(1, _BLOCK_BYTES // (4 * table.dim))
            for start in range(0, table.rows, block):
                rows = weights.rows(table, start, min(start + block, table.rows))
                bytes_ = quantize(table.name, start, rows, stored.dtype).numpy()
                file.write(bytes_.data)
                error.add(start, rows.float().numpy(), bytes_)
                done += 4 * rows.numel()
                progress(Progress(table.name, done, total))
    return errors


def _check_parity(
    directory: Path,
    manifest: Manifest,
    program: torch.jit.ScriptModule,
    errors: dict[str, TableError],
    config: ExportConfig,
) -> None:
    """Write the rest of the draft, answer a probe in three ways, and record how they agree."""
    (directory / MODEL).write_text(model_py())
    save_program(program, directory / PROGRAM)
    files = {path.name: digest_file(path) for path in sorted(directory.iterdir()) if path.name != MANIFEST}
    manifest = msgspec.structs.replace(manifest, files=files)
    write_manifest(directory, manifest)

    probe = make_probe(manifest)
    program.weights_host = map_weights(directory / manifest.plan.ranks[0].weights)
    results = compare(
        manifest,
        errors,
        {table.name: config.max_error_of(table.name) for table in manifest.tables},
        pool(directory, manifest, probe),
        run_program(program, probe),
        run_reloaded(directory, probe),
    )
    write_manifest(directory, msgspec.structs.replace(manifest, parity=results))


def _float_bytes(table: TrainedTable) -> int:
    return 4 * table.rows * table.dim
