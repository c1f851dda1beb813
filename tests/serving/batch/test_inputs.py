"""Which files are scored, and in which parts."""

import os
from pathlib import Path

import pytest

from serving.batch.inputs import find_inputs, parts_of, read_input
from serving.errors import ConfigurationError
from tests.support.day import day_table, write_day


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "days"
    for name in ("b", "a", "deep/c", "_hidden/d", ".e", "deep/_f"):
        write_day(folder / f"{name}.parquet", day_table(10))
    (folder / "_SUCCESS").touch()
    (folder / "notes.txt").touch()
    return folder


def names(patterns: list[str]) -> list[str]:
    return [Path(file.path).stem for file in find_inputs(patterns)]


def test_files_folders_and_globs_are_found_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names([str(folder)]) == ["a", "b", "c"]
    assert names([f"{folder}/*.parquet"]) == ["a", "b"]
    assert names([f"{folder}/**/[cd].parquet"]) == ["d", "c"]
    assert names([f"{folder}/b.parquet", f"{folder}/deep"]) == ["b", "c"]
    assert names([f"{folder}/_hidden/d.parquet"]) == ["d"]
    monkeypatch.chdir(folder)
    assert find_inputs(["a.parquet"])[0].path == str(folder / "a.parquet")


def test_an_existing_file_named_like_a_glob_is_found(tmp_path: Path) -> None:
    write_day(tmp_path / "[1].parquet", day_table(10))
    assert names([str(tmp_path / "[1].parquet")]) == ["[1]"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        pytest.param("none.parquet", "none.parquet: expected Parquet files: a file, a folder", id="missing"),
        pytest.param("days/*.csv", r"days/\*.csv: expected Parquet files", id="a glob of nothing"),
        pytest.param("empty", "empty: expected Parquet files", id="an empty folder"),
        pytest.param("days/notes.txt", "notes.txt: expected a Parquet file: ", id="an empty file"),
        pytest.param("text", "text: expected a Parquet file: ", id="text"),
        pytest.param("http://host/day", "http://host/day: expected a path on this machine, or s3://", id="a URL"),
    ],
)
def test_inputs_without_parquet_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("id,ts\n" * 100)
    with pytest.raises(ConfigurationError, match=message):
        find_inputs([f"{folder}/a.parquet", pattern])


def test_a_file_is_scored_once(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"a\.parquet: expected each file once, got it twice"):
        find_inputs([str(folder), f"{folder}/a.parquet"])


def test_each_row_group_is_a_part(tmp_path: Path) -> None:
    files = [write_day(tmp_path / "a.parquet", day_table(25), 10), write_day(tmp_path / "b.parquet", day_table(7))]
    parts = parts_of(find_inputs([str(tmp_path)]))
    assert [(Path(part.file.path), part.row_group, part.rows, part.name) for part in parts] == [
        (files[0], 0, 10, "part-00000.parquet"),
        (files[0], 1, 10, "part-00001.parquet"),
        (files[0], 2, 5, "part-00002.parquet"),
        (files[1], 0, 7, "part-00003.parquet"),
    ]


def test_a_file_that_changed_is_not_opened(tmp_path: Path) -> None:
    path = write_day(tmp_path / "day.parquet", day_table(10))
    before = read_input(str(path))
    os.utime(path)
    with before.open() as parquet:
        assert parquet.metadata.num_rows == 10
    write_day(path, day_table(10, seed=1))
    with pytest.raises(ConfigurationError, match=r"day\.parquet: changed while it was scored"):
        before.open()
