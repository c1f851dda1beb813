"""Columns by the inputs that they are for."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from serving.batch.columns import BatchColumns, ModelInputs, read_column_names
from serving.errors import ConfigurationError
from serving.requests.encoding import encode

INPUTS = ModelInputs(keys=("x", "w"), weighted=("w",), dense=("price",), outputs={"score": None})
BATCH = pa.RecordBatch.from_pydict(
    {
        "id": [7, 8],
        "x": [[1], [2, 3]],
        "w": [[4], []],
        "w.weights": [[0.5], []],
        "price": [1.0, 2.0],
        "tags": [[9], [9]],
        "p0": [3.0, 4.0],
        "p1": [5.0, 6.0],
    }
)


def test_columns_are_found_by_the_names_of_inputs() -> None:
    columns = BatchColumns(INPUTS, {}, ["id"])
    assert columns.of_file("day", BATCH.schema) == ["x", "w", "price", "w.weights", "id"]
    features, dense = columns.request(BATCH)
    tensors = encode(features, ["w"])
    assert tensors.values.tolist() == [1, 2, 3, 4]
    assert tensors.weights is not None
    assert tensors.weights.tolist() == [1, 1, 1, 0.5]
    assert dense["price"].to_pylist() == [1.0, 2.0]


def test_other_names_and_several_columns_are_taken() -> None:
    columns = BatchColumns(INPUTS, {"x": "tags", "price": ["p0", "p1"], "w.weights": "w.weights"}, [])
    assert columns.of_file("day", BATCH.schema) == ["tags", "w", "p0", "p1", "w.weights"]
    features, dense = columns.request(BATCH)
    assert features["x"].to_pylist() == [[9], [9]]
    assert dense["price"].to_pylist() == [{"p0": 3.0, "p1": 5.0}, {"p0": 4.0, "p1": 6.0}]


@pytest.mark.parametrize(
    ("names", "keep", "message"),
    [
        ({"y": "x"}, [], r"columns: 'y': expected an input of the model, one of 'x', 'w', 'w\.weights', 'price'"),
        ({"x": ["tags", "w"]}, [], "columns: 'x': expected one column: only a dense input has several"),
        ({}, ["score"], "keep: 'score': expected another column: an output of the model has this name"),
        ({}, ["id", "id"], "keep: 'id': expected another column: it is named twice"),
    ],
)
def test_other_names_are_refused(names: Any, keep: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BatchColumns(INPUTS, names, keep)


@pytest.mark.parametrize(
    ("names", "keep", "message"),
    [
        (
            {"x": "y"},
            [],
            "day: expected a column 'y' for the input 'x': name another in `columns`, got the columns 'id'",
        ),
        ({"price": ["p0", "p2"]}, [], "day: expected a column 'p2' for the input 'price'"),
        ({"w.weights": "v"}, [], r"day: expected a column 'v' for the input 'w\.weights'"),
        ({}, ["ts"], "day: expected a column 'ts' for `keep`"),
    ],
)
def test_a_file_without_a_column_is_refused(names: Any, keep: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BatchColumns(INPUTS, names, keep).of_file("day", BATCH.schema)


def test_a_file_with_a_column_twice_is_refused() -> None:
    schema = pa.schema([*BATCH.schema, pa.field("x", pa.int64())])
    with pytest.raises(
        ConfigurationError, match=r"day: expected a column 'x' for the input 'x'.*, got 2 of this name"
    ):
        BatchColumns(INPUTS, {}, []).of_file("day", schema)


def test_names_are_read_from_toml(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text('x = "tags"\n"w.weights" = "v"\nprice = ["p0", "p1"]\n')
    assert read_column_names(tmp_path / "map.toml") == {"x": "tags", "w.weights": "v", "price": ["p0", "p1"]}
    assert read_column_names(None) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x =", r"map\.toml: expected TOML"),
        ("x = 1", r"map\.toml: x: expected a column, or a list of columns, got 1"),
        ("x = []", r"map\.toml: x: expected a column, or a list of columns, got \[\]"),
        ("[w]\nweights = 'v'", r"map\.toml: w: expected a column, or a list of columns, got \{'weights': 'v'\}"),
    ],
)
def test_other_toml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "map.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_column_names(tmp_path / "map.toml")


_WEIGHTED = pa.list_(pa.struct([("id", pa.int64()), ("weight", pa.float32())]))


@pytest.mark.parametrize(
    ("column", "kind", "message"),
    [
        ("x", pa.string(), "day: column 'x': expected integers or lists of integers for the feature 'x', got string"),
        ("x", pa.float64(), "expected integers or lists of integers for the feature 'x', got double"),
        ("x", pa.list_(pa.float32()), "expected integers or lists of integers for the feature 'x', got list<"),
        ("x", pa.list_(pa.list_(pa.int64())), "expected integers or lists of integers"),
        ("x", pa.dictionary(pa.int32(), pa.string()), "expected integers or lists of integers"),
        ("x", pa.timestamp("s"), "expected integers or lists of integers"),
        ("w.weights", pa.list_(pa.string()), "column 'w.weights': expected numbers or lists of numbers"),
        ("price", pa.string(), "expected numbers or lists of numbers for the input 'price', got string"),
        ("price", pa.decimal128(5, 2), "expected numbers or lists of numbers for the input 'price', got decimal"),
    ],
)
def test_a_column_type_that_cannot_be_scored_is_refused(column: str, kind: Any, message: str) -> None:
    schema = BATCH.schema.set(BATCH.schema.get_field_index(column), pa.field(column, kind))
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        BatchColumns(INPUTS, {}, []).of_file("day", schema)


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("x", pa.uint8()),
        ("x", pa.bool_()),
        ("x", pa.null()),
        ("x", pa.list_(pa.null())),
        ("x", pa.large_list(pa.int32())),
        ("x", pa.list_view(pa.int64())),
        ("x", pa.list_(pa.int64(), 3)),
        ("x", pa.dictionary(pa.int32(), pa.int64())),
        ("x", pa.run_end_encoded(pa.int32(), pa.int64())),
        ("x", _WEIGHTED),
        ("price", pa.list_(pa.float64(), 1)),
        ("price", pa.int8()),
        ("price", pa.null()),
    ],
)
def test_column_types_that_can_be_scored_are_accepted(column: str, kind: Any) -> None:
    schema = BATCH.schema.set(BATCH.schema.get_field_index(column), pa.field(column, kind))
    assert column in BatchColumns(INPUTS, {}, []).of_file("day", schema)


def test_weighted_ids_need_a_column_of_weights_or_structs() -> None:
    schema = BATCH.schema.remove(BATCH.schema.get_field_index("w.weights"))
    message = "day: column 'w': expected lists of structs with `id` and `weight`, or another column 'w.weights', for"
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        BatchColumns(INPUTS, {}, []).of_file("day", schema)
    weighted = schema.set(schema.get_field_index("w"), pa.field("w", _WEIGHTED))
    assert "w" in BatchColumns(INPUTS, {}, []).of_file("day", weighted)
