"""Whole DataFrames, by the names of their columns."""

import subprocess
import sys
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from serving.bundle.scores import DenseInput
from serving.errors import InvalidRequest
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode

TABLE = pa.table({"day": ["mon", "tue"], "a": [[3, 5], []], "b": [7, 8], "price": [0.5, 2.0], "click": [0, 1]})
FRAMES = {
    "pyarrow Table": TABLE,
    "pyarrow RecordBatch": TABLE.to_batches()[0],
    "polars": pl.from_arrow(TABLE),
    "pandas": TABLE.to_pandas(),
    "pandas of Arrow": TABLE.to_pandas(types_mapper=pd.ArrowDtype).set_index(pd.Index([7, 3])),
}
PRICE = DenseInput("price", ())
frames = pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)


@frames
def test_feature_columns_are_ids_and_other_columns_are_ignored(frame: Any) -> None:
    tensors = encode(frame, keys=["b", "a", "c"])
    assert tensors.features == ("a", "b")
    assert tensors.values.tolist() == [3, 5, 7, 8]
    assert tensors.lengths.tolist() == [2, 0, 1, 1]
    assert encode(frame[["a", "b"]] if hasattr(frame, "loc") else frame.select(["a", "b"])).features == ("a", "b")


@frames
def test_the_columns_of_dense_inputs_are_taken(frame: Any) -> None:
    assert encode_dense([PRICE], frame)["price"].tolist() == [0.5, 2.0]
    assert encode_dense([PRICE], {}, frame=frame)["price"].tolist() == [0.5, 2.0]
    assert encode_dense([PRICE], {"price": [1.0, 3.0]}, frame=frame)["price"].tolist() == [1.0, 3.0]
    assert encode_dense([DenseInput("age", ())], frame) == {}


@frames
def test_a_frame_without_a_feature_is_refused(frame: Any) -> None:
    with pytest.raises(InvalidRequest, match="features: expected a column for at least one of 'x', 'y', got none"):
        encode(frame, keys=["x", "y"])


def test_a_column_of_weights_is_named_after_its_feature() -> None:
    table = pa.table({"a": [[3, 5], [1]], "a.weights": [[0.5, 2.0], [3.0]], "b": [7, 8], "b.weights": [1.0, 1.0]})
    for frame in (table, pl.from_arrow(table), table.to_pandas()):
        tensors = encode(frame, ["a"], keys=["a", "b"])
        assert tensors.features == ("a", "b")
        assert tensors.weights is not None
        assert tensors.weights.tolist() == [0.5, 2.0, 3.0, 1.0, 1.0]
    with pytest.raises(InvalidRequest, match="feature 'a': expected a weight for each id"):
        encode(table.select(["a", "b"]), ["a"], keys=["a", "b"])


def test_two_columns_of_one_name_are_refused_where_they_are_used() -> None:
    twice = pd.DataFrame([[1, 2, 3]], columns=["a", "a", "b"])
    for frame in (twice, pa.table([[1], [2], [3]], names=["a", "a", "b"])):
        with pytest.raises(InvalidRequest, match="column 'a': expected one of this name, got 2"):
            encode(frame, keys=["a", "b"])
        assert encode(frame, keys=["b"]).values.tolist() == [3]


def test_the_libraries_of_columns_are_not_imported() -> None:
    code = (
        "import sys, serving.client, serving.requests.columns\n"
        "from serving.requests.encoding import encode\n"
        "encode({'a': [[1]], 'b': [2]})\n"
        "print({'pandas', 'polars', 'pyarrow'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_polars_alone_is_enough() -> None:
    """Its columns are read without pyarrow, which is not installed everywhere."""
    code = (
        "import sys; sys.modules['pyarrow'] = sys.modules['pandas'] = None\n"
        "import polars as pl\n"
        "from serving.requests.encoding import encode\n"
        "frame = pl.DataFrame({'a': [[3, 5], None], 'b': [7, 8], 'c': [[1, 2], [3, 4]]}, schema_overrides={'c': pl.Array(pl.Int8, 2)})\n"
        "print(encode(frame, nulls='empty', keys='abc').values.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[3, 5, 7, 8, 1, 2, 3, 4]\n"
