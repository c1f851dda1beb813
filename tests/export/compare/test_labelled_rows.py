"""Labelled rows are read as they are, or refused by the name of their file and row."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from export.compare.labelled_rows import BATCH_ROWS, LabelledBatch, LabelledColumns, LabelledRows
from serving.errors import ConfigurationError, EnvironmentMismatch

COLUMNS = LabelledColumns(features=["item"], dense=["price"], weighted=[], outputs=["a", "b"], output="a")
WEIGHTED = replace(COLUMNS, weighted=["item"])


def write(path: Path, labels: Any, **more: Any) -> Path:
    rows = len(labels)
    columns = {
        "item": [[number] for number in range(rows)],
        "price": np.arange(rows, dtype=np.float32),
        "other": labels,
    }
    pq.write_table(pa.table({**columns, "click": labels, **more}), path, row_group_size=1500)
    return path


def batches_of(path: Path, label: str | None = "click", columns: LabelledColumns = COLUMNS) -> list[LabelledBatch]:
    return [*LabelledRows(path, label).open(columns)()]


def test_rows_are_read_in_batches_of_the_models_columns(tmp_path: Path) -> None:
    labels = np.arange(BATCH_ROWS + 100) % 3 == 0
    batches = batches_of(write(tmp_path / "day.parquet", pa.array(labels.astype(np.int8))))
    assert max(batch.labels.size for batch in batches) <= BATCH_ROWS
    np.testing.assert_array_equal(np.concatenate([batch.labels for batch in batches]), labels)
    assert [(*batch.features, *batch.dense) for batch in batches] == [("item", "price")] * len(batches)
    ids = [bag for batch in batches for bag in batch.features["item"].to_pylist()]
    assert ids == [[number] for number in range(labels.size)]
    assert batches[0].where.endswith(f"day.parquet: row group 0, rows 0 to {batches[0].labels.size - 1}")


def test_parquet_files_of_a_folder_are_read_in_order_of_name(tmp_path: Path) -> None:
    (tmp_path / "day").mkdir()
    write(tmp_path / "day" / "1.parquet", [True] * 3)
    write(tmp_path / "day" / "0.parquet", [False] * 2)
    assert [batch.labels.tolist() for batch in batches_of(tmp_path / "day")] == [[False] * 2, [True] * 3]


def test_a_column_of_weights_goes_with_its_feature(tmp_path: Path) -> None:
    weights = pa.array([[0.5], [2.0]])
    (batch,) = batches_of(write(tmp_path / "day.parquet", [0, 1], **{"item.weights": weights}), columns=WEIGHTED)
    assert batch.features["item"]["weights"].to_pylist() == [[0.5], [2.0]]


def test_inputs_are_read_from_columns_of_other_names(tmp_path: Path) -> None:
    day = write(tmp_path / "day.parquet", [0, 1], id=pa.array([[5], [6]]), w=pa.array([[0.5], [2.0]]), age=[7.0, 8.0])
    names = {"item": "id", "item.weights": "w", "price": ["price", "age"]}
    (batch,) = LabelledRows(day, "click", names).open(WEIGHTED)()
    assert batch.features["item"]["values"].to_pylist() == [[5], [6]]
    assert batch.features["item"]["weights"].to_pylist() == [[0.5], [2.0]]
    assert batch.dense["price"].to_pylist() == [{"price": 0.0, "age": 7.0}, {"price": 1.0, "age": 8.0}]


def test_names_of_columns_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    day = write(tmp_path / "day.parquet", [0, 1])
    with pytest.raises(ConfigurationError, match="columns: 'itme': expected an input of the model, one of 'item'"):
        LabelledRows(day, "click", {"itme": "item"}).open(COLUMNS)
    with pytest.raises(
        ConfigurationError, match="expected a column 'id' for the input 'item': name another in `columns`"
    ):
        LabelledRows(day, "click", {"item": "id"}).open(COLUMNS)
    with pytest.raises(ConfigurationError, match="columns: expected a parquet file"):
        LabelledRows(tmp_path / "day.jsonl", None, {"item": "id"})


@pytest.mark.parametrize("kind", [pa.bool_(), pa.int64(), pa.uint8(), pa.float32()])
def test_labels_of_any_numbers_are_taken(tmp_path: Path, kind: pa.DataType) -> None:
    labels = pa.array([0, 1, 1]).cast(kind)
    assert [batch.labels.tolist() for batch in batches_of(write(tmp_path / "day.parquet", labels))] == [
        [False, True, True]
    ]


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        pytest.param([0, 1] * 2000 + [None], "row group 2, row 1000: column 'click': expected the label 0 or 1, got None", id="null"),
        pytest.param([0] * 2500 + [2], "row group 1, row 1000: column 'click': expected the label 0 or 1, got 2", id="two"),
        pytest.param([0.0, 0.5], "row group 0, row 1: column 'click': expected the label 0 or 1, got 0.5", id="a share"),
        pytest.param([0.0, float("nan")], "row group 0, row 1: column 'click': expected the label 0 or 1, got nan", id="NaN"),
        pytest.param([True, None], "row group 0, row 1: column 'click': expected the label 0 or 1, got None", id="null boolean"),
        pytest.param(["no", "yes"], "expected labels 0 and 1, got string", id="text"),
        pytest.param([[0], [1]], "expected labels 0 and 1, got list", id="lists"),
    ],
)  # fmt: skip
def test_another_label_is_refused_by_its_row(tmp_path: Path, labels: Sequence[Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match="column 'click'") as refused:
        batches_of(write(tmp_path / "day.parquet", pa.array(labels)))
    assert why in str(refused.value)
    assert "day.parquet" in str(refused.value)


def test_unreadable_rows_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    (tmp_path / "empty").mkdir()
    day = write(tmp_path / "day.parquet", [0, 1])
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(day.read_bytes()[:-20])
    for path in (tmp_path / "text.parquet", cut):
        with pytest.raises(ConfigurationError, match=f"{path.name}: expected a parquet file that can be read"):
            batches_of(path)
    with pytest.raises(ConfigurationError, match=r"none\.parquet: expected a file or folder, found none"):
        batches_of(tmp_path / "none.parquet")
    with pytest.raises(ConfigurationError, match="empty: expected files"):
        batches_of(tmp_path / "empty")
    with pytest.raises(ConfigurationError, match="expected a column 'bought', got the columns 'item', 'price'"):
        batches_of(day, "bought")


def test_parquet_needs_a_label_and_json_lines_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected --label with it"):
        LabelledRows(tmp_path / "day.parquet", None)
    with pytest.raises(ConfigurationError, match="label: expected a parquet file"):
        LabelledRows(tmp_path / "day.jsonl", "click")


@pytest.mark.parametrize("label", [[0, 1], {"a": [0, 1], "b": [1, 1]}], ids=["for all", "by output"])
def test_json_lines_are_taken_as_export_takes_them(tmp_path: Path, label: Any) -> None:
    request = {"features": {"item": [[3], [5]]}, "dense": {"price": [1, 2]}, "label": label}
    (tmp_path / "day.jsonl").write_text(json.dumps(request) + "\n")
    (batch,) = batches_of(tmp_path / "day.jsonl", None)
    assert (batch.features, batch.dense) == (request["features"], request["dense"])
    assert batch.labels.tolist() == [False, True]


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ({"b": [0, 1]}, "expected labels for output 'a'"),
        ({"c": [0, 1]}, "expected one of the outputs 'a', 'b'"),
        ([0, 3], "expected 0 or 1"),
        (1, "expected 0 or 1"),
    ],
)
def test_json_lines_without_labels_for_the_output_are_refused(tmp_path: Path, label: Any, why: str) -> None:
    (tmp_path / "day.jsonl").write_text(json.dumps({"features": {"item": [[3], [5]]}, "label": label}) + "\n")
    with pytest.raises(ConfigurationError, match="line 1") as refused:
        batches_of(tmp_path / "day.jsonl", None)
    assert why in str(refused.value)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day = write(tmp_path / "day.parquet", [0, 1])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(EnvironmentMismatch, match=r"pip install 'tbe-serving\[batch\]'"):
        batches_of(day)
