"""A plan that somebody wrote is done as it says, or refused by name."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from export import Sharding
from export.errors import PlanError
from serving.engine import Engine
from serving.errors import ConfigurationError
from tests.support.models import MIXED, random_bags
from tests.support.sharded_exports import sharded

EXPLICIT: dict[str, Any] = {
    "ranks": [{"host": 0}, {"host": 3}],
    "tables": {
        "user": {
            "sharding_type": "row_wise",
            "shards": [
                {"rank": 1, "rows": [0, 7], "columns": [0, 16]},
                {"rank": 0, "rows": [7, 500], "columns": [0, 16]},
            ],
        },
        "item": {
            "sharding_type": "column_wise",
            "shards": [
                {"rank": 0, "rows": [0, 300], "columns": [20, 32]},
                {"rank": 0, "rows": [0, 300], "columns": [0, 20]},
            ],
        },
        "genre": {
            "sharding_type": "data_parallel",
            "shards": [
                {"rank": 0, "rows": [0, 20], "columns": [0, 8]},
                {"rank": 1, "rows": [0, 20], "columns": [0, 8]},
            ],
        },
        "word": {"sharding_type": "table_wise", "shards": [{"rank": 1, "rows": [0, 1000], "columns": [0, 24]}]},
    },
}


def written(tmp_path: Path, plan: Any) -> Sharding:
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return Sharding(plan=tmp_path / "plan.json")


def test_an_explicit_plan_is_done_as_it_says(tmp_path: Path, one_rank: Engine) -> None:
    """Uneven blocks of rows, columns in any order on one rank."""
    engine = sharded(tmp_path, written(tmp_path, EXPLICIT))
    plan = engine.bundle.manifest.plan
    assert [rank.host for rank in plan.ranks] == [0, 3]
    assert [(s.table, s.rank, list(s.rows), list(s.columns)) for s in plan.shards] == [
        (table, shard["rank"], shard["rows"], shard["columns"])
        for table in ("user", "item", "genre", "word")
        for shard in EXPLICIT["tables"][table]["shards"]
    ]
    bags = random_bags(np.random.default_rng(3), MIXED, 50)
    for feature, rows in engine.lookup(bags).items():
        np.testing.assert_allclose(rows, one_rank.lookup(bags)[feature], rtol=1e-5, atol=1e-5)


def _edited(edit: str) -> Any:
    plan = msgspec.json.decode(msgspec.json.encode(EXPLICIT))
    exec(edit, {"plan": plan, "tables": plan["tables"]})
    return plan


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param("del tables['word']", "table 'word': expected it in the plan", id="a-table-missing"),
        pytest.param("tables['x'] = tables['word']", "table 'x': the model has no such table", id="unknown-table"),
        pytest.param("tables['word']['shards'][0]['rank'] = 2", "no rank 2: expected one of 2", id="no-such-rank"),
        pytest.param(
            "tables['word']['shards'][0]['rows'] = [0, 999]",
            r"'word' \(1000 × 24\): its shards do not cover rows exactly once: look at row 999",
            id="rows-left-over",
        ),
        pytest.param(
            "tables['user']['shards'][0]['rows'] = [0, 8]",
            "do not cover rows exactly once: look at row 7",
            id="rows-twice",
        ),
        pytest.param(
            "tables['item']['shards'][0]['columns'] = [24, 32]",
            "do not cover columns exactly once: look at column 20",
            id="columns-left-over",
        ),
        pytest.param(
            "tables['item']['shards'][0]['columns'][0] = tables['item']['shards'][1]['columns'][1] = 18",
            r"columns cut at multiples of 4, got \[18, 32\]",
            id="columns-cut-inside-a-byte",
        ),
        pytest.param("tables['genre']['shards'].pop()", "whole copy on each of 2 ranks", id="a-copy-missing"),
        pytest.param("tables['word']['shards'] = []", "do not cover columns", id="no-shards"),
        pytest.param("tables['word']['sharding_type'] = 'x'", "Invalid enum value 'x'", id="unknown-type"),
        pytest.param("plan['ranks'] = []", "ranks: expected at least one", id="no-ranks"),
        pytest.param("del plan['tables']", "missing required field `tables`", id="not-a-plan"),
    ],
)
def test_an_invalid_plan_file_is_refused_by_name(tmp_path: Path, edit: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        sharded(tmp_path, written(tmp_path, _edited(edit)))
    assert not (tmp_path / "r").exists()


def test_explicit_plan_that_does_not_fit(tmp_path: Path) -> None:
    plan = written(tmp_path, EXPLICIT).plan
    with pytest.raises(
        PlanError, match=r"rank 0 would hold 17,380 bytes, 7,380 more than its 10,000: .* 9,860 bytes of table 'user'"
    ):
        sharded(tmp_path, Sharding(plan=plan, memory_bytes=10_000))
