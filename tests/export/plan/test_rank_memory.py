"""What a rank can hold is taken at its word, to the byte."""

from collections.abc import Sequence

import pytest

from export.errors import PlanError
from export.plan.planner import check_fits
from serving.bundle.formats import WeightDtype
from serving.bundle.plan import ROUTER, Plan, Rank, ShardingType
from serving.bundle.tables import IdPolicy, Pooling, Table

# INT8 rows of dim 16 are 20 bytes: 2,000, 1,000 and 200 bytes.
_TABLES = tuple(
    Table(
        name=name,
        rows=rows,
        dim=16,
        pooling=Pooling.SUM,
        weighted=False,
        dtype=WeightDtype.INT8,
        id_policy=IdPolicy.ERROR,
    )
    for name, rows in (("a", 100), ("b", 50), ("c", 10))
)


def _rank(number: int) -> Rank:
    return Rank(host=0, device="cpu", weights_file=f"weights.{number}.bin")


def _plan(*ranks: Rank) -> Plan:
    """Tables c and a are on rank 0, b is on rank 1."""
    return Plan(
        sharding={table.name: ShardingType.TABLE_WISE for table in _TABLES},
        ranks=ranks,
        shards=tuple(table.whole_shard(rank) for table, rank in zip(_TABLES, (0, 1, 0), strict=True)),
        row_alignment=1,
    )


@pytest.mark.parametrize(
    "limits", [(2200, 1000), (2200, None), (None, 1000), (None, None), (10_000, 10_000)], ids=str
)
def test_tables_that_fit_to_the_byte_are_accepted(limits: Sequence[int | None]) -> None:
    check_fits(_TABLES, _plan(_rank(0), _rank(1)), limits)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            (2199, 1000),
            "rank 0 would hold 2,200 bytes, 1 more than its 2,199: its largest shard is 2,000 bytes of table 'a': "
            "give more --memory-per-rank or --ranks",
        ),
        (
            (None, 999),
            "rank 1 would hold 1,000 bytes, 1 more than its 999: its largest shard is 1,000 bytes of table 'b': "
            "give more --memory-per-rank or --ranks",
        ),
        (
            (0, 0),
            "rank 0 would hold 2,200 bytes, 2,200 more than its 0: its largest shard is 2,000 bytes of table 'a': "
            "give more --memory-per-rank or --ranks",
        ),
    ],
    ids=["the_first", "the_second", "nothing"],
)
def test_a_byte_more_is_refused(limits: Sequence[int | None], message: str) -> None:
    with pytest.raises(PlanError) as refused:
        check_fits(_TABLES, _plan(_rank(0), _rank(1)), limits)
    assert str(refused.value) == message


def test_errors_name_the_router_or_the_host() -> None:
    plan = _plan(
        Rank(host=ROUTER, device="cpu", weights_file="weights.0.bin"), Rank(host=7, device="cpu", weights_file=None)
    )
    with pytest.raises(PlanError) as refused:
        check_fits(_TABLES, plan, (2199, 1000))
    assert str(refused.value) == (
        "the router would hold 2,200 bytes, 1 more than its 2,199: its largest shard is 2,000 bytes of table 'a': "
        "give more --router-memory, or cut tables over hosts"
    )
    with pytest.raises(PlanError) as refused:
        check_fits(_TABLES, plan, (2200, 999))
    assert str(refused.value) == (
        "host 7 would hold 1,000 bytes, 1 more than its 999: its largest shard is 1,000 bytes of table 'b': "
        "give more --memory-per-rank or --ranks"
    )
