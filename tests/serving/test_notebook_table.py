"""What a notebook shows of bundles, manifests, plans and answers."""

import re
from pathlib import Path

import numpy as np
import pytest

from serving.bundle.load import open_bundle
from serving.notebook_table import MOST_ROWS, notebook_table
from serving.requests.answer_columns import AnswerColumns
from serving.requests.answers import JaggedRows


def cells(html: str) -> list[list[str]]:
    """The text of each row of a table, with its head."""
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_text_is_escaped_and_further_rows_are_counted() -> None:
    html = notebook_table("a <b>", ["x & y"], ([f"<i>{row}"] for row in range(MOST_ROWS + 1_234)))
    assert html.startswith("<p>a &lt;b&gt;</p><table>")
    rows = cells(html)
    assert rows[:2] == [["x &amp; y"], ["&lt;i&gt;0"]]
    assert len(rows) == 1 + MOST_ROWS + 1
    assert rows[-1] == ["… 1,234 more"]


def test_a_bundle_shows_its_tables_and_a_plan_its_shards(mixed: Path) -> None:
    bundle = open_bundle(mixed)
    html = bundle._repr_html_()
    assert str(mixed) in html
    assert bundle.manifest._repr_html_() in html
    head, *rows = cells(html)
    assert head == ["table", "rows", "dim", "dtype", "bytes", "pooling", "features"]
    for table, row in zip(bundle.manifest.tables, rows, strict=True):
        size = table.rows * table.row_bytes
        assert row[:5] == [table.name, f"{table.rows:,}", str(table.dim), table.dtype.value.lower(), f"{size:,}"]
    shards = cells(bundle.manifest.plan._repr_html_())[1:]
    assert [row[0] for row in shards] == [shard.table for shard in bundle.manifest.plan.shards]


def test_an_answer_shows_shapes_and_first_numbers() -> None:
    rows = JaggedRows(np.ones((3, 2), np.float16), np.array([2, 0, 1, 0], np.int32))
    answer = AnswerColumns({"a<b": np.arange(10, dtype=np.float32).reshape(5, 2), "seen": rows})
    assert cells(answer._repr_html_())[1:] == [
        ["a&lt;b", "[5, 2]", "float32", "0, 1, 2, 3, …"],
        ["seen", "[3, 2], rows of 4 samples", "float16", "1, 1, 1, 1, …"],
    ]


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.float32])
def test_an_answer_of_any_dtype_is_shown(dtype: type) -> None:
    ((_, shape, _, numbers),) = cells(AnswerColumns({"likes": np.zeros((0,), dtype)})._repr_html_())[1:]
    assert (shape, numbers) == ("[0]", "")
    assert ", 1" in AnswerColumns({"likes": np.array([0, 1]).astype(dtype)})._repr_html_()
