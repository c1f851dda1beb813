"""Where each table goes: by an explicit plan, on one rank, or as TorchRec's planner decides."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from export.plan.file import read_plan
from export.plan.hosts import fold_hosts
from export.plan.layout import whole_shard, with_offsets
from export.plan.rank_memory import check_fits
from export.plan.sharding import Sharding
from export.plan.torchrec_planner import configured_type, plan_by_torchrec
from serving.bundle.hosts import ROUTER
from serving.bundle.manifest import DEVICE
from serving.bundle.plan import Plan, Rank, Shard, ShardingType, tiling_error
from serving.bundle.tables import Feature, Table
from serving.errors import ConfigurationError


def plan_shards(tables: Sequence[Table], features: Sequence[Feature], sharding: Sharding) -> Plan:
    """Place `tables` on ranks, with the byte offsets of their shards.

    Args:
        tables: the tables, in the dtypes that they are stored in: the plan is made for stored bytes.
        features: the features that read them.
        sharding: the ranks, and how tables are to be placed.

    Raises:
        ConfigurationError: a constraint or an explicit plan does not fit the tables.
        PlanError: the tables do not fit the ranks; names a table, and by how much.
    """
    readers = {table.name: [each.name for each in features if each.table == table.name] for table in tables}
    sharding.check_tables(readers)
    if sharding.plan is not None:
        hosts, kinds, shards = read_plan(Path(sharding.plan))
    else:
        hosts = [rank // sharding.local_ranks for rank in range(sharding.ranks)]
        kinds, shards = (
            _plan_one_rank(tables, sharding) if sharding.ranks == 1 else plan_by_torchrec(tables, readers, sharding)
        )
    if sharding.hosts_as_models:
        hosts, kinds, shards = fold_hosts(tables, (hosts, kinds, shards))
    _check_plan(tables, kinds, shards, len(hosts))
    plan = Plan(
        sharding={table.name: kinds[table.name] for table in tables},
        ranks=tuple(
            Rank(host=host, device=DEVICE, weights_file=_weights_file(number, host, sharding))
            for number, host in enumerate(hosts)
        ),
        shards=with_offsets(tables, shards),
        row_alignment=1,
    )
    check_fits(tables, plan, sharding.memory_bytes)
    return plan


def _weights_file(rank: int, host: int, sharding: Sharding) -> str | None:
    """The file of a rank; None where its host has a bundle of its own."""
    return None if sharding.hosts_as_models and host != ROUTER else f"weights.{rank}.bin"


def _plan_one_rank(
    tables: Sequence[Table], sharding: Sharding
) -> tuple[dict[str, ShardingType], dict[str, list[Shard]]]:
    """Place every table whole on the only rank, whatever its sharding type: cutting buys nothing there."""
    kinds = {table.name: configured_type(table, sharding) or ShardingType.TABLE_WISE for table in tables}
    return kinds, {table.name: [whole_shard(table, 0)] for table in tables}


def _check_plan(
    tables: Sequence[Table], kinds: Mapping[str, ShardingType], shards: Mapping[str, Sequence[Shard]], ranks: int
) -> None:
    names = {table.name for table in tables}
    if unknown := kinds.keys() - names:
        raise ConfigurationError(f"plan: table {min(unknown)!r}: the model has no such table")
    for table in tables:
        if table.name not in kinds:
            raise ConfigurationError(f"plan: table {table.name!r}: expected it in the plan, which has no such table")
        wrong = tiling_error(kinds[table.name], table.rows, table.dim, shards[table.name], ranks)
        if wrong is not None:
            raise ConfigurationError(f"plan: table {table.name!r} ({table.rows} × {table.dim}): {wrong}")
