"""An explicit plan, as JSON::

    {"ranks": [{"host": 0}, {"host": 0}],
     "tables": {"item": {"sharding_type": "row_wise",
                         "shards": [{"rank": 0, "rows": [0, 500], "columns": [0, 64]},
                                    {"rank": 1, "rows": [500, 1000], "columns": [0, 64]}]}}}

`tbe-export plan --json` prints one. It has more keys, which are ignored here.
"""

from pathlib import Path

import msgspec

from serving.bundle.plan import Block, Shard, ShardingType
from serving.errors import ConfigurationError
from serving.files.reading import read_file
from serving.files.strict import UNREADABLE


class _Rank(msgspec.Struct):
    host: int


class _Shard(msgspec.Struct):
    rank: int
    rows: Block
    columns: Block


class _Table(msgspec.Struct):
    sharding_type: ShardingType
    shards: list[_Shard]


class _PlanFile(msgspec.Struct):
    ranks: list[_Rank]
    tables: dict[str, _Table]


def read_plan(path: Path) -> tuple[list[int], dict[str, ShardingType], dict[str, list[Shard]]]:
    """Read an explicit plan.

    Returns:
        The host of each rank, the sharding type of each table, and the shards of each table; offsets are still 0.

    Raises:
        ConfigurationError: the file is not such a plan.
    """
    try:
        plan = msgspec.json.decode(read_file(path, follow=True), type=_PlanFile)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if not plan.ranks:
        raise ConfigurationError(f"{path}: ranks: expected at least one")
    shards = {
        name: [
            Shard(table=name, rank=shard.rank, rows=shard.rows, columns=shard.columns, offset_bytes=0)
            for shard in table.shards
        ]
        for name, table in plan.tables.items()
    }
    return [rank.host for rank in plan.ranks], {name: t.sharding_type for name, t in plan.tables.items()}, shards
