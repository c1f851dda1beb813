"""Where shards lie in their ranks' files."""

from itertools import pairwise

from export.plan.planner import with_offsets
from serving.bundle.formats import WeightDtype
from serving.bundle.plan import Shard
from serving.bundle.tables import IdPolicy, Pooling, Table

MIB = 1 << 20


def table(name: str, rows: int) -> Table:
    """A table of so many rows of 64 bytes."""
    return Table(
        name=name,
        rows=rows,
        dim=16,
        pooling=Pooling.SUM,
        weighted=False,
        dtype=WeightDtype.FP32,
        id_policy=IdPolicy.ERROR,
    )


def laid_out(**rows: int) -> list[Shard]:
    tables = [table(name, count) for name, count in rows.items()]
    return [*with_offsets(tables, {value.name: [value.whole_shard(0)] for value in tables})]


def test_shards_are_aligned_by_their_size() -> None:
    shards = laid_out(first=3, large=MIB, small=5, next=MIB - 1, last=2 * MIB)
    # 192 bytes; 64 MiB; 320 bytes; 64 bytes less than 64 MiB; 128 MiB.
    expected = [0, 2 * MIB, 66 * MIB, 66 * MIB + 384, 132 * MIB]
    assert [shard.offset_bytes for shard in shards] == expected
    for before, after in pairwise(shards):
        assert before.offset_bytes + 64 * before.rows[1] <= after.offset_bytes
