"""Where each table goes: TorchRec's planner, told what quantized tables weigh."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    KernelConfig,
    PlannerError,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import CommOp, NoOpQuantizedCommCodec, ParameterSharding, QuantizedCommCodecs

from export.errors import ConfigError, PlanError
from export.fitting import check_fits, overflow_of
from export.matching import last_match
from export.plan_file import read_plan
from export.quiet import quiet
from export.sharding import AUTO, AUTO_SIMPLE, Sharding
from serving.bundle import DEVICE, SHARD_ALIGNMENT, Feature, Table, WeightDtype
from serving.plan import COLUMN_MULTIPLE, Plan, Rank, Shard, ShardingType, tiling_error

# What its estimate of a lookup's time goes by; it knows no dtype below a byte.
_PARAMETER_DTYPE = {WeightDtype.FP32: torch.float32, WeightDtype.FP16: torch.float16}
# Types that cut columns, and over what: with one block for each of these, every one of them has work.
_COLUMN_TYPES = (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD)


def plan_shards(tables: Sequence[Table], features: Sequence[Feature], sharding: Sharding) -> Plan:
    """Place `tables` on ranks, with the byte offsets of their shards.

    Args:
        tables: with the dtypes they will be stored in: their bytes are what is planned.
        features: which read them.
        sharding: the ranks, and what is asked of them.

    Raises:
        ConfigError: a constraint or an explicit plan does not fit the tables.
        PlanError: the tables do not fit the ranks; names a table, and by how much.
    """
    readers = {table.name: [each.name for each in features if each.table == table.name] for table in tables}
    sharding.check_tables(readers)
    if sharding.plan is not None:
        hosts, kinds, shards = read_plan(Path(sharding.plan))
    else:
        hosts = [rank // sharding.local_ranks for rank in range(sharding.ranks)]
        kinds, shards = _plan_one_rank(tables, sharding) if sharding.ranks == 1 else _plan(tables, readers, sharding)
    _check(tables, kinds, shards, len(hosts))
    plan = Plan(
        sharding={table.name: kinds[table.name] for table in tables},
        ranks=tuple(
            Rank(host=host, device=DEVICE, weights=f"weights.{number}.bin") for number, host in enumerate(hosts)
        ),
        shards=_with_offsets(tables, shards),
        row_alignment=1,
    )
    check_fits(tables, plan, sharding.memory_bytes)
    return plan


def _plan_one_rank(
    tables: Sequence[Table], sharding: Sharding
) -> tuple[dict[str, ShardingType], dict[str, list[Shard]]]:
    """Everything whole on the only rank, whatever it is to be called: cutting buys nothing there."""
    kinds = {table.name: _asked(table, sharding) or ShardingType.TABLE_WISE for table in tables}
    return kinds, {table.name: [_whole(table, 0)] for table in tables}


def _plan(
    tables: Sequence[Table], readers: Mapping[str, Sequence[str]], sharding: Sharding
) -> tuple[dict[str, ShardingType], dict[str, list[Shard]]]:
    """Ask TorchRec's planner; `readers` are the features of each table."""
    # Names of its own: a table's may have dots, which modules do not take.
    names = {table.name: f"t{number}" for number, table in enumerate(tables)}
    constraints = {names[table.name]: _constraints(table, len(readers[table.name]), sharding) for table in tables}
    module = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=names[table.name],
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                feature_names=list(readers[table.name]),
            )
            for table in tables
        ],
    )
    by_name = {names[table.name]: table for table in tables}
    with quiet():
        topology = _topology(sharding)
        enumerator = EmbeddingEnumerator(
            topology,
            sharding.batch_size,
            constraints,
            estimator=[
                EmbeddingPerfEstimatorFactory.create(
                    DEFAULT_PERF_ESTIMATOR, is_inference=True, topology=topology, constraints=constraints
                ),
                _StoredBytes(by_name),
            ],
        )
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=sharding.batch_size,
            enumerator=enumerator,
            storage_reservation=FixedPercentageStorageReservation(0),
            constraints=constraints,
            stats=NoopEmbeddingStats(),
            debug=False,
        )
        sharder = _StoredSharder(by_name)
        try:
            planned = planner.plan(module, [sharder]).plan[""]
        except PlannerError as error:
            raise PlanError(_why(enumerator.enumerate(module, [sharder]), by_name, sharding, error)) from error
        except (RuntimeError, ValueError, AssertionError) as error:
            raise ConfigError(f"TorchRec's planner refuses these constraints: {error}") from error
    return (
        {table.name: ShardingType(planned[names[table.name]].sharding_type) for table in tables},
        {table.name: _shards(table, planned[names[table.name]], sharding.ranks) for table in tables},
    )


def _constraints(table: Table, readers: int, sharding: Sharding) -> ParameterConstraints:
    """The user's own, completed."""
    given = sharding.constraints.get(table.name, ParameterConstraints())
    kind = _asked(table, sharding)
    width = last_match(dict[str, int | None](sharding.min_partition), table.name, None)
    if width is None and kind in _COLUMN_TYPES:
        parts = {ShardingType.GRID_SHARD: sharding.hosts, ShardingType.TABLE_COLUMN_WISE: sharding.local_ranks}
        width = -(-table.dim // (parts.get(kind, sharding.ranks) * COLUMN_MULTIPLE)) * COLUMN_MULTIPLE
    return replace(
        given,
        sharding_types=given.sharding_types or ([kind.value] if kind else None),
        min_partition=given.min_partition or width,
        pooling_factors=sharding.pooling_factors_of(table.name, readers),
        is_weighted=table.weighted,
        compute_kernels=None,  # there is one here: FBGEMM's inference TBE
    )


def _asked(table: Table, sharding: Sharding) -> ShardingType | None:
    """The sharding type that `types` asks for; None where the planner chooses."""
    asked = last_match(sharding.types, table.name, AUTO)
    if asked == AUTO:
        return None
    if asked != AUTO_SIMPLE:
        return ShardingType(asked)
    if table.rows > sharding.row_wise_over:
        return ShardingType.ROW_WISE
    return ShardingType.COLUMN_WISE if table.dim > sharding.column_wise_over else ShardingType.TABLE_WISE


class _StoredBytes(ShardEstimator):  # type: ignore[misc]
    """The bytes that shards will take in the ranks' files."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._tables = tables

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any = None) -> None:  # noqa: ARG002
        for option in sharding_options:
            dtype = self._tables[option.name].dtype
            for shard in option.shards:
                rows, width = shard.size
                shard.storage = Storage(hbm=_aligned(rows * dtype.row_bytes(width)), ddr=0)


class _Fp32(NoOpQuantizedCommCodec):  # type: ignore[misc]
    """Partial sums as they are; TorchRec 1.8's own has a method where its planner reads a value."""

    quantized_dtype = torch.float32


class _StoredSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Offers the planner stored tables under every sharding type; partial sums travel as FP32.

    TorchRec's own quantized sharder offers three of them. This one only plans: it never shards a module.
    """

    def __init__(self, tables: Mapping[str, Table]) -> None:
        codecs = QuantizedCommCodecs(forward=_Fp32(), backward=_Fp32())
        super().__init__(
            qcomm_codecs_registry={
                CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: codecs,
                CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name: codecs,
            }
        )
        self._tables = tables

    def shardable_parameters(self, module: EmbeddingBagCollection) -> dict[str, nn.Parameter]:  # noqa: ARG002
        return {
            name: nn.Parameter(
                torch.empty(
                    (table.rows, table.dim),
                    device="meta",
                    dtype=_PARAMETER_DTYPE.get(table.dtype, torch.uint8),
                ),
                requires_grad=False,
            )
            for name, table in self._tables.items()
        }

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:  # noqa: ARG002
        return ["dense" if sharding_type == ShardingType.DATA_PARALLEL.value else "fused"]


def _topology(sharding: Sharding) -> Topology:
    # "cuda", though no GPU is needed to plan: for "cpu" the planner offers no type that cuts rows.
    return TopologyFactory.create_topology(
        TrainerConfig(
            world_size=sharding.ranks,
            local_world_size=sharding.local_ranks,
            hbm_cap_bytes=sharding.rank_bytes,
        ),
        kernel_config=KernelConfig(compute_device="cuda"),
    )


def _why(
    options: Sequence[ShardingOption], tables: Mapping[str, Table], sharding: Sharding, error: PlannerError
) -> str:
    """Which table does not fit, and by how much."""
    smallest: dict[str, list[int]] = {}
    for option in options:
        sizes = sorted((shard.storage.hbm for shard in option.shards), reverse=True)
        if option.name not in smallest or sizes < smallest[option.name]:
            smallest[option.name] = sizes
    pieces = [(size, tables[name].name) for name, sizes in smallest.items() for size in sizes]
    why = overflow_of(pieces, sharding.ranks, sharding.rank_bytes)
    why = why or f"no placement was found, though one may exist: {error}"
    if sharding.memory_bytes is not None:
        return why
    return (
        f"{why}: a rank was taken to hold 1/{sharding.ranks} of this machine's {sharding.machine_bytes:,} bytes: "
        "--memory-per-rank says what it can"
    )


def _shards(table: Table, planned: ParameterSharding, ranks: int) -> list[Shard]:
    if planned.sharding_spec is None:  # data-parallel
        return [_whole(table, rank) for rank in range(ranks)]
    shards = []
    for each in planned.sharding_spec.shards:
        (row, column), (rows, columns) = each.shard_offsets, each.shard_sizes
        if rows:  # a table with fewer rows than ranks leaves some without
            shards.append(
                Shard(
                    table=table.name,
                    rank=each.placement.rank(),
                    rows=(row, row + rows),
                    columns=(column, column + columns),
                    offset_bytes=0,
                )
            )
    return shards


def _whole(table: Table, rank: int) -> Shard:
    return Shard(table=table.name, rank=rank, rows=(0, table.rows), columns=(0, table.dim), offset_bytes=0)


def _check(
    tables: Sequence[Table], kinds: Mapping[str, ShardingType], shards: Mapping[str, Sequence[Shard]], ranks: int
) -> None:
    names = {table.name for table in tables}
    if unknown := kinds.keys() - names:
        raise ConfigError(f"plan: table {min(unknown)!r}: the model has no such table")
    for table in tables:
        if table.name not in kinds:
            raise ConfigError(f"plan: table {table.name!r}: expected it in the plan, found it not")
        wrong = tiling_error(kinds[table.name], table.rows, table.dim, shards[table.name], ranks)
        if wrong is not None:
            raise ConfigError(f"plan: table {table.name!r} ({table.rows} × {table.dim}): {wrong}")


def _with_offsets(tables: Sequence[Table], shards: Mapping[str, Sequence[Shard]]) -> tuple[Shard, ...]:
    """One shard after another in each rank's file, each at a cache-line boundary."""
    ends: dict[int, int] = {}
    placed = []
    for table in tables:
        for shard in shards[table.name]:
            offset = ends.get(shard.rank, 0)
            ends[shard.rank] = offset + _aligned(table.shard_bytes(shard))
            placed.append(msgspec.structs.replace(shard, offset_bytes=offset))
    return tuple(placed)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
