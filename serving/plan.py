"""Where the tables are: TorchRec's ShardingPlan, with the file and byte offset of every shard.

A shard is a rectangle of a table on one rank. Where a table is cut both ways, every block of columns is cut at the
same rows. Cutting columns leaves each block its own copy of a row's scale and bias.
"""

import enum
from collections.abc import Iterable, Sequence

from serving.strict import Strict

# Columns are cut at whole bytes of every dtype, and where FBGEMM's kernels can read: INT2 packs four to a byte.
COLUMN_MULTIPLE = 4

Block = tuple[int, int]


class ShardingType(enum.Enum):
    """TorchRec's names for the ways to cut a table."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


class Rank(Strict, frozen=True):
    """One place that holds shards, and the file with their bytes."""

    host: int
    device: str
    weights: str


class Shard(Strict, frozen=True):
    """Rows [rows[0], rows[1]) × columns [columns[0], columns[1]) of a table, at a byte offset of a rank's file."""

    table: str
    rank: int
    rows: Block
    columns: Block
    offset_bytes: int

    @property
    def height(self) -> int:
        """How many rows."""
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        """How many columns."""
        return self.columns[1] - self.columns[0]


class Plan(Strict, frozen=True):
    """The sharding type of each table, the ranks, and the shards."""

    sharding: dict[str, ShardingType]
    ranks: tuple[Rank, ...]
    shards: tuple[Shard, ...]
    row_alignment: int

    @property
    def shards_by_table(self) -> dict[str, tuple[Shard, ...]]:
        """The shards of each table; of a data-parallel one, its copies."""
        by_table: dict[str, list[Shard]] = {table: [] for table in self.sharding}
        for shard in self.shards:
            by_table[shard.table].append(shard)
        return {table: tuple(shards) for table, shards in by_table.items()}

    @property
    def pieces_by_table(self) -> dict[str, tuple[Shard, ...]]:
        """Shards that make each table up once: of a data-parallel one, the copy that answers.

        Such tables take turns on the ranks.
        """
        pieces = self.shards_by_table
        copied = [table for table, kind in self.sharding.items() if kind is ShardingType.DATA_PARALLEL]
        for turn, table in enumerate(copied):
            copies = pieces[table]
            pieces[table] = (copies[turn % len(copies)],)
        return pieces


def row_blocks(shards: Iterable[Shard]) -> tuple[Block, ...]:
    """The blocks of rows that a table is cut into, in order."""
    return tuple(sorted({shard.rows for shard in shards}))


def tiling_error(kind: ShardingType, rows: int, dim: int, shards: Sequence[Shard], ranks: int) -> str | None:
    """What is wrong with the shards of a table of `rows` × `dim`; None where they make it up exactly."""
    for shard in shards:
        if not 0 <= shard.rank < ranks:
            return f"no rank {shard.rank}: expected one of {ranks}"
        if any(cut % COLUMN_MULTIPLE and cut != dim for cut in shard.columns):
            return f"expected columns cut at multiples of {COLUMN_MULTIPLE}, got {list(shard.columns)}"
    whole = ((0, rows), (0, dim))
    if kind is ShardingType.DATA_PARALLEL:
        copies = sorted(shard.rank for shard in shards if (shard.rows, shard.columns) == whole)
        return (
            None
            if copies == list(range(ranks)) == sorted(each.rank for each in shards)
            else (f"expected a whole copy on each of {ranks} ranks, got them on {copies}")
        )
    columns = sorted({shard.columns for shard in shards})
    if (gap := _gap(columns, dim)) is not None:
        return f"its shards do not cover columns exactly once: look at column {gap}"
    cuts = row_blocks(shards)
    if (gap := _gap(cuts, rows)) is not None:
        return f"its shards do not cover rows exactly once: look at row {gap}"
    found = sorted((shard.rows, shard.columns) for shard in shards)
    if found != sorted((block, column) for block in cuts for column in columns):
        return "expected every block of columns cut at the same rows, each shard on one rank"
    return None


def _gap(blocks: Sequence[Block], end: int) -> int | None:
    """Where sorted blocks stop following one another from 0 to `end`."""
    reached = 0
    for start, stop in blocks:
        if start != reached or stop <= start:
            return min(start, reached)
        reached = stop
    return None if reached == end else min(reached, end)
