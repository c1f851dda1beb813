"""`Scorer` gives the scores of `score_files`, to Arrow tables, to streams of batches, to Ray Data and to Spark."""

import logging
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from serving.batch.run import score_files
from serving.batch.scorer import Scorer
from serving.batch.sources import BundleSource
from serving.errors import ConfigurationError, InvalidRequest
from tests.support.day import day_table


@pytest.fixture
def expected(bundle: Path, day: Path, tmp_path: Path) -> Any:
    score_files(BundleSource(bundle), [str(day)], tmp_path / "scores", keep=["id"])
    return parquet.read_table(tmp_path / "scores")


def assert_same(table: Any, expected: Any) -> None:
    assert table.schema.equals(expected.schema)
    assert table["id"].equals(expected["id"])
    for name in ("like", "both"):
        numbers, right = (np.array(scores[name].to_pylist()) for scores in (table, expected))
        np.testing.assert_allclose(numbers, right, rtol=1e-6, atol=1e-6)


def test_a_table_is_scored_with_any_chunks(bundle: Path, day: Path, expected: Any) -> None:
    scorer = pickle.loads(pickle.dumps(Scorer(str(bundle), keep=["id"])))  # as engines send it to workers
    rows = parquet.read_table(day)
    assert_same(scorer(rows), expected)
    assert_same(scorer(pa.concat_tables([rows.slice(0, 7), rows.slice(7, 0), rows.slice(7)])), expected)
    (batch,) = rows.combine_chunks().to_batches()
    assert_same(scorer(batch), expected)
    assert_same(scorer(rows.slice(0, 0)), expected.slice(0, 0))


def test_a_stream_of_batches_is_scored_one_by_one(bundle: Path, day: Path, expected: Any) -> None:
    consumed = []

    def batches() -> Any:
        for batch in parquet.read_table(day).to_batches(max_chunksize=90):
            consumed.append(batch)
            yield batch

    scores = Scorer(bundle, keep=["id"])(batches())
    assert not consumed
    first = next(scores)
    assert len(consumed) == 1
    table = pa.Table.from_batches([first, *scores])
    assert table.schema.field("both").type == pa.list_(pa.float32())  # Spark has no lists of one length
    assert_same(table, expected.cast(table.schema))


def test_bad_rows_are_named_or_left_out(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = day_table(10)
    key = next(name for name in rows.column_names if name not in ("id", "day", "user", "item"))
    bad = [[10**9] if row in (3, 8) else ids for row, ids in enumerate(rows[key].to_pylist())]
    rows = rows.set_column(rows.column_names.index(key), key, pa.array(bad))
    with pytest.raises(InvalidRequest, match=rf"^row 3 of a batch: feature '{key}': expected an id in"):
        Scorer(bundle)(rows)
    with caplog.at_level(logging.WARNING):
        scores = Scorer(bundle, keep=["id"], on_error="skip")(rows)
    assert scores["id"].to_pylist() == [0, 1, 2, 4, 5, 6, 7, 9]
    assert [line.getMessage().partition(":")[0] for line in caplog.records] == [
        "row 3 of a batch has no scores",
        "row 8 of a batch has no scores",
    ]
    assert Scorer(bundle, on_error="skip")(rows.slice(3, 1)).num_rows == 0


@pytest.mark.parametrize("of_other", ["pandas", "numpy", "rows", "stream"])
def test_batches_in_formats_of_other_engines_are_refused_with_the_cure(bundle: Path, of_other: str) -> None:
    """Ray Data gives dicts of numpy by default; Spark's mapInPandas streams DataFrames."""
    table = day_table(3)
    batch: Any = {
        "pandas": table.to_pandas(),
        "numpy": {"user": np.arange(3)},
        "rows": table.to_batches(),
        "stream": iter([table.to_pandas()]),
    }[of_other]
    kind = {"numpy": "dict", "rows": "list"}.get(of_other, "DataFrame")
    with pytest.raises(ConfigurationError, match=f'Arrow\'s rows, got {kind}: .*batch_format="pyarrow".* mapInArrow'):
        list(Scorer(bundle)(batch))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": "id"}, "keep: expected Sequence[str], got 'id'"),
        ({"columns": "map.toml"}, "columns: expected Mapping[str, str | Sequence[str]] | None, got 'map.toml'"),
        ({"nulls": "drop"}, "nulls: expected 'refuse' or 'empty', got 'drop'"),
        ({"on_error": "ignore"}, "on_error: expected 'fail' or 'skip', got 'ignore'"),
    ],
)
def test_arguments_of_other_types_are_refused_by_name(bundle: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        Scorer(bundle, **arguments)


def test_batches_that_cannot_be_scored_are_refused_by_name(bundle: Path) -> None:
    with pytest.raises(ConfigurationError, match="columns: 'nobody': expected an input of the model"):
        Scorer(bundle, columns={"nobody": "y"})
    with pytest.raises(ConfigurationError, match="the batch: expected a column 'user' for the input 'user'"):
        Scorer(bundle)(day_table(3).drop_columns(["user"]))
