"""Scores of rows with histories: an output with a row for each id is a column of lists."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from export import export_model
from serving.batch.run import score_files
from serving.batch.sources import BundleSource
from serving.engine import Engine
from tests.support.candidate_model import MODULE, ask, example
from tests.support.day import write_day
from tests.support.scored_models import EXACT


def test_a_per_id_output_is_a_column_of_lists(tmp_path: Path) -> None:
    bundle = export_model(MODULE, tmp_path / "r", "m", EXACT, example=example())
    bags, dense = ask(np.random.default_rng(0), 50)
    columns: dict[str, Any] = {name: [*map(list, column)] for name, column in bags.items()}
    for name, rows in dense.items():
        columns[name] = [np.asarray(row).tolist() for row in rows]
    table = pa.table(columns)
    day = write_day(tmp_path / "day.parquet", table, row_group=20)
    score_files(BundleSource(bundle), [str(day)], tmp_path / "scores")
    scores = parquet.read_table(tmp_path / "scores")
    assert scores.num_rows == 50
    with Engine.open(bundle) as engine:
        expected = engine.score(bags, dense)
    for name, key in (("user", None), ("score", "target"), ("odd", "seen")):
        column = scores[name].to_pylist()
        if key is not None:
            assert [*map(len, column)] == [*map(len, bags[key])]
            column = [row for rows in column for row in rows]
        np.testing.assert_allclose(np.array(column).ravel(), np.ravel(expected[name]), rtol=1e-5, atol=1e-6)
