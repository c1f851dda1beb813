"""TorchRec's planner, given the bytes of quantized tables."""

from collections.abc import Mapping, Sequence
from typing import Any

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
    HardwareConfig,
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

from export.errors import PlanError
from export.plan.sharding import Sharding, last_match
from export.rows.quantize import torch_dtype
from export.trained.eval_mode import quiet
from serving.bundle.manifest import aligned
from serving.bundle.plan import COLUMN_MULTIPLE, Shard, ShardingType
from serving.bundle.tables import Table
from serving.errors import ConfigurationError

# The sharding types that cut columns.
_COLUMN_TYPES = (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD)


def plan_by_torchrec(
    tables: Sequence[Table], readers: Mapping[str, Sequence[str]], sharding: Sharding
) -> tuple[dict[str, ShardingType], dict[str, list[Shard]]]:
    """Ask TorchRec's planner where `tables` go.

    Args:
        tables: the tables, in the dtypes that they are stored in.
        readers: the features of each table.
        sharding: the ranks, and what is asked of the planner.

    Returns:
        The sharding type and the shards of each table; offsets are still 0.

    Raises:
        PlanError: the tables do not fit the ranks.
        ConfigurationError: the planner refuses a constraint.
    """
    # A table's name may have dots, which names of modules may not: the planner gets other names.
    by_name = {f"t{number}": table for number, table in enumerate(tables)}
    module = _meta_module(by_name, readers)
    sharder = _StoredSharder(by_name, copies=not sharding.hosts_as_models)
    with quiet():
        planner, enumerator = _planner(by_name, readers, sharding)
        try:
            planned = planner.plan(module, [sharder]).plan[""]
        except PlannerError as error:
            raise PlanError(_why(enumerator.enumerate(module, [sharder]), by_name, sharding, error)) from error
        except (RuntimeError, ValueError, AssertionError) as error:
            raise ConfigurationError(f"TorchRec's planner refuses these settings: {error}") from error
    return (
        {table.name: ShardingType(planned[name].sharding_type) for name, table in by_name.items()},
        {table.name: _shards(table, planned[name], sharding.ranks) for name, table in by_name.items()},
    )


def _meta_module(by_name: Mapping[str, Table], readers: Mapping[str, Sequence[str]]) -> EmbeddingBagCollection:
    """The tables as a collection that takes no memory."""
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                feature_names=list(readers[table.name]),
            )
            for name, table in by_name.items()
        ],
    )


def _planner(
    by_name: Mapping[str, Table], readers: Mapping[str, Sequence[str]], sharding: Sharding
) -> tuple[EmbeddingShardingPlanner, EmbeddingEnumerator]:
    """TorchRec's planner for stored tables, and its enumerator of all ways to cut them."""
    topology = _topology(sharding)
    constraints = {name: _constraints(table, len(readers[table.name]), sharding) for name, table in by_name.items()}
    times = EmbeddingPerfEstimatorFactory.create(
        DEFAULT_PERF_ESTIMATOR, is_inference=True, topology=topology, constraints=constraints
    )
    enumerator = EmbeddingEnumerator(
        topology, sharding.batch_size, constraints, estimator=[times, _StoredBytes(by_name)]
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
    return planner, enumerator


def _constraints(table: Table, readers: int, sharding: Sharding) -> ParameterConstraints:
    """What `sharding` says of a table, as TorchRec's planner takes it."""
    kinds = sharding.types_of(table)
    width = last_match(dict[str, int | None](sharding.min_partition), table.name, None)
    if width is None and len(kinds) == 1 and kinds[0] in _COLUMN_TYPES:  # a block for each rank or host
        parts = {ShardingType.GRID_SHARD: sharding.hosts, ShardingType.TABLE_COLUMN_WISE: sharding.local_ranks}
        width = -(-table.dim // (parts.get(kinds[0], sharding.ranks) * COLUMN_MULTIPLE)) * COLUMN_MULTIPLE
    return ParameterConstraints(
        sharding_types=[kind.value for kind in kinds] if len(kinds) < len(ShardingType) else None,
        min_partition=width,
        pooling_factors=sharding.pooling_factors_of(table.name, readers),
        is_weighted=table.weighted,
    )


class _StoredBytes(ShardEstimator):  # type: ignore[misc]
    """Estimates the bytes that shards will take in the ranks' files."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._tables = tables

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any = None) -> None:  # noqa: ARG002
        for option in sharding_options:
            dtype = self._tables[option.name].dtype
            for shard in option.shards:
                rows, width = shard.size
                shard.storage = Storage(hbm=aligned(rows * dtype.row_bytes(width)), ddr=0)


class _Fp32(NoOpQuantizedCommCodec):  # type: ignore[misc]
    """Partial sums travel as FP32. TorchRec 1.8's own codec has a method where its planner reads a value."""

    quantized_dtype = torch.float32


class _StoredSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Offers the planner stored tables under every sharding type.

    TorchRec's own quantized sharder offers only three types. This one is for planning: it never shards a module.

    Args:
        tables: the stored tables, by the planner's names.
        copies: whether it offers data_parallel.
    """

    def __init__(self, tables: Mapping[str, Table], *, copies: bool) -> None:
        codecs = QuantizedCommCodecs(forward=_Fp32(), backward=_Fp32())
        super().__init__(
            qcomm_codecs_registry={
                CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: codecs,
                CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name: codecs,
            }
        )
        self._tables = tables
        self._copies = copies

    def sharding_types(self, compute_device_type: str) -> list[str]:
        types: list[str] = super().sharding_types(compute_device_type)
        return [
            sharding_type
            for sharding_type in types
            if self._copies or sharding_type != ShardingType.DATA_PARALLEL.value
        ]

    def shardable_parameters(self, module: EmbeddingBagCollection) -> dict[str, nn.Parameter]:  # noqa: ARG002
        return {
            name: nn.Parameter(
                torch.empty(
                    (table.rows, table.dim),
                    device="meta",
                    # Its estimate of a lookup's time goes by this. It knows no dtype below a byte.
                    dtype=torch_dtype(table.dtype),
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
        # Bytes in a millisecond. Within a host, TorchRec's figure.
        hardware_config=HardwareConfig(
            inter_host_bw=None if sharding.network_bytes_per_s is None else sharding.network_bytes_per_s / 1000
        ),
        kernel_config=KernelConfig(compute_device="cuda", use_hardware_based_bandwidth=True),
    )


def _why(
    options: Sequence[ShardingOption], tables: Mapping[str, Table], sharding: Sharding, error: PlannerError
) -> str:
    """Say which table does not fit, and by how much."""
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
        f"{why}: a rank was taken to hold 1/{sharding.machine_ranks} of this machine's {sharding.machine_bytes:,} "
        "bytes: "
        "--memory-per-rank says what it can"
    )


def _shards(table: Table, planned: ParameterSharding, ranks: int) -> list[Shard]:
    if planned.sharding_spec is None:  # data-parallel
        return [table.whole_shard(rank) for rank in range(ranks)]
    shards = []
    for shard in planned.sharding_spec.shards:
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        if rows:  # a table with fewer rows than ranks leaves some without
            shards.append(
                Shard(
                    table=table.name,
                    rank=shard.placement.rank(),
                    rows=(row, row + rows),
                    columns=(column, column + columns),
                    offset_bytes=0,
                )
            )
    return shards


def overflow_of(pieces: Sequence[tuple[int, str]], ranks: int, memory_bytes: int) -> str | None:
    """Try to place shards, the largest first, each on the emptiest rank.

    Args:
        pieces: the bytes of each shard, and its table.
        ranks: number of ranks.
        memory_bytes: the most bytes of each.

    Returns:
        A message about the first shard that does not fit. None: all fit.
    """
    free = [memory_bytes] * ranks
    total = sum(size for size, _ in pieces)
    for size, name in sorted(pieces, reverse=True):
        rank = free.index(max(free))
        if size > free[rank]:
            return (
                f"table {name!r}: a shard of it takes {size:,} bytes, {size - free[rank]:,} more than any of {ranks} "
                f"ranks has left of its {memory_bytes:,}: all tables take {total:,} bytes: give more "
                "--memory-per-rank or --ranks, allow types that cut smaller, or store narrower dtypes"
            )
        free[rank] -= size
    return None
