"""The plan: TorchRec's ShardingPlan, with the file and byte offset of every shard.

A shard is a rectangle of a table on one rank. If a table is cut by rows and by columns, all blocks of columns are cut
at the same rows. Each block of columns has its own copy of a row's scale and bias.

A plan over several hosts has a router's bundle, and a bundle for each host. The router's plan has all ranks. The
first rank is the router's own, with a weights file. Every other rank is a host, and has no file in the router's
bundle: its rows are in the host's bundle. That is an ordinary bundle, in which a shard of the router's plan is a
table, and a segment (one feature over one shard) is a feature. Its pooling is always SUM.
"""

import enum
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from serving.files import Strict
from serving.notebook_table import notebook_table

# Columns are cut at multiples of this: whole bytes in every dtype, and widths that FBGEMM's kernels accept.
COLUMN_MULTIPLE = 4
# The host of the router's own rank. Other hosts count from 0.
ROUTER = -1
# The only weights file of a bundle with one rank.
FIRST_WEIGHTS = "weights.0.bin"

# Triton's versions are int64.
MOST_VERSION = 2**63 - 1
_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# The name of a lineage of deltas.
LINEAGE = re.compile(r"[0-9a-f]{32}")

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
    """A device of a host, which holds shards.

    Attributes:
        host: the number of the host.
        device: the kind of the device, one of `serving.bundle.manifest.ROW_ALIGNMENTS`.
        weights_file: the name of the bundle's file with the bytes of the shards. None: they are in the host's bundle.
    """

    host: int
    device: str
    weights_file: str | None = msgspec.field(name="weights")


class Shard(Strict, frozen=True):
    """A rectangle of a table: rows [rows[0], rows[1]) × columns [columns[0], columns[1]).

    Attributes:
        rank: the number of the rank that holds it.
        offset_bytes: its offset in the rank's file.
    """

    table: str
    rank: int
    rows: Block
    columns: Block
    offset_bytes: int

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.columns[1] - self.columns[0]


class Plan(Strict, frozen=True):
    """The shards of all tables, and the ranks that hold them.

    Attributes:
        sharding: the sharding type of each table, by name.
        row_alignment: the bytes of a stored row are a multiple of this.
    """

    sharding: dict[str, ShardingType]
    ranks: tuple[Rank, ...]
    shards: tuple[Shard, ...]
    row_alignment: int

    def _repr_html_(self) -> str:
        """Its shards, as notebooks show them."""
        return notebook_table(
            f"{len(self.sharding)} tables in {len(self.shards)} shards on {len(self.ranks)} ranks",
            ("table", "sharding", "rank", "host", "rows", "columns"),
            (
                (
                    shard.table,
                    self.sharding[shard.table].value,
                    shard.rank,
                    self.ranks[shard.rank].host,
                    f"{shard.rows[0]:,} to {shard.rows[1]:,}",
                    f"{shard.columns[0]} to {shard.columns[1]}",
                )
                for shard in self.shards
            ),
        )

    @property
    def rank_of_host(self) -> dict[int, int]:
        """In a router's plan, the rank of each host by the host's number, in rank order."""
        return {rank.host: number for number, rank in enumerate(self.ranks) if rank.weights_file is None}

    @property
    def shards_by_table(self) -> dict[str, tuple[Shard, ...]]:
        """The shards of each table. The shards of a data-parallel table are its copies."""
        by_table: dict[str, list[Shard]] = {table: [] for table in self.sharding}
        for shard in self.shards:
            by_table[shard.table].append(shard)
        return {table: tuple(shards) for table, shards in by_table.items()}

    @property
    def pieces_by_table(self) -> dict[str, tuple[Shard, ...]]:
        """The shards of each table that are looked up, which together hold every number once.

        Only one copy of a data-parallel table is looked up. The ranks take turns, table by table.
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
    """What is wrong with the shards of a table of `rows` × `dim`.

    Args:
        kind: the table's sharding type.
        rows: the rows of the table.
        dim: the dim of the table.
        shards: all shards of the table.
        ranks: the number of ranks.

    Returns:
        None if the shards hold every number of the table once; for a data-parallel table, once on each rank.
    """
    for shard in shards:
        if not 0 <= shard.rank < ranks:
            return f"no rank {shard.rank}: expected one of {ranks}"
        if any(cut % COLUMN_MULTIPLE and cut != dim for cut in shard.columns):
            return f"expected columns cut at multiples of {COLUMN_MULTIPLE}, got {list(shard.columns)}"
    if kind is ShardingType.DATA_PARALLEL:
        return _copies_error(rows, dim, shards, ranks)
    columns = sorted({shard.columns for shard in shards})
    if (gap := _gap(columns, dim)) is not None:
        return f"its shards do not cover columns exactly once: look at column {gap}"
    cuts = row_blocks(shards)
    if (gap := _gap(cuts, rows)) is not None:
        return f"its shards do not cover rows exactly once: look at row {gap}"
    rectangles = sorted((shard.rows, shard.columns) for shard in shards)
    if rectangles != sorted((block, column) for block in cuts for column in columns):
        return "expected every block of columns cut at the same rows, each shard on one rank"
    return None


def _copies_error(rows: int, dim: int, shards: Sequence[Shard], ranks: int) -> str | None:
    """What is wrong with the copies of a data-parallel table, or None. Arguments as for `tiling_error`."""
    whole = ((0, rows), (0, dim))
    copies = sorted(shard.rank for shard in shards if (shard.rows, shard.columns) == whole)
    if copies == list(range(ranks)) == sorted(shard.rank for shard in shards):
        return None
    return f"expected a whole copy on each of {ranks} ranks, got them on {copies}"


def _gap(blocks: Sequence[Block], end: int) -> int | None:
    """The first place where sorted blocks leave a gap or overlap in [0, end), or None."""
    reached = 0
    for start, stop in blocks:
        if start != reached or stop <= start:
            return min(start, reached)
        reached = stop
    return None if reached == end else min(reached, end)


class IdDtype(enum.Enum):
    """The dtype of `values` in a request, by its KServe name."""

    INT64 = "INT64"
    INT32 = "INT32"


class HostBundle(Strict, frozen=True, omit_defaults=True):
    """The bundle of a host in a router's plan. The router accepts no other version of that model.

    Attributes:
        host: the number of the host in the plan.
        model: the name of the model.
        version: the version of the model.
        manifest: SHA-256, in hex, of the bundle's manifest.json.
        lineage: the lineage of the deltas in its rows, if the router's bundle has deltas (`Manifest.compacted`).
    """

    host: int
    model: str
    version: int
    manifest: str
    lineage: str | None = None

    @property
    def is_possible(self) -> bool:
        """Whether model, version, digest and lineage have valid forms."""
        is_digest = _SHA256.fullmatch(self.manifest) is not None
        is_lineage = self.lineage is None or LINEAGE.fullmatch(self.lineage) is not None
        return is_model_name(self.model) and 1 <= self.version <= MOST_VERSION and is_digest and is_lineage

    @property
    def router(self) -> str | None:
        """The name of the router's model, derived from this name, or None if it is not made by `host_model`."""
        router = self.model.removesuffix(host_model("", self.host))
        return router if is_model_name(router) and router != self.model else None


class Part(Strict, frozen=True):
    """The router's plan that a host's bundle is a part of.

    Attributes:
        model: the name of the router's model.
        host: the number of the host in the router's plan.
        plan: `Manifest.placement_digest` of the router's manifest, in hex.
    """

    model: str
    host: int
    plan: str

    @property
    def is_possible(self) -> bool:
        """Whether model, host and plan have valid forms."""
        return is_model_name(self.model) and self.host >= 0 and _SHA256.fullmatch(self.plan) is not None

    @property
    def text(self) -> str:
        """The plan and the host as in a router's request, because partial sums of another plan are useless."""
        return part_text(self.host, self.plan)


def is_model_name(text: str) -> bool:
    """Whether `text` may be the name of a model, which is also the name of a folder."""
    return _MODEL_NAME.fullmatch(text) is not None


def part_text(host: int, plan: str) -> str:
    """The text `PLAN/HOST`, by which a request to a host names the plan that the host's bundle must be a part of.

    Args:
        host: number of the host.
        plan: `Manifest.placement_digest` of the router's manifest, in hex.
    """
    return f"{plan}/{host}"


def host_model(router: str, host: int) -> str:
    """The name of the model of a host.

    Args:
        router: name of the router's model.
        host: number of the host.
    """
    return f"{router}-host-{host}"


def is_host_model(name: str, router: str) -> bool:
    """Whether `host_model` gives this name to a host of a router."""
    return re.fullmatch(f"{re.escape(router)}-host-[0-9]+", name) is not None


def path_of(router: Path, host: HostBundle) -> Path:
    """The path of a host's bundle if it is in the router's repository.

    Args:
        router: the router's bundle, <repository>/<model>/<version>.
        host: an entry of its manifest.
    """
    return router.absolute().parent.parent / host.model / str(host.version)
