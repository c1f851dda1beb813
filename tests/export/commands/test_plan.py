"""`tbe-export plan`."""

import json
from pathlib import Path

import pytest
import torch
from rich.filesize import decimal

from serving.terminal.app import out
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
    assert [rank["host"] for rank in report["ranks"]] == [0, 0, 1, 1]
    # 28.0 kB of 67 kB, four times: it is said, and what a rank was taken to hold.
    assert report["table_bytes"] == 500 * 20 + 300 * 36 + 20 * 12 + 1000 * 28
    copies, assumed = report["notes"]
    assert "most of it for 'word' (data_parallel) 84.0 kB" in copies
    assert "1/4 of this machine's memory" in assumed
    assert done.stdout.splitlines()[-3:-1] == [f"note: {note}" for note in report["notes"]]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]


def test_a_plan_says_what_a_server_needs_of_memory() -> None:
    """By hand: 256 MiB for an instance and for tritonserver; five features of 112 columns, and shared memory for two
    requests of 4 Mi ids and 64 Ki samples."""
    done = tbe_export("plan", *TRAINED)
    assert done.exit_code == 0, done.stderr
    tables, processes = 500 * 20 + 300 * 36 + 20 * 12 + 1000 * 28, 2 * (256 << 20)
    largest = 12 * (4 << 20) + (4 * 5 + 8 * (16 + 2 * 32 + 8 + 24)) * (64 << 10)
    shared = -(-2 * largest // (1 << 20)) << 20
    expected = {
        "always": (tables, processes, 0, tables + processes),
        "while certificates are renewed": (tables, 2 * processes, 2 * shared, tables + 2 * (processes + shared)),
        "while two versions are loaded": (2 * tables, 2 * tables + 2 * (processes + shared) + (256 << 20) + shared),
    }
    for when, parts in expected.items():
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(when)]
        assert line.removeprefix(when).split() == " ".join(map(decimal, parts)).replace("bytes", "B").split()


def test_an_export_accepts_the_json_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(out, "width", 80)
    shown = tbe_export("inspect", str(bundle)).stdout
    assert any(line.split()[:1] == ["user"] and "grid_shard" in line for line in shown.splitlines())
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80


def test_a_router_s_plan_shows_its_traffic_with_each_host(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    arguments = (
        *PLAN, "--hosts-as-models", "--router-memory", "11kB", "--memory-per-rank", "1MB", "--network-bandwidth", "10Gb/s",
        "--sharding", "word=row_wise", "--sharding", "item=column_wise", "--batch-size", "100", "--pooling-factor", "word=20",
    )  # fmt: skip
    done = tbe_export(*arguments, "--picture", str(picture))
    assert done.exit_code == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["genre", "20", "×", "8", "INT8", "table_wise", "1", "240", "B", "router"] in lines
    assert ["word", "1,000", "×", "24", "INT8", "row_wise", "2", "14.0", "kB", "hosts", "0–1"] in lines
    # 100 · 20 ids of 4 bytes, 100 lengths of 4 bytes for each host; 100 · 24 sums of 4 bytes from each.
    assert ["word", "0–1", "reduce-scatter", "8.8", "kB", "19.2", "kB"] in lines
    # All ids of both features go to both hosts, half the columns come from each.
    assert ["item", "0–1", "all-to-all", "3.2", "kB", "25.6", "kB"] in lines
    assert ["2", "in", "the", "router", "–", "–", "nothing", "nothing"] in lines
    assert ["all", "12.0", "kB", "44.8", "kB"] in lines
    assert ["router", "2", "10.2", "kB", "20.4%", "0", "B", "0", "B"] in lines
    assert any(line[:2] == ["host", "1"] and line[-4:] == ["6.0", "kB", "22.4", "kB"] for line in lines)
    assert max(len(line.rstrip()) for line in done.stdout.splitlines() if not line.startswith("drawn ")) <= 80
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(tbe_export(*arguments, "--json").stdout)
    assert [(rank["host"], rank["memory_bytes"]) for rank in report["ranks"]] == [
        (-1, 11_000),
        (0, 2_000_000),
        (1, 2_000_000),
    ]
    assert {(transfer["host"], transfer["table"]) for transfer in report["transfers"]} == {
        (host, table) for host in (0, 1) for table in ("word", "item")
    }


def test_a_checkpoint_of_other_tables_is_no_plan(tmp_path: Path) -> None:
    torch.save({"embedding_bags.other.weight": torch.zeros(2, 4)}, tmp_path / "w.pt")
    done = tbe_export(*PLAN, "--checkpoint", str(tmp_path / "w.pt"))
    assert done.exit_code == 1
    assert "table 'user': expected the key 'embedding_bags.user.weight', which is missing" in done.stderr


BESIDE = {
    "--ranks": "1",
    "--ranks-per-host": "1",
    "--sharding": "auto",
    "--min-partition": "4",
    "--row-wise-over": "1000000",
    "--column-wise-over": "256",
}


@pytest.mark.parametrize(("option", "in_file"), [*((option, False) for option in BESIDE), ("--sharding", True)])
def test_settings_that_a_plan_contains_are_refused_beside_it(option: str, in_file: bool, tmp_path: Path) -> None:
    """Not even to what is the default: somebody would take it to count."""
    options = [option, BESIDE[option]]
    key = "types" if option == "--sharding" else option[2:].replace("-", "_")
    if in_file:
        (tmp_path / "export.toml").write_text('[sharding]\ntypes = "auto"\n')
        options = ["--config", str(tmp_path / "export.toml")]
    done = tbe_export("plan", *TRAINED, "--plan", "plan.json", *options)
    assert done.exit_code == 1
    assert done.stderr == f"tbe-export: --plan: expected no {key} beside it: the plan file says that\n"


@pytest.mark.parametrize("option", ["--ranks", "--picture"])
def test_a_single_option_given_twice_is_refused(option: str) -> None:
    done = tbe_export("plan", *TRAINED, option, "3", option, "4")
    assert done.exit_code == 2
    assert done.stderr == f"tbe-export: Invalid value for '{option}': expected it once, got it twice\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--memory-per-rank", "1kB"], "table 'word': a shard of it takes ", id="does not fit"),
        pytest.param(["--memory-per-rank", "1 parsec"], "--memory-per-rank: expected a size such as 16GB", id="size"),
        pytest.param(["--sharding", "rowwise"], "--sharding '*': expected one of auto, auto-simple, data_parallel", id="type"),
        pytest.param(["--router-memory", "1GB"], "--router-memory: expected hosts_as_models with it", id="no router"),
        pytest.param(["--hosts-as-models"], "hosts: expected a table on at least one, the router would hold all", id="no hosts"),
        pytest.param(["--network-bandwidth", "10G"], "--network-bandwidth: expected a bandwidth such as 10Gb/s", id="bandwidth"),
        pytest.param(["--traffic", "nowhere.jsonl"], "--traffic nowhere.jsonl: cannot be read", id="no traffic"),
        pytest.param(["--picture", "plan.xyz"], "--picture plan.xyz: Format 'xyz' is not supported", id="picture"),
        pytest.param(["--memory-per-rank", str((1 << 60) + 1)], "--memory-per-rank: expected a size such as 16GB", id="beyond"),
        pytest.param(["--checkpoint", "nope"], "--checkpoint nope: expected a file, or a folder with", id="checkpoint"),
        pytest.param(["--id-policy", "default_row:1_0"], "--id-policy: expected a whole number, got '1_0'", id="digits"),
        pytest.param(["--pooling-factor", "1_0"], "--pooling-factor: expected a number, got '1_0'", id="number"),
        pytest.param(["--config", "nowhere.toml"], "--config nowhere.toml: cannot be read", id="no file"),
    ],
)  # fmt: skip
def test_an_invalid_plan_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    done = tbe_export(*PLAN, *arguments)
    assert done.exit_code == 1
    assert f"tbe-export: {message}" in done.stderr
    assert "Traceback" not in done.stderr
