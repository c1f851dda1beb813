"""A plan over ranks, folded: one rank for each host, behind the router's own."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.plan.router_plan import Placement, fold_hosts, hosts_of, side_by_side
from serving.bundle.plan import ROUTER, Block, Shard, ShardingType, tiling_error
from serving.bundle.tables import Table
from tests.support.models import int8_table

ROWS, DIM = 100, 16
TWO_HOSTS = [0, 0, 1, 1]


def table(name: str = "t", rows: int = ROWS, dim: int = DIM) -> Table:
    return int8_table(name, rows, dim)


def placed(host_of: list[int], kind: ShardingType, shards: Iterable[tuple[int, Block, Block]]) -> Placement:
    return (
        host_of,
        {"t": kind},
        {"t": [Shard(table="t", rank=rank, rows=r, columns=c, offset_bytes=0) for rank, r, c in shards]},
    )


def folded(placement: Placement) -> tuple[list[int], list[tuple[int, Block, Block]]]:
    """The hosts, and the shards of `t` with their hosts."""
    hosts, kinds, shards = fold_hosts([table()], placement)
    assert tiling_error(kinds["t"], ROWS, DIM, shards["t"], len(hosts)) is None
    return hosts, sorted((hosts[shard.rank], shard.rows, shard.columns) for shard in shards["t"])


ALL: Block = (0, ROWS)
WIDE: Block = (0, DIM)
QUARTERS: list[Block] = [(0, 25), (25, 50), (50, 75), (75, 100)]
FOURTHS: list[Block] = [(0, 4), (4, 8), (8, 12), (12, 16)]


@pytest.mark.parametrize(
    ("kind", "shards", "expected"),
    [
        pytest.param("table_wise", [(3, ALL, WIDE)], [(0, ALL, WIDE)], id="table_wise, its host alone"),
        pytest.param(
            "row_wise",
            [(rank, rows, WIDE) for rank, rows in enumerate(QUARTERS)],
            [(0, (0, 50), WIDE), (1, (50, 100), WIDE)],
            id="row_wise",
        ),
        pytest.param(
            "column_wise",
            [(rank, ALL, columns) for rank, columns in enumerate(FOURTHS)],
            [(0, ALL, (0, 8)), (1, ALL, (8, 16))],
            id="column_wise",
        ),
        pytest.param(
            "table_row_wise",
            [(2, (0, 50), WIDE), (3, (50, 100), WIDE)],
            [(0, ALL, WIDE)],
            id="table_row_wise, its host alone",
        ),
        pytest.param(
            "table_column_wise",
            [(0, ALL, (0, 8)), (1, ALL, (8, 16))],
            [(0, ALL, WIDE)],
            id="table_column_wise",
        ),
        pytest.param(
            "grid_shard",
            [
                (0, (0, 50), (0, 8)),
                (1, (50, 100), (0, 8)),
                (2, (0, 50), (8, 16)),
                (3, (50, 100), (8, 16)),
            ],
            [(0, ALL, (0, 8)), (1, ALL, (8, 16))],
            id="grid_shard",
        ),
        pytest.param(
            "row_wise",
            [(0, (0, 25), WIDE), (2, (25, 50), WIDE), (1, (50, 75), WIDE), (3, (75, 100), WIDE)],
            [(0, (0, 25), WIDE), (0, (50, 75), WIDE), (1, (25, 50), WIDE), (1, (75, 100), WIDE)],
            id="blocks of rows that are no neighbours stay two",
        ),
        pytest.param(
            "column_wise",
            [(0, ALL, (0, 4)), (2, ALL, (4, 8)), (1, ALL, (8, 16))],
            [(0, ALL, (0, 4)), (0, ALL, (8, 16)), (1, ALL, (4, 8))],
            id="blocks of columns that are no neighbours stay two",
        ),
        pytest.param(
            "row_wise",
            [(0, (0, 10), WIDE), (1, (10, 90), WIDE), (2, (90, 100), WIDE)],
            [(0, (0, 90), WIDE), (1, (90, 100), WIDE)],
            id="uneven blocks",
        ),
        pytest.param(
            # Host 0 has the left columns of all rows. Joined alone, they would not be cut where the right ones are.
            "grid_shard",
            [
                (0, (0, 50), (0, 8)),
                (1, (50, 100), (0, 8)),
                (2, (0, 50), (8, 16)),
                (0, (50, 100), (8, 16)),
            ],
            [(0, (0, 50), (0, 8)), (0, (50, 100), (0, 8)), (0, (50, 100), (8, 16)), (1, (0, 50), (8, 16))],
            id="blocks of rows that other columns cut stay two",
        ),
    ],
)
def test_adjacent_shards_on_a_host_become_one(kind: str, shards: Any, expected: Any) -> None:
    hosts, result = folded(placed(TWO_HOSTS, ShardingType(kind), shards))
    assert result == expected
    assert hosts == [ROUTER, *sorted({host for host, _, _ in expected})]


def test_data_parallel_tables_are_whole_in_the_router() -> None:
    copies = [Shard(table="c", rank=rank, rows=ALL, columns=WIDE, offset_bytes=0) for rank in range(4)]
    host_of, kinds, shards = placed(TWO_HOSTS, ShardingType.TABLE_WISE, [(3, ALL, WIDE)])
    hosts, new_kinds, new_shards = fold_hosts(
        [table(), table("c")], (host_of, kinds | {"c": ShardingType.DATA_PARALLEL}, shards | {"c": copies})
    )
    assert (hosts, set(new_kinds.values())) == ([ROUTER, 0], {ShardingType.TABLE_WISE})
    assert [(new_shard.rank, new_shard.rows, new_shard.columns) for new_shard in new_shards["c"]] == [(0, ALL, WIDE)]
    assert [new_shard.rank for new_shard in new_shards["t"]] == [1]


def test_the_router_holds_what_a_plan_gives_it() -> None:
    """Its ranks may be anywhere in the plan, and hold a part of a table."""
    shards = [(0, (0, 25), WIDE), (1, (25, 50), WIDE), (2, (50, 75), WIDE), (3, (75, 100), WIDE)]
    assert folded(placed([1, ROUTER, ROUTER, 0], ShardingType.ROW_WISE, shards)) == (
        [ROUTER, 0, 1],
        [(ROUTER, (25, 75), WIDE), (0, (75, 100), WIDE), (1, (0, 25), WIDE)],
    )


def test_a_host_that_holds_nothing_is_left_out() -> None:
    shards = [(0, (0, 50), WIDE), (2, (50, 100), WIDE)]
    placement = placed([0, 1, 7], ShardingType.ROW_WISE, shards)
    assert hosts_of(placement) == [ROUTER, 0, 7]
    assert folded(placement) == ([ROUTER, 0, 1], [(0, (0, 50), WIDE), (1, (50, 100), WIDE)])


@pytest.mark.parametrize(
    ("shards", "ranks"),
    [
        pytest.param([(0, ALL, FOURTHS[0]), (2, ALL, FOURTHS[1]), (1, ALL, FOURTHS[2]), (3, ALL, FOURTHS[3])], [0, 1, 2, 3], id="columns"),
        pytest.param([(2, ALL, (0, 8)), (0, ALL, (8, 12)), (1, ALL, (12, 16))], [2, 0, 1], id="a-wider-block-stays"),
        pytest.param([(1, (0, 60), WIDE), (0, (60, 100), WIDE)], [1, 0], id="rows-of-two-sizes-stay"),
        pytest.param(
            [(0, (0, 50), (0, 8)), (1, (50, 100), (0, 8)), (0, (0, 50), (8, 16)), (1, (50, 100), (8, 16))],
            [0, 0, 1, 1],
            id="a-grid",
        ),
    ],
)  # fmt: skip
def test_equal_shards_of_a_rank_become_adjacent(shards: Any, ranks: list[int]) -> None:
    """By columns, then rows. Each rank has as many blocks of a shape as before."""
    before = placed(TWO_HOSTS, ShardingType.GRID_SHARD, shards)[2]["t"]
    after = side_by_side(before)
    assert [value.rank for value in after] == ranks
    assert {(value.rows, value.columns) for value in after} == {(value.rows, value.columns) for value in before}
    shapes = [Counter((shard.rank, shard.row_count, shard.width) for shard in shards) for shards in (before, after)]
    assert shapes[0] == shapes[1]


def _blocks(draw: st.DrawFn, size: int, step: int) -> list[Block]:
    cuts = draw(st.sets(st.integers(1, size // step - 1).map(lambda cut: cut * step), max_size=5))
    edges = [0, *sorted(cuts), size]
    return list(pairwise(edges))


@st.composite
def _placements(draw: st.DrawFn) -> Placement:
    host_of = draw(st.lists(st.integers(ROUTER, 3), min_size=1, max_size=6))
    if draw(st.booleans()):
        copies = [(rank, ALL, WIDE) for rank in range(len(host_of))]
        return placed(host_of, ShardingType.DATA_PARALLEL, copies)
    rows, columns = _blocks(draw, ROWS, 1), _blocks(draw, DIM, 4)
    rank = st.integers(0, len(host_of) - 1)
    kind = draw(st.sampled_from([kind for kind in ShardingType if kind is not ShardingType.DATA_PARALLEL]))
    return placed(host_of, kind, [(draw(rank), row, column) for row in rows for column in columns])


@given(_placements())
def test_a_folded_plan_keeps_each_element_once_on_its_host(placement: Placement) -> None:
    host_of, kinds, shards = placement
    hosts, new_kinds, new_shards = fold_hosts([table()], placement)
    assert hosts == list(range(ROUTER, len(hosts) - 1))
    assert tiling_error(new_kinds["t"], ROWS, DIM, new_shards["t"], len(hosts)) is None
    assert len(new_shards["t"]) <= len(shards["t"])
    before = hosts_of(placement)
    where = {
        (row, column): before[new_shard.rank]
        for new_shard in new_shards["t"]
        for row in range(*new_shard.rows)
        for column in range(*new_shard.columns)
    }
    for shard in shards["t"]:
        holder = ROUTER if kinds["t"] is ShardingType.DATA_PARALLEL else host_of[shard.rank]
        assert {where[row, column] for row in range(*shard.rows) for column in range(*shard.columns)} == {holder}
    assert {new_shard.rank for new_shard in new_shards["t"]} | {0} == set(range(len(hosts)))
