"""Scores in folders by the values of columns, as other programs read them."""

import datetime
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from serving.batch import part_scores, partitions
from serving.batch.partitions import partition_folder, split
from serving.batch.run import score_files
from serving.batch.sources import BundleSource
from serving.errors import ConfigurationError, InvalidRequest
from tests.support.day import ROW_GROUP, ROWS, contents, day_table, partitioned_day, write_day
from tests.support.killed_batches import kill_folder_runs
from tests.support.stopped_runs import Stopped, stop_after

KEEP = ["id", "day", "country"]
BY = ["day", "country"]
NULL = "__HIVE_DEFAULT_PARTITION__"
TYPES = pa.schema({"day": pa.date32(), "country": pa.string()})


@pytest.fixture
def days(tmp_path: Path) -> Path:
    return write_day(tmp_path / "days.parquet", partitioned_day())


def test_pyarrow_and_polars_read_the_scores_and_partition_columns(bundle: Path, days: Path, tmp_path: Path) -> None:
    source, out = BundleSource(bundle), tmp_path / "scores"
    summary = score_files(source, [str(days)], out, keep=KEEP, partition_by=BY)
    assert (summary.rows, summary.scored_rows, summary.errors) == (ROWS, ROWS, None)
    score_files(source, [str(days)], tmp_path / "whole", keep=KEEP)
    expected: Any = parquet.read_table(tmp_path / "whole")
    assert {path.name for path in (out / "day=2026-11-01").iterdir()} == {
        "country=DE", "country=a%2Fb%3Dc%20%25%20é", f"country={NULL}"
    }  # fmt: skip
    assert parquet.read_schema(next(out.rglob("*.parquet"))).names == ["id", "like", "both"]
    hive = pyarrow.dataset.partitioning(TYPES, flavor="hive")
    by_pyarrow: Any = pyarrow.dataset.dataset(out, partitioning=hive).to_table().sort_by("id")
    by_polars = pl.read_parquet(out, hive_partitioning=True, try_parse_hive_dates=True).sort("id").to_arrow()
    for table in (by_pyarrow, by_polars):
        for name in expected.column_names:
            assert table[name].to_pylist() == expected[name].to_pylist(), name
    assert score_files(source, [str(days)], out, keep=KEEP, partition_by=BY).scored_rows == 0
    with pytest.raises(
        ConfigurationError, match="has the scores of another run: its inputs or options differ: name another folder"
    ):
        score_files(source, [str(days)], out, keep=KEEP, partition_by=["day"])


def test_an_interrupted_run_resumes(bundle: Path, days: Path, tmp_path: Path) -> None:
    source, out = BundleSource(bundle), tmp_path / "scores"
    score_files(source, [str(days)], tmp_path / "undisturbed", keep=KEEP, partition_by=BY)
    with pytest.raises(Stopped):
        score_files(source, [str(days)], out, keep=KEEP, partition_by=BY, progress=stop_after(3 * ROW_GROUP + 1))
    hidden = tmp_path / ".scores.scoring"
    assert sorted(path.name for path in (hidden / "finished").iterdir()) == [
        f"part-{number:05}.parquet" for number in range(3)
    ]
    folder = next(hidden.glob("scores/*/*"))
    for leftover in ("part-00003.parquet", ".part-00003.parquet.abc", "part-00099.parquet"):
        (folder / leftover).write_bytes(b"half")
    (hidden / "finished" / ".part-00003.parquet.abc").touch()
    with pytest.raises(ConfigurationError, match=r"--partition-by changed: it was \['day', 'country'\], and is None"):
        score_files(source, [str(days)], out, keep=KEEP)
    summary = score_files(source, [str(days)], out, keep=KEEP, partition_by=BY, workers=2)
    assert summary.scored_rows == ROWS - 3 * ROW_GROUP
    assert contents(out) == contents(tmp_path / "undisturbed")
    assert not hidden.exists()


def test_bad_rows_are_left_out(bundle: Path, tmp_path: Path) -> None:
    table = partitioned_day()
    column = table["x"].to_pylist()
    column[3], column[200] = [50], [50]
    day = write_day(tmp_path / "day.parquet", table.set_column(table.column_names.index("x"), "x", pa.array(column)))
    source, out = BundleSource(bundle), tmp_path / "scores"
    with pytest.raises(Stopped):
        score_files(
            source, [str(day)], out, keep=KEEP, partition_by=BY, on_error="skip", progress=stop_after(4 * ROW_GROUP)
        )
    with pytest.raises(InvalidRequest, match="row group 0, row 3: "):
        score_files(source, [str(day)], out, keep=KEEP, partition_by=BY)
    summary = score_files(source, [str(day)], out, keep=KEEP, partition_by=BY, on_error="skip")
    assert summary.skipped_rows == 2
    ids = pyarrow.dataset.dataset(out).to_table(["id"])["id"].to_pylist()
    assert sorted(ids) == [row for row in range(ROWS) if row not in (3, 200)]


@pytest.mark.parametrize(
    ("partition_by", "message"),
    [
        pytest.param(["x"], r"partition_by: 'x': expected a column of --keep: add it there too", id="not carried"),
        pytest.param(["like"], "'like': expected a column of --keep, got an output of the model", id="a score"),
        pytest.param(["day", "day"], "'day': expected another column: it is named twice", id="twice"),
        pytest.param(["price"], r"day\.parquet: column 'price': expected integers, .* got double", id="floats"),
        pytest.param(["tags"], r"column 'tags': expected integers, .* got list<", id="lists"),
        pytest.param(["at"], r"column 'at': expected integers, .* got timestamp", id="times"),
    ],
)
def test_other_columns_are_refused(bundle: Path, tmp_path: Path, partition_by: list[str], message: str) -> None:
    more = {"price": [1.5] * 10, "tags": [[1]] * 10, "at": [datetime.datetime(2026, 11, 1)] * 10}
    table = day_table(10)
    for name, values in more.items():
        table = table.append_column(name, pa.array(values))
    day = write_day(tmp_path / "day.parquet", table)
    with pytest.raises(ConfigurationError, match=message):
        score_files(
            BundleSource(bundle), [str(day)], tmp_path / "out", keep=["day", *more], partition_by=partition_by
        )
    assert not [*tmp_path.glob("*out*")]


def test_more_partitions_than_files_may_be_open_are_refused(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = write_day(tmp_path / "day.parquet", row_group=ROWS // 2)
    monkeypatch.setattr(partitions, "MOST_PARTITIONS", ROWS // 2 - 1)
    with pytest.raises(
        ConfigurationError, match=r"day\.parquet: row group 0: expected at most 499 partitions of id, got more: "
    ):
        score_files(BundleSource(bundle), [str(day)], tmp_path / "out", keep=["id"], partition_by=["id"])
    monkeypatch.setattr(partitions, "MOST_PARTITIONS", ROWS // 2)
    score_files(BundleSource(bundle), [str(day)], tmp_path / "out", keep=["id"], partition_by=["id"])
    assert len([*(tmp_path / "out").iterdir()]) == ROWS


def test_no_rows_are_refused(bundle: Path, tmp_path: Path) -> None:
    day = write_day(tmp_path / "day.parquet", day_table().slice(0, 0))
    with pytest.raises(ConfigurationError, match="partition_by: expected inputs with rows, got none"):
        score_files(BundleSource(bundle), [str(day)], tmp_path / "out", keep=["day"], partition_by=["day"])


def test_buffered_rows_are_bounded_and_stay_in_order(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition with most rows is written first."""
    day = write_day(tmp_path / "day.parquet", partitioned_day(), row_group=ROWS)
    monkeypatch.setattr(part_scores, "BATCH_ROWS", 70)
    monkeypatch.setattr(part_scores, "_WRITTEN_ROWS", 200)
    score_files(BundleSource(bundle), [str(day)], tmp_path / "scores", keep=KEEP, partition_by=["country"])
    files = [parquet.ParquetFile(path) for path in (tmp_path / "scores").rglob("*.parquet")]
    assert sum(file.metadata.num_rows for file in files) == ROWS
    assert max(file.metadata.num_row_groups for file in files) > 2
    for file in files:
        ids = file.read(["id"])["id"].to_pylist()
        assert ids == sorted(ids)


VALUES: st.SearchStrategy[Any] = st.one_of(st.none(), st.text(max_size=20))


@given(
    st.lists(
        st.tuples(VALUES, st.one_of(st.none(), st.integers(-3, 3))),
        min_size=1,
        max_size=30,
    )
)
def test_every_row_is_in_the_folder_of_its_values(values: list[tuple[Any, Any]]) -> None:
    texts, numbers = zip(*values, strict=True)
    table = pa.table(
        {"row": range(len(values)), "text": pa.array(texts, pa.string()), "number": pa.array(numbers, pa.int8())}
    )
    folders: dict[int, str] = {}
    for folder, rows in split(table, ["text", "number"]):
        assert rows.column_names == ["row"]
        ids = rows["row"].to_pylist()
        assert ids == sorted(ids)
        assert folder not in folders.values()
        folders |= dict.fromkeys(ids, folder)
    assert folders == {
        row: partition_folder({"text": text, "number": number}) for row, (text, number) in enumerate(values)
    }


@given(st.text(min_size=1, max_size=20))
def test_pyarrow_reads_escaped_partition_values_back(text: str) -> None:
    """Any text; but a folder of this name is null."""
    folder = partition_folder({"text": text})
    assert folder.count("/") == 0
    hive = pyarrow.dataset.HivePartitioning(pa.schema({"text": pa.string()}))
    value = pyarrow.dataset.get_partition_keys(hive.parse(f"{folder}/part-0.parquet"))["text"]
    assert value == (None if text == NULL else text)


@pytest.mark.parametrize(
    ("values", "folder"),
    [
        ({"day": datetime.date(2026, 11, 1)}, "day=2026-11-01"),
        ({"n": -7}, "n=-7"),
        ({"b": True}, "b=true"),
        ({"t": None}, f"t={NULL}"),
        ({"t": ""}, f"t={NULL}"),
        ({"t": ".."}, "t=.."),
        ({"t": "a/b=c%d"}, "t=a%2Fb%3Dc%25d"),
        ({"t": "日本\n"}, "t=日本%0A"),
        ({"a b": "x", "c": 0}, "a%20b=x/c=0"),
    ],
)
def test_folders_are_named_as_hive_does(values: dict[str, Any], folder: str) -> None:
    assert partition_folder(values) == folder


def test_a_value_that_is_too_long_for_a_name_is_refused() -> None:
    assert partition_folder({"t": "é" * 126})
    with pytest.raises(ConfigurationError, match="expected names of folders of at most 255 bytes, got 't=é"):
        partition_folder({"t": "é" * 127})


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_chunks_slices_and_dictionaries_are_split(kind: Any) -> None:
    values = ["a", None, "b", "a", "", "b"]
    column = pa.chunked_array([pa.array(values[:4], kind).slice(1), pa.array(values[4:], kind)])
    table = pa.table({"row": np.arange(5), "t": column})
    rows = {folder: part["row"].to_pylist() for folder, part in split(table, ["t"])}
    assert rows == {f"t={NULL}": [0, 3], "t=b": [1, 4], "t=a": [2]}


def _kill(bundle: Path, tmp_path: Path, kills: int) -> None:
    kill_folder_runs(bundle, write_day(tmp_path / "day.parquet", partitioned_day()), tmp_path, kills, "day")


def test_a_run_may_be_killed_at_any_moment(bundle: Path, tmp_path: Path) -> None:
    _kill(bundle, tmp_path, 3)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_many_runs_may_be_killed(bundle: Path, tmp_path: Path) -> None:
    """KILLS=100 makes more of them."""
    _kill(bundle, tmp_path, int(os.environ.get("KILLS", "15")))
