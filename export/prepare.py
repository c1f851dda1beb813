"""The first part of every export: the trained tables, their weights, and a manifest of the files to write."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from export.config import ExportConfig, Progress
from export.errors import ModelError
from export.ids.id_maps import BuiltMaps, build_maps
from export.plan.planner import plan_shards
from export.rows.quantize import check_dim, smallest_dtype
from export.scores.aot_inductor import compiled_file
from export.scores.collection_columns import collection_columns
from export.scores.dense_part import CompiledDensePart, compile_dense_part
from export.scores.labelled_requests import LabelledRequest, read_labelled
from export.scores.trace_example import trace_example
from export.trained.checkpoint import Checkpoint, WeightSource
from export.trained.loaded_tables import load_tables
from export.trained.model_copy import on_cpu
from export.trained.model_weights import load_weights, open_weights
from export.trained.tables import Trained, TrainedTable, collect_tables
from serving.bundle.formats import WeightDtype
from serving.bundle.manifest import Manifest
from serving.bundle.plan import IdDtype
from serving.bundle.scores import DensePart
from serving.bundle.segments import repeated_name
from serving.bundle.signature import read_signing_key
from serving.bundle.tables import DefaultRow, Feature, IdPolicy, Table
from serving.errors import ConfigurationError
from serving.pins import installed
from serving.requests.id_maps import known_of_keys

_MOST_INT32_ROWS = 2**31


def describe(
    trained: Sequence[TrainedTable],
    config: ExportConfig,
    weights: Callable[[], Checkpoint],
    progress: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """The manifest of a bundle of `trained`, without parity, files, position weights, id maps, and left-out modules.

    Args:
        trained: the tables.
        config: what to export.
        weights: opens the rows. It is called only to choose a dtype.
        progress: called as rows are read.

    Raises:
        ModelError: two features or tables would have one name in the bundle of a host.
        ConfigurationError, CheckpointError, QuantizeError, PlanError: as `export_model`.
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
            id_policy=_id_policy(table, config),
        )
        for table in trained
    )
    for table in tables:
        if table.policy_error is not None:
            raise ConfigurationError(f"table {table.name!r}: {table.policy_error}")
        if config.id_dtype is IdDtype.INT32 and table.rows > _MOST_INT32_ROWS:
            raise ConfigurationError(
                f"id_dtype: table {table.name!r} has {table.rows} rows: requests cannot ask for all of them by INT32"
            )
    if config.id_dtype is IdDtype.INT32 and (raw := next((t.name for t in trained if t.id_map is not None), None)):
        raise ConfigurationError(
            f"id_dtype: expected int64: the ids of table {raw!r} are remapped by a managed collision module, which "
            "takes int64"
        )
    features = tuple(_features(trained))
    manifest = Manifest(
        features=features,
        tables=tables,
        output_dtype=config.output_dtype,
        plan=plan_shards(tables, features, config.sharding),
        parity=(),
        exported_at=time.time(),
        versions=installed(),
        files={},
        id_dtype=config.id_dtype,
    )
    if config.sharding.hosts_as_models and (wrong := repeated_name(manifest)) is not None:
        raise ModelError(f"{wrong}: rename one, or have them on different hosts")
    return manifest


def _id_policy(table: TrainedTable, config: ExportConfig) -> IdPolicy | DefaultRow:
    """The policy for ids outside a table.

    Raises:
        ConfigurationError: a policy is set for a table with an id map.
    """
    policy = config.id_policy_of(table.name)
    if table.id_map is not None and policy is not IdPolicy.ERROR:
        raise ConfigurationError(
            f"id_policy: table {table.name!r}: its ids are remapped by a managed collision module, which says what "
            f"an id is: expected no policy, got {policy.value}: name the other tables"
        )
    return policy


def _features(trained: Sequence[TrainedTable]) -> Iterator[Feature]:
    """All features, ordered by the first appearance of their keys, so that features of one key are neighbours."""
    features = [
        Feature(
            name=name,
            table=table.name,
            shared_key=None if key == name else key,
            position_weights=None if table.position_weights is None else (),
        )
        for table in trained
        for key, name in zip(table.keys, table.features, strict=True)
    ]
    keys = list(dict.fromkeys(feature.key for feature in features))
    yield from sorted(features, key=lambda feature: keys.index(feature.key))


def with_position_weights(manifest: Manifest, trained: Sequence[TrainedTable], weights: Checkpoint) -> Manifest:
    """`manifest` with the position weights of its features.

    Raises:
        CheckpointError: some are missing or not finite, or their number differs.
    """
    by_feature: dict[str, tuple[float, ...]] = {}
    for table in trained:
        for name, position_weights in zip(table.features, table.position_weights or (), strict=False):
            if position_weights.key is not None:
                what = f"position weights of feature {name!r}"
                numbers = weights.numbers(what, position_weights.key, (position_weights.count,))
                by_feature[name] = tuple(numbers.tolist())
    features = tuple(
        msgspec.structs.replace(feature, position_weights=by_feature.get(feature.name, feature.position_weights))
        for feature in manifest.features
    )
    return msgspec.structs.replace(manifest, features=features)


def with_dense_part(manifest: Manifest, part: DensePart) -> Manifest:
    """`manifest` with a dense part, and without left-out modules."""
    return msgspec.structs.replace(manifest, dense_part=part, left_out=())


def _dtypes(
    trained: Sequence[TrainedTable],
    config: ExportConfig,
    weights: Callable[[], Checkpoint],
    progress: Callable[[Progress], None],
) -> dict[str, WeightDtype]:
    """The dtype of each table: the configured one, else the smallest one within `max_error`, else INT8."""
    limits = {t.name: config.max_error_of(t.name) for t in trained if config.dtype_of(t.name) is None}
    total = sum(table.float_bytes for table in trained if limits.get(table.name) is not None)
    read_bytes = 0

    def count(elements: int) -> None:
        nonlocal read_bytes
        read_bytes += 4 * elements
        progress(Progress("choosing dtypes", read_bytes, total))

    dtypes = {}
    for table in trained:
        dtype = config.dtype_of(table.name) or WeightDtype.INT8
        if (limit := limits.get(table.name)) is not None:
            dtype = smallest_dtype(table, weights(), limit, count)
        check_dim(table.name, table.dim, dtype)
        dtypes[table.name] = dtype
    return dtypes


@dataclass(frozen=True, slots=True)
class Prepared:
    """An export before its rows are read.

    Attributes:
        config: what to export.
        trained: the tables.
        weights: the checkpoint, which has the rows of all tables.
        manifest: the bundle's manifest, without parity and files. If hosts are models, the router's.
        maps: the id maps of the tables.
        runnable: the trained module, or None if it cannot be run.
        scored: the dense part, or None if only embeddings are served.
        labelled: requests with labels, on which the AUC of scores is measured.
        signing_key: signs bundles and the settings of new models. None: nothing is signed.
        progress: called as rows are stored.
    """

    config: ExportConfig
    trained: Trained
    weights: Checkpoint
    manifest: Manifest
    maps: BuiltMaps
    runnable: Trained | None
    scored: CompiledDensePart | None
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
    example = config.example
    if example is not None and dense is not None:
        raise ConfigurationError("example: expected no dense model, which replaces what the example would show")
    if dense is not None and not config.scores:
        raise ConfigurationError("dense: expected scores with it: ExportConfig(scores=True)")
    native = None if config.compile is None else compiled_file()
    key = None if signing_key is None else read_signing_key(signing_key)
    labelled = [] if config.labelled is None else read_labelled(config.labelled)
    if config.scores or example is not None:  # the dense part is traced and run on the CPU
        module, dense = on_cpu(module), dense if dense is None else on_cpu(dense)
    trained = collect_tables(module, trace=example is None)
    is_whole = config.scores and dense is None
    weights = open_weights(module, trained, checkpoint, config.checkpoint_prefix, is_whole=is_whole)
    for table in trained.tables:
        weights.check(table)
    manifest = describe(trained.tables, config, lambda: weights, progress)
    manifest = with_position_weights(manifest, trained.tables, weights)
    maps = build_maps(trained.tables, weights)
    manifest = msgspec.structs.replace(
        maps.described(manifest), left_out=trained.left_out, checkpoint=weights.fingerprint
    )
    scored = None
    if checkpoint is not None and is_whole:
        load_weights(trained, weights)

    def loading(loaded_bytes: int, total_bytes: int) -> None:
        progress(Progress("loading the model", loaded_bytes, total_bytes))

    is_loaded = checkpoint is None or load_tables(trained, weights, config.trained_memory_bytes, loading)
    if config.scores:
        unloaded = None if is_loaded else weights
        known_ids = known_of_keys(maps.known, manifest)
        scored = compile_dense_part(trained, manifest, known_ids, config, unloaded, dense, native)
        manifest = with_dense_part(manifest, scored.part)
    elif example is not None:
        trace_example(trained.module, collection_columns(trained, manifest), example)
    runnable = trained if is_loaded else None
    return Prepared(config, trained, weights, manifest, maps, runnable, scored, labelled, key, progress)
