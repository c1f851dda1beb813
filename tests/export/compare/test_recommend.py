"""A sharding type and a dtype for each table, and why."""

from typing import Any

import pytest

from export.compare.recommend import recommend
from export.compare.study import DtypeReport
from export.plan.sharding import Sharding
from serving.bundle.tables import Table
from tests.support.models import int8_table


def advised(rows: int, dim: int, rows_of_other: int, **settings: Any) -> tuple[str, str]:
    """What a table of a model is recommended that has a table of `others` rows besides."""
    (table, *_), readers = tables_of([("t", rows, dim), ("u", rows_of_other, 64)])
    everything, _ = tables_of([("t", rows, dim), ("u", rows_of_other, 64)])
    reports = [DtypeReport("int4", 10, 0.1, 0.1, 0.99), DtypeReport("int8", 20, 0.1, 0.1, 0.9999)]
    factors = {"t": settings.pop("factor", 1)}
    sharding = Sharding(pooling_factors=factors, **settings)
    advice = recommend(everything, readers, sharding, {"t": reports, "u": reports[:1]})
    assert (advice["t"].dtype, advice["u"].dtype) == ("int8", "int4")
    assert "no compared dtype has" in advice["u"].dtype_reason
    return advice[table.name].sharding_type, advice[table.name].reason


def tables_of(shapes: list[tuple[str, int, int]]) -> tuple[list[Table], dict[str, int]]:
    tables = [int8_table(name, rows, dim) for name, rows, dim in shapes]
    return tables, {name: 1 for name, _, _ in shapes}


@pytest.mark.parametrize(
    ("rows", "dim", "rows_of_other", "settings", "kind", "because"),
    [
        pytest.param(100, 16, 1_000_000, {"ranks": 4}, "data_parallel", "2.0 kB is little", id="small"),
        pytest.param(100_000, 64, 1_000_000, {"ranks": 4}, "table_wise", "fit into a rank's share", id="fits"),
        pytest.param(1_000_000, 64, 10, {"ranks": 4, "factor": 100}, "row_wise", "exceed a rank's share", id="ids"),
        pytest.param(1_000_000, 128, 10, {"ranks": 4}, "column_wise", "by columns a sample moves 544", id="sums"),
        pytest.param(
            1_000_000, 64, 1_500_000, {"ranks": 8, "ranks_per_host": 4, "factor": 100}, "table_row_wise",
            "the ranks of one host hold it", id="hosts",
        ),
        pytest.param(1_000_000, 64, 10, {"ranks": 1}, "table_wise", "there is one rank", id="one rank"),
        pytest.param(
            100_000, 64, 1_000_000, {"ranks": 4, "memory_bytes": 1_000_000, "factor": 100}, "row_wise",
            "exceed", id="memory",
        ),
    ],
)  # fmt: skip
def test_recommendations_follow_bytes_and_traffic(
    rows: int, dim: int, rows_of_other: int, settings: dict[str, Any], kind: str, because: str
) -> None:
    kind_found, reason = advised(rows, dim, rows_of_other, **settings)
    assert (kind_found, because in reason) == (kind, True), reason
