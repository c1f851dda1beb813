"""`tbe-export compare` as one types it."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from export.__main__ import app
from tests.support.commands import TRAINED

TABLES = "[tables.a]\nrows = 1000\ndim = 16\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--tables", "T", "--strategy", "diagonal"], "--strategy: expected one of data_parallel"),
        (["--tables", "T", "--ranks", "1"], "--ranks: expected 2 or more"),
        (["--tables", "T", "--dtype", "int3"], "--dtype: expected one of"),
        (["--tables", "T", "--pooling-factor", "q=1"], "--pooling-factor 'q': expected the name of a table"),
        (["--tables", "T", "--checkpoint", "w.pt"], "--checkpoint: expected --model with it"),
        ([], "expected either --model or --tables"),
        (["--tables", "T", "--ranks", "3", "--ranks-per-host", "2"], "--ranks-per-host: expected a divisor"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, arguments: list[str], why: str) -> None:
    (tmp_path / "t.toml").write_text(TABLES)
    given = [str(tmp_path / "t.toml") if each == "T" else each for each in arguments]
    done = CliRunner().invoke(app, ["compare", "--out", str(tmp_path / "out"), *given])
    assert done.exit_code == 1
    assert why in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_what_does_not_fit_is_said_and_the_rest_is_measured(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(TABLES)
    arguments = ["--tables", str(tmp_path / "t.toml"), "--memory-per-rank", "15kB", "--dtype", "int8", "--ranks", "2"]
    chosen = ["--strategy", "data_parallel", "--strategy", "row_wise", "--seconds", "0.01"]
    done = CliRunner().invoke(app, ["compare", "--out", str(tmp_path / "out"), *arguments, *chosen])
    assert done.exit_code == 0, done.output
    assert "data_parallel on 2 ranks, int8: table 'a'" in done.output
    study = json.loads((tmp_path / "out" / "study.json").read_text())
    assert [each["error"] is None for each in study["placements"]] == [False, True]
    assert "not possible: " in (tmp_path / "out" / "report.html").read_text()


def test_a_trained_model_is_compared_with_its_own_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    arguments = [*TRAINED, "--strategy", "row_wise", "--ranks", "2", "--dtype", "int8"]
    done = CliRunner().invoke(app, ["compare", "--out", str(tmp_path), *arguments, "--seconds", "0.01"])
    assert done.exit_code == 0, done.output
    study = json.loads((tmp_path / "study.json").read_text())
    assert not study["generated"]
    assert study["tables"].keys() == {"user", "item", "genre", "word"}
    assert study["tables"]["user"]["dtypes"][2]["largest_error"] > 1e-3  # normal numbers of 1
