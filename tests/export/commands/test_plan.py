"""`tbe-export plan`."""

import json
from pathlib import Path

import pytest

from tests.support.commands import PLAN, TRAINED, tbe_export


def test_plan_shows_bytes_and_traffic_and_writes_nothing(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    arguments = ("--sharding", "row_wise", "--sharding", "word=data_parallel", "--batch-size", "100")
    done = tbe_export(*PLAN, *arguments, "--pooling-factor", "user=10", "--picture", str(picture))
    assert done.exit_code == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["user", "500", "×", "16", "INT8", "row_wise", "4", "2.5", "kB", "0–3"] in lines
    assert ["word", "1,000", "×", "24", "INT8", "data_parallel", "4", "28.0", "kB", "0–3"] in lines
    # Rank 1, by hand: a quarter of each table cut by rows and all of `word`, which rank 0 answers for.
    stored = (500 * 20 + 300 * 36 + 20 * 12) // 4 + 1000 * 28
    ids, lengths = 100 * (10 + 1 + 1 + 1) / 4 * 8, 4 * 100 * 8
    sums = 100 * (16 + 32 + 32 + 8) * 4
    report = json.loads(tbe_export(*PLAN, *arguments, "--pooling-factor", "user=10", "--json").stdout)
    rank = report["ranks"][1]
    assert (rank["bytes"], rank["bytes_in"], rank["bytes_out"]) == (stored, ids + lengths, sums)
    assert [each["host"] for each in report["ranks"]] == [0, 0, 1, 1]
    # 28.0 kB of 67 kB, four times: it is said, and what a rank was taken to hold.
    assert report["table_bytes"] == 500 * 20 + 300 * 36 + 20 * 12 + 1000 * 28
    copies, assumed = report["notes"]
    assert "most of it for 'word' (data_parallel) 84.0 kB" in copies
    assert "1/4 of this machine's memory" in assumed
    assert done.stdout.splitlines()[-3:-1] == [f"note: {note}" for note in report["notes"]]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]


def test_a_plan_as_json_is_a_plan_to_export_by(tmp_path: Path) -> None:
    planned = tbe_export(*PLAN, "--sharding", "grid_shard", "--json").stdout
    (tmp_path / "plan.json").write_text(planned)
    done = tbe_export(
        "model", *TRAINED, "--repository", str(tmp_path / "r"), "--name", "m",
        "--plan", str(tmp_path / "plan.json"),
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("note: ranks hold")] == [
        f"note: {note}" for note in json.loads(planned)["notes"][:-1]
    ]
    bundle = tmp_path / "r" / "m" / "1"
    report = json.loads(planned)
    assert [path.stat().st_size for path in sorted(bundle.glob("weights.*"))] == pytest.approx(
        [rank["bytes"] for rank in report["ranks"]], abs=128 * 4
    )
    shown = tbe_export("inspect", str(bundle)).stdout
    assert any(line.split()[:1] == ["user"] and "grid_shard" in line for line in shown.splitlines())
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--memory-per-rank", "1kB"], "table 'word': a shard of it takes ", id="does not fit"),
        pytest.param(["--memory-per-rank", "1 parsec"], "--memory-per-rank: expected a size such as 16GB", id="size"),
        pytest.param(["--sharding", "rowwise"], "--sharding '*': expected one of auto, auto-simple, data_parallel", id="type"),
        pytest.param(["--ranks", "4", "--ranks-per-host", "3"], "--ranks-per-host: expected a divisor of 4 ranks", id="hosts"),
        pytest.param(["--picture", "plan.xyz"], "--picture plan.xyz: Format 'xyz' is not supported", id="picture"),
        pytest.param(["--config", "nowhere.toml"], "--config nowhere.toml: cannot be read", id="no file"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_made_is_said_in_one_line(arguments: list[str], message: str) -> None:
    done = tbe_export(*PLAN, *arguments)
    assert done.exit_code == 1
    assert f"tbe-export: {message}" in done.stderr
    assert "Traceback" not in done.stderr
