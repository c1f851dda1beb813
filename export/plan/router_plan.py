"""Hosts as models: a plan over many ranks becomes a plan with one rank for each host, for a router.

On CPU, a host is one rank. The first rank is the router's own. It has the tables that would be copied to all ranks.
"""

from collections.abc import Mapping, Sequence

import msgspec

from export.plan.sharding import Sharding
from export.plan.traffic import HOST_ID_BYTES, HOST_LENGTH_BYTES, SUM_BYTES, WEIGHT_BYTES
from serving.bundle.manifest import aligned
from serving.bundle.plan import ROUTER, Block, Shard, ShardingType
from serving.bundle.tables import Table


def router_tables(tables: Sequence[Table], readers: Mapping[str, Sequence[str]], sharding: Sharding) -> set[str]:
    """The names of the tables that are whole in the router's own rank.

    A table that can only be data_parallel is one of them, even if it does not fit. Other tables are ranked by the
    bytes of traffic that they save for each stored byte, and taken as long as they fit.

    Args:
        tables: the tables, in the dtypes that they are stored in.
        readers: the features of each table.
        sharding: ranks, limits, and how to place tables.
    """
    copied = ShardingType.DATA_PARALLEL
    allowed = {table.name: sharding.types_of(table) for table in tables}
    chosen = {name for name, types in allowed.items() if types == (copied,)}
    free = (sharding.own_bytes or 0) - sum(_stored(table) for table in tables if table.name in chosen)
    candidates = [table for table in tables if copied in allowed[table.name] and table.name not in chosen]
    for table in sorted(candidates, key=lambda table: -_saved(table, readers[table.name], sharding) / _stored(table)):
        if _stored(table) <= free:
            free -= _stored(table)
            chosen.add(table.name)
    return chosen


def _stored(table: Table) -> int:
    return aligned(table.rows * table.row_bytes)


def _saved(table: Table, readers: Sequence[str], sharding: Sharding) -> float:
    """The bytes that a sample would move to and from a host with the whole table."""
    ids = sum(sharding.pooling_factors_of(table.name, len(readers)))
    bags = ids if table.is_sequence else len(readers)
    id_bytes = HOST_ID_BYTES + (WEIGHT_BYTES if table.weighted else 0)
    return ids * id_bytes + bags * (HOST_LENGTH_BYTES + table.dim * SUM_BYTES)


# The host of each rank, the sharding type of each table, and the shards of each table. All byte offsets are 0.
Placement = tuple[list[int], dict[str, ShardingType], dict[str, list[Shard]]]


def fold_hosts(tables: Sequence[Table], placement: Placement) -> Placement:
    """Fold a placement to one rank for each host, after the router's own.

    Args:
        tables: the tables.
        placement: over any ranks. A rank with host `ROUTER` is the router's own.

    Returns:
        A placement with one rank for each of the hosts `ROUTER`, 0, 1, …. Hosts without a shard are left out, and the
        others are renumbered. Neighbouring shards of a table on one host become one shard, if the blocks stay a grid.
        A data-parallel table is whole on the router's rank, as table_wise.
    """
    host_of, kinds, shards = placement
    hosts = hosts_of(placement)
    new_kinds, new_shards = dict(kinds), {}
    for table in tables:
        if kinds[table.name] is ShardingType.DATA_PARALLEL:
            new_kinds[table.name] = ShardingType.TABLE_WISE
            new_shards[table.name] = [table.whole_shard(0)]
        else:
            rank_of = {(shard.rows, shard.columns): hosts.index(host_of[shard.rank]) for shard in shards[table.name]}
            new_shards[table.name] = _joined(table.name, rank_of)
    return list(range(ROUTER, len(hosts) + ROUTER)), new_kinds, new_shards


def side_by_side(shards: Sequence[Shard]) -> list[Shard]:
    """Swap shards of one shape between ranks, so that shards of a table on one host are neighbours.

    Each rank holds as many bytes as before. TorchRec's planner deals blocks of columns to the hosts in turn. Then
    each host would get the same ids several times.
    """
    ranks: dict[tuple[int, int], list[int]] = {}
    for shard in sorted(shards, key=lambda shard: shard.rank):
        ranks.setdefault((shard.row_count, shard.width), []).append(shard.rank)
    dealt = {shape: iter(shards_of_shape) for shape, shards_of_shape in ranks.items()}
    return [
        msgspec.structs.replace(shard, rank=next(dealt[shard.row_count, shard.width]))
        for shard in sorted(shards, key=lambda shard: (shard.columns, shard.rows))
    ]


def hosts_of(placement: Placement) -> list[int]:
    """The hosts that have a rank in the folded placement, by their numbers in `placement`; `ROUTER` is the first."""
    host_of, kinds, shards = placement
    cut = [shards[table] for table, kind in kinds.items() if kind is not ShardingType.DATA_PARALLEL]
    return sorted({ROUTER, *(host_of[shard.rank] for pieces in cut for shard in pieces)})


def _joined(table: str, rank_of: Mapping[tuple[Block, Block], int]) -> list[Shard]:
    """The shards of a table, with neighbours joined.

    Neighbouring blocks of rows are joined if each block of columns has the same rank in both. Then blocks of columns
    are joined in the same way. So all blocks of columns are cut at the same rows, which
    `serving.bundle.plan.tiling_error` checks.

    Args:
        table: name of the table.
        rank_of: the rank of each block of rows and block of columns.
    """
    rows = {row: tuple(sorted((c, rank) for (r, c), rank in rank_of.items() if r == row)) for row, _ in rank_of}
    by_row = _join(rows)
    columns = {column: tuple((row, dict(ranks)[column]) for row, ranks in by_row.items()) for _, column in rank_of}
    return [
        Shard(table=table, rank=rank, rows=row, columns=column, offset_bytes=0)
        for column, ranks in _join(columns).items()
        for row, rank in ranks
    ]


def _join(blocks: Mapping[Block, tuple[tuple[Block, int], ...]]) -> dict[Block, tuple[tuple[Block, int], ...]]:
    """Join neighbouring blocks whose blocks of the other direction are on the same ranks.

    Args:
        blocks: for each block of one direction, the blocks of the other direction with their ranks.
    """
    joined: dict[Block, tuple[tuple[Block, int], ...]] = {}
    last: Block | None = None
    for block, crossing_blocks in sorted(blocks.items()):
        if last is not None and joined[last] == crossing_blocks:
            del joined[last]
            last = (last[0], block[1])
        else:
            last = block
        joined[last] = crossing_blocks
    return joined
