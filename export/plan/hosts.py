"""Hosts that answer as models of their own: a plan over many ranks becomes one with a rank for each host.

On CPU a host is one rank. The router's own rank comes first. It takes the tables that all ranks would have copies of.
"""

from collections.abc import Mapping, Sequence

import msgspec

from export.plan.layout import whole_shard
from serving.bundle.hosts import ROUTER
from serving.bundle.plan import Block, Shard, ShardingType
from serving.bundle.tables import Table

# The hosts of the ranks, the sharding type of each table, and the shards of each table; offsets are still 0.
Placement = tuple[list[int], dict[str, ShardingType], dict[str, list[Shard]]]


def fold_hosts(tables: Sequence[Table], placement: Placement) -> Placement:
    """One rank for each host, behind the router's own.

    Args:
        tables: the tables.
        placement: over any ranks. A rank whose host is `ROUTER` is the router's own.

    Returns:
        A placement over ranks of the hosts `ROUTER`, 0, 1, …. Hosts without a shard are left out, and the others move
        up. Neighbouring shards of a table that are on one host are one where the blocks stay a grid. A data-parallel
        table is whole in the router's rank, as table_wise.
    """
    host_of, kinds, shards = placement
    hosts = hosts_of(placement)
    new_kinds, new_shards = dict(kinds), {}
    for table in tables:
        if kinds[table.name] is ShardingType.DATA_PARALLEL:
            new_kinds[table.name] = ShardingType.TABLE_WISE
            new_shards[table.name] = [whole_shard(table, 0)]
        else:
            rank_of = {(each.rows, each.columns): hosts.index(host_of[each.rank]) for each in shards[table.name]}
            new_shards[table.name] = _joined(table.name, rank_of)
    return list(range(ROUTER, len(hosts) + ROUTER)), new_kinds, new_shards


def side_by_side(shards: Sequence[Shard]) -> list[Shard]:
    """The shards of a table, those of one shape dealt out anew, so that those of a host are neighbours.

    Each rank holds as many bytes as before. TorchRec's planner deals blocks of columns to hosts in turn: each host
    would be sent the same ids several times.
    """
    ranks: dict[tuple[int, int], list[int]] = {}
    for each in sorted(shards, key=lambda shard: shard.rank):
        ranks.setdefault((each.height, each.width), []).append(each.rank)
    dealt = {shape: iter(each) for shape, each in ranks.items()}
    return [
        msgspec.structs.replace(each, rank=next(dealt[each.height, each.width]))
        for each in sorted(shards, key=lambda shard: (shard.columns, shard.rows))
    ]


def hosts_of(placement: Placement) -> list[int]:
    """The hosts that have a rank in the folded placement, by their numbers in `placement`; `ROUTER` is the first."""
    host_of, kinds, shards = placement
    cut = [shards[table] for table, kind in kinds.items() if kind is not ShardingType.DATA_PARALLEL]
    return sorted({ROUTER, *(host_of[shard.rank] for pieces in cut for shard in pieces)})


def _joined(table: str, rank_of: Mapping[tuple[Block, Block], int]) -> list[Shard]:
    """The shards of a table. Neighbouring blocks of rows are joined where each block of columns stays on its rank.

    Then blocks of columns are joined likewise. So all blocks of columns are cut at the same rows, as
    `serving.bundle.plan.tiling_error` wants them.

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
    """Join neighbours whose other blocks are on the same ranks.

    Args:
        blocks: for each block of one direction, the blocks of the other direction with their ranks.
    """
    joined: dict[Block, tuple[tuple[Block, int], ...]] = {}
    last: Block | None = None
    for block, others in sorted(blocks.items()):
        if last is not None and joined[last] == others:
            del joined[last]
            last = (last[0], block[1])
        else:
            last = block
        joined[last] = others
    return joined
