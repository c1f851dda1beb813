"""What docs/batch-scoring.md shows is what happens."""

import re
import shlex
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from export import ExportConfig, export_model
from serving.batch.objects import objects_of
from serving.server import Ports, run_server
from tests.support.day import ROWS, day_table, write_day
from tests.support.ranker import ranker
from tests.support.s3 import s3_server
from tests.support.servers import tbe_serve

PAGE = (Path(__file__).parents[2] / "docs" / "batch-scoring.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_commands_score_and_polars_reads_the_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export_model(ranker(), Path("repository"), "ranker", ExportConfig(scores=True))
    write_day(Path("day.parquet"), day_table().append_column("ts", day_table()["id"]))
    (in_process, served, by_day, from_store) = (
        text for language, text in BLOCKS if text.startswith("tbe-serve") and not language
    )
    (python,) = (text for language, text in BLOCKS if language == "python" and "polars" in text)
    done = tbe_serve(*shlex.split(in_process)[1:])
    assert done.returncode == 0, done.stderr
    names: dict[str, Any] = {}
    exec(python, names)
    scores = names["scores"]
    assert scores.columns == ["id", "ts", "like", "both"]
    assert scores["id"].to_list() == [*range(ROWS)]
    (read_back,) = (text for language, text in BLOCKS if language == "python" and "by_day" in text)
    write_day(Path("days/1.parquet"))
    done = tbe_serve(*shlex.split(by_day)[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("by_day: 1,000 rows in folders by day")
    exec(read_back, names)
    assert names["scores"].select(["id", "day"]).to_pylist() == [{"id": row, "day": "mon"} for row in range(ROWS)]
    with run_server(Path("repository"), Ports(grpc=0, http=0, operations=0), log=tmp_path / "log") as server:
        done = tbe_serve(*shlex.split(served.replace("localhost:8001", server.grpc))[1:], "--timeout-s", "60")
    assert done.returncode == 0, done.stderr
    assert pl.read_parquet("served")["id"].to_list() == [*range(ROWS)]
    objects_of.cache_clear()  # a client of this process has the address of another test's server
    with s3_server(tmp_path) as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        for key in ("days/2026-11-01/day.parquet", "more/day.parquet"):
            s3.put(key, Path("day.parquet").read_bytes())
        done = tbe_serve(*shlex.split(from_store)[1:])
        assert done.returncode == 0, done.stderr
        assert s3.get("scores/_SUCCESS")
        assert done.stdout.startswith("s3://bucket/scores: 2,000 rows in 14 files")


def test_the_page_says_the_bounds_of_the_code() -> None:
    from serving.batch import batch_scores, inputs, objects, part_scores, partitions
    from serving.client.streams import IN_FLIGHT

    batch_rows = batch_scores.BATCH_ROWS  # one batch is read ahead
    assert f"may have {partitions.MOST_PARTITIONS} partitions" in PAGE
    for number in (batch_rows * 2, batch_rows * (IN_FLIGHT + 1), part_scores._WRITTEN_ROWS):
        assert f"{number:,} " in PAGE or f"{number:,})" in PAGE
    assert inputs._BUFFER_BYTES == 1 << 20
    assert "1 MiB of each column" in PAGE
    assert objects.READ_BYTES == 8 << 20
    assert "of objects, 8 MiB" in PAGE
