"""An explicit plan, as JSON::

    {"ranks": [{"host": 0}, {"host": 0}],
     "tables": {"item": {"sharding_type": "row_wise",
                         "shards": [{"rank": 0, "rows": [0, 500], "columns": [0, 64]},
                                    {"rank": 1, "rows": [500, 1000], "columns": [0, 64]}]}}}

`tbe-export plan --json` prints one. It has more keys, which are ignored here. A rank whose host is −1 is the router's
own (`serving.bundle.hosts`).
"""

from pathlib import Path

import msgspec

from export.plan.hosts import Placement
from serving.bundle.hosts import ROUTER
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


def read_plan(path: Path) -> Placement:
    """Read an explicit plan; offsets are still 0.

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
    for number, rank in enumerate(plan.ranks):
        if rank.host < ROUTER:
            raise ConfigurationError(
                f"{path}: ranks: rank {number}: expected a host >= 0, or {ROUTER} for the router, got {rank.host}"
            )
    shards = {
        name: [
            Shard(table=name, rank=shard.rank, rows=shard.rows, columns=shard.columns, offset_bytes=0)
            for shard in table.shards
        ]
        for name, table in plan.tables.items()
    }
    return [rank.host for rank in plan.ranks], {name: t.sharding_type for name, t in plan.tables.items()}, shards
