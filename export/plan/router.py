"""Which tables the router holds itself: those that save most of what would travel, for their bytes."""

from collections.abc import Mapping, Sequence

from export.plan.layout import aligned
from export.plan.sharding import Sharding
from export.plan.torchrec_planner import allowed_types
from export.plan.traffic import HOST_ID_BYTES, HOST_LENGTH_BYTES, SUM_BYTES, WEIGHT_BYTES
from serving.bundle.plan import ShardingType
from serving.bundle.tables import Table


def router_tables(tables: Sequence[Table], readers: Mapping[str, Sequence[str]], sharding: Sharding) -> set[str]:
    """The names of the tables that are whole in the router's own rank.

    A table that can only be data_parallel is there, even if it does not fit. One that may also be something else is
    there if it fits beside those that save more of what a request moves for each stored byte.

    Args:
        tables: the tables, in the dtypes that they are stored in.
        readers: the features of each table.
        sharding: what is asked of the planner.
    """
    copied = ShardingType.DATA_PARALLEL.value
    allowed = {table.name: allowed_types(table, sharding) for table in tables}
    chosen = {name for name, types in allowed.items() if types == [copied]}
    free = (sharding.own_bytes or 0) - sum(_stored(table) for table in tables if table.name in chosen)
    candidates = [table for table in tables if copied in allowed[table.name] and table.name not in chosen]
    for table in sorted(candidates, key=lambda each: -_saved(each, readers[each.name], sharding) / _stored(each)):
        if _stored(table) <= free:
            free -= _stored(table)
            chosen.add(table.name)
    return chosen


def _stored(table: Table) -> int:
    return aligned(table.rows * table.row_bytes)


def _saved(table: Table, readers: Sequence[str], sharding: Sharding) -> float:
    """The bytes that a sample moves to and from a host that holds the whole table."""
    ids = sum(sharding.pooling_factors_of(table.name, len(readers)))
    id_bytes = HOST_ID_BYTES + (WEIGHT_BYTES if table.weighted else 0)
    return ids * id_bytes + len(readers) * (HOST_LENGTH_BYTES + table.dim * SUM_BYTES)
