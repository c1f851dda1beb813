"""`tbe-serve score-files`."""

import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from serving.__main__ import app
from serving.commands import score_files
from serving.server import Server
from tests.support.day import ROWS, day_table, write_day
from tests.support.servers import tbe_serve

ROOT = Path(__file__).parents[3]


def scoring(day: Path, scored: Path, folder: Path) -> tuple[str, ...]:
    """The command that scores a day by the ranker into the folder's `scores`."""
    return ("score-files", str(day), "--bundle", str(scored / "ranker" / "1"), "--out", str(folder / "scores"))


@pytest.fixture
def day(tmp_path: Path) -> Path:
    return write_day(tmp_path / "day.parquet")


def test_a_day_is_scored_with_a_bundle_and_with_a_server(
    scored: Path, score_server: Server, day: Path, tmp_path: Path
) -> None:
    bundle = scored / "ranker" / "1"
    options = ("--keep", "id,day", "--price-per-hour", "0.4")
    done = tbe_serve("score-files", str(day), "--bundle", str(bundle), "--out", str(tmp_path / "scores"), *options)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third = done.stdout.splitlines()
    assert first == f"{tmp_path}/scores: 1,000 rows in 7 files"
    assert re.fullmatch(r"scored 1,000 rows in [\d.]+ s: [\d,]+ rows/s", second)
    assert re.fullmatch(r"a million rows cost [\d.]+", third)
    of_server = ("--server", score_server.grpc, "--model", "ranker", "--timeout-s", "60")
    done = tbe_serve("score-files", str(day), *of_server, "--out", str(tmp_path / "served"), *options)
    assert (done.returncode, done.stderr) == (0, "")
    scores, served = parquet.read_table(tmp_path / "scores"), parquet.read_table(tmp_path / "served")
    assert scores["id"].to_pylist() == served["id"].to_pylist() == [*range(ROWS)]
    np.testing.assert_allclose(served["like"].to_numpy(), scores["like"].to_numpy(), atol=1e-6)
    again = tbe_serve("score-files", str(day), "--bundle", str(bundle), "--out", str(tmp_path / "scores"), *options)
    assert again.stdout.splitlines()[0] == first
    assert "scored 0 rows" in again.stdout


def test_columns_of_other_names_are_mapped_by_a_file(scored: Path, tmp_path: Path) -> None:
    table = day_table()
    item = np.stack(table["item"].to_numpy())
    renamed = table.rename_columns({"x": "clicks"}).drop_columns(["item"])
    for number in range(2):
        renamed = renamed.append_column(f"i{number}", pa.array(item[:, number]))
    day = write_day(tmp_path / "day.parquet", renamed)
    (tmp_path / "map.toml").write_text('x = "clicks"\nitem = ["i0", "i1"]\n')
    command = scoring(day, scored, tmp_path)
    done = tbe_serve(*command)
    assert done.returncode == 1
    assert "expected a column 'x' for the input 'x': name another in `columns`, got the columns 'id'" in done.stderr
    assert tbe_serve(*command, "--columns", str(tmp_path / "map.toml")).returncode == 0
    assert parquet.read_table(tmp_path / "scores").num_rows == ROWS


def test_a_run_without_any_score_fails(scored: Path, tmp_path: Path) -> None:
    """A column of another model's ids makes all rows bad. A pipeline goes on after an exit code of 0."""
    day = write_day(tmp_path / "day.parquet", day_table(3).set_column(2, "x", pa.array([[50], [51], [52]])))
    for _ in range(2):  # the second time, the output is there
        done = tbe_serve(*scoring(day, scored, tmp_path), "--on-error", "skip")
        assert done.returncode == 1
        assert "scores.errors.jsonl: the model refused all rows, so none has scores" in done.stderr
    assert len((tmp_path / "scores.errors.jsonl").read_text().splitlines()) == 3


def test_skipped_rows_are_counted(scored: Path, tmp_path: Path) -> None:
    table = day_table(10)
    day = write_day(tmp_path / "day.parquet", table.set_column(2, "x", pa.array([[50], *[[]] * 9])))
    command = scoring(day, scored, tmp_path)
    done = tbe_serve(*command)
    assert done.returncode == 1
    assert f"{day}: row group 0, row 0: feature 'x': expected an id in [0, 50), got 50" in done.stderr
    done = tbe_serve(*command, "--on-error", "skip")
    assert done.returncode == 0
    assert done.stdout.splitlines()[:2] == [
        f"{tmp_path}/scores: 9 rows in 1 file",
        f"{tmp_path}/scores.errors.jsonl: skipped 1 row",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param((), "expected either --bundle, or --server with --model", id="no source"),
        pytest.param(("--bundle", "b", "--server", "a:1"), "expected either --bundle, or --server", id="two sources"),
        pytest.param(("--server", "a:1"), "expected either --bundle, or --server with --model", id="no model"),
        pytest.param(("--bundle", "b", "--model", "m"), "expected either --bundle, or --server", id="a model alone"),
        pytest.param(
            ("--bundle", "WITHOUT"), "expected a model with scores: export it with --scores", id="no scores"
        ),
        pytest.param(("--bundle", "MIXING"), "depend on the other samples of its request", id="mixed samples"),
        pytest.param(
            ("--bundle", "RANKER", "--keep", "like"), "--keep: 'like': expected another column", id="an output"
        ),
        pytest.param(
            ("--bundle", "RANKER", "--keep", "ts"), "expected a column 'ts' for `keep`", id="no such column"
        ),
        pytest.param(("--bundle", "RANKER", "--on-error", "stop"), "'stop'", id="another word"),
    ],
)
def test_options_and_models_that_cannot_score_are_refused(
    scored: Path, day: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    bundles = {name.upper(): str(scored / name / "1") for name in ("ranker", "mixing", "without")}
    typed = [bundles.get(option, option) for option in options]
    done = tbe_serve("score-files", str(day), "--out", str(tmp_path / "scores"), *typed)
    assert done.returncode != 0
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["day.parquet"]


def test_a_terminal_shows_rows_a_second_and_the_time_left(scored: Path, tmp_path: Path) -> None:
    day = write_day(tmp_path / "day.parquet", day_table(20_000), row_group=5_000)
    terminal, its_end = pty.openpty()
    termios.tcsetwinsize(its_end, (24, 120))
    command = [sys.executable, "-m", "serving", *scoring(day, scored, tmp_path)]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=its_end, stdout=subprocess.DEVNULL) as process:
        os.close(its_end)
        shown = b""
        with suppress(OSError), open(terminal, "rb", buffering=0) as screen:  # EIO: the process has ended
            while block := screen.read(1 << 16):
                shown += block
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"scoring, [\d,]+ rows/s", text)
    assert re.search(r"\d+/20000 rows +[\d-]+:[\d-]+:[\d-]+", text)


def test_a_log_has_a_line_from_time_to_time(
    scored: Path, day: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_files, "_LINE_S", 0.0)
    done = CliRunner().invoke(app, scoring(day, scored, tmp_path))
    assert done.exit_code == 0, done.output
    lines = [line.removeprefix("tbe-serve: ") for line in done.stderr.splitlines()]
    assert re.fullmatch(r"0 of 1,000 rows, 0 rows/s", lines[0])
    assert all(re.fullmatch(r"[\d,]+ of 1,000 rows, [\d,]+ rows/s, [\d,]+ s left", line) for line in lines[1:])
    assert lines[-1].startswith("1,000 of 1,000 rows, ")
