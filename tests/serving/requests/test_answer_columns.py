"""Answers as DataFrames."""

import sys
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from serving.client import Answer, Scores
from serving.errors import ConfigurationError
from serving.requests.answer_columns import AnswerColumns
from serving.requests.answers import JaggedRows


def answer_of(samples: int) -> AnswerColumns[Any]:
    lengths = np.array([2, 0, 1][:samples], np.int32)
    rows = np.arange(2 * lengths.sum(), dtype=np.float32).reshape(-1, 2)
    return AnswerColumns(
        {
            "scores": np.arange(samples, dtype=np.float32).reshape(samples, 1),
            "day": np.arange(samples, dtype=np.int16),
            "like": np.arange(samples) > 0,
            "genres": np.arange(4 * samples, dtype=np.float32).reshape(samples, 4),
            "halves": np.arange(2 * samples, dtype=np.float16).reshape(samples, 2),
            "all": np.arange(4 * samples, dtype=np.int64).reshape(samples, 2, 2),
            "recent": JaggedRows(rows, lengths),
            "one": JaggedRows(rows[:, :1], lengths),
        }
    )


def lists_of(answer: AnswerColumns[Any]) -> dict[str, list[Any]]:
    lists = {
        name: [values.rows(sample).tolist() for sample in range(len(values))]
        if isinstance(values, JaggedRows)
        else values.tolist()
        for name, values in answer.items()
    }
    return lists | {"scores": [score for (score,) in lists["scores"]]}


@pytest.mark.parametrize("samples", [3, 1, 0])
def test_an_answer_is_a_table_with_a_row_for_each_sample(samples: int) -> None:
    answer = answer_of(samples)
    table = answer.to_arrow()
    assert isinstance(table, pa.Table)
    assert table.to_pydict() == lists_of(answer)
    assert table.schema.field("scores").type == pa.float32()
    assert table.schema.field("genres").type == pa.list_(pa.float32(), 4)
    assert table.schema.field("halves").type == pa.list_(pa.float16(), 2)
    frame = answer.to_polars()
    assert frame.to_dict(as_series=False) == lists_of(answer)
    assert frame.schema["halves"] == pl.Array(pl.Float32, 2)
    assert frame.schema["one"] == pl.List(pl.Array(pl.Float32, 1))
    pandas = answer.to_pandas()
    assert isinstance(pandas, pd.DataFrame)
    assert {name: [np.asarray(item).tolist() for item in pandas[name]] for name in pandas.columns} == lists_of(answer)
    assert pandas["day"].dtype == np.int16


def test_numbers_are_not_copied_to_arrow() -> None:
    genres = np.ones((3, 4), np.float32)
    column = AnswerColumns({"genres": genres}).to_arrow()["genres"]
    assert np.shares_memory(column.chunk(0).values.to_numpy(), genres)


def test_the_answers_of_clients_are_tables() -> None:
    genres = np.ones((3, 4), np.float32)
    assert Answer({"genres": genres}, 7).to_polars().shape == (3, 1)
    assert Scores({"scores": np.ones((3, 1), np.float32)}, 7).to_pandas()["scores"].tolist() == [1, 1, 1]


def test_columns_of_several_lengths_are_refused_by_name() -> None:
    answer = AnswerColumns({"user": np.ones((1, 4)), "item": np.ones((3, 4))})
    for make in (answer.to_arrow, answer.to_polars, answer.to_pandas):
        with pytest.raises(
            ConfigurationError, match=r"expected as many rows in each column, got \{'user': 1, 'item': 3\}"
        ):
            make()


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ConfigurationError, match="polars: expected it to be installed: pip install polars"):
        answer_of(3).to_polars()


def test_a_column_of_an_answer_is_accepted_in_a_request() -> None:
    from serving.bundle.scores import DenseInput
    from serving.requests.dense_inputs import encode_dense

    genres = np.arange(12, dtype=np.float32).reshape(3, 4)
    answer = AnswerColumns({"genres": genres})
    for frame in (answer.to_arrow(), answer.to_polars(), answer.to_pandas()):
        assert encode_dense([DenseInput("genres", (4,))], frame)["genres"].tolist() == genres.tolist()
