"""The commands, as one types them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection
from typer.testing import CliRunner

from export.__main__ import app as export_app
from serving.bundle import open_bundle
from serving.config_file import read_config, settings_of, write_config
from serving.engine import Engine
from serving.server import Server
from tests import oracle
from tests.models import SUM, collection, float_tables


def tbe_serve(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serving", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def tbe_export(*arguments: str) -> Any:
    """In this process: importing torchrec anew takes seconds."""
    return CliRunner().invoke(export_app, arguments)


def test_lookup_answers_json_lines(server: Server, mixed: Path) -> None:
    lines = ['{"genres": [[3, 5], [], [1]]}', '{"user_id": {"values": [1, 2], "lengths": [2]}, "genres": [[0]]}']
    done = tbe_serve("lookup", "mixed", "--url", server.grpc, "--timeout-s", "30", stdin="\n".join(lines))
    assert (done.returncode, done.stderr) == (0, "")
    first, second = map(json.loads, done.stdout.splitlines())
    engine = Engine.open(mixed)
    np.testing.assert_array_equal(np.float32(first["genres"]), engine.lookup({"genres": [[3, 5], [], [1]]})["genres"])
    assert list(second) == ["user_id", "genres"]
    np.testing.assert_array_equal(np.float32(second["user_id"]), engine.lookup({"user_id": [[1, 2]]})["user_id"])


def test_lookup_answers_a_table(server: Server) -> None:
    done = tbe_serve("lookup", "mixed", "--url", server.grpc, "--table", stdin='{"genres": [[3, 5], []]}')
    rows = [line.split() for line in done.stdout.splitlines() if "genres" in line]
    assert [row[1:6:2] for row in rows] == [["0", "genres", "8"], ["1", "genres", "8"]]
    assert "+0.0000 +0.0000" in done.stdout


def test_lookup_reports_bad_lines_and_answers_the_others(server: Server, tmp_path: Path) -> None:
    lines = ['{"genres": [[20]]}', "nonsense", "[1]", '{"genres": {"ids": []}}', '{"genres": [[1]]}']
    (tmp_path / "requests").write_text("\n".join(lines))
    done = tbe_serve("lookup", "mixed", str(tmp_path / "requests"), "--url", server.grpc)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    reasons = done.stderr.splitlines()
    assert "line 1: " in reasons[0]
    assert "feature 'genres': expected an id in [0, 20), got 20" in reasons[0]
    assert "line 2: expected JSON" in reasons[1]
    assert "line 3: expected {" in reasons[2]
    assert "line 4: feature 'genres': expected values, lengths" in reasons[3]


def test_lookup_without_a_server_says_so() -> None:
    done = tbe_serve("lookup", "mixed", "--url", "127.0.0.1:1", stdin='{"genres": [[1]]}')
    assert done.returncode == 1
    assert done.stderr.startswith("tbe-serve: --url 127.0.0.1:1: model 'mixed': ")
    assert "Traceback" not in done.stderr


def test_run_on_no_repository_says_so(tmp_path: Path) -> None:
    done = tbe_serve("run", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "expected models made by tbe-export, found none" in done.stderr


def test_model_exports_by_name_and_pattern(tmp_path: Path) -> None:
    torch.save(collection().state_dict(), tmp_path / "w.pt")
    done = tbe_export(
        "model", "--model", "tests.models:collection", "--checkpoint", str(tmp_path / "w.pt"),
        "--repository", str(tmp_path / "r"), "--name", "m", "--version", "3",
        "--dtype", "int4", "--dtype", "us*=fp16", "--id-policy", "word=zero", "--output-dtype", "fp16",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    manifest = open_bundle(tmp_path / "r" / "m" / "3").manifest
    assert [table.dtype.value for table in manifest.tables] == ["FP16", "INT4", "INT4", "INT4"]
    assert [table.id_policy.value for table in manifest.tables] == ["error", "error", "error", "zero"]
    assert manifest.output_dtype.value == "FP16"
    for table in manifest.tables:
        assert any(table.name in line and table.dtype.value in line for line in done.stdout.splitlines())
    assert f"published {tmp_path / 'r' / 'm' / '3'}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--model", "tests.models:nothing"], "--model tests.models:nothing: expected package.module:function", id="no function"),
        pytest.param(["--model", "nowhere:build"], "--model nowhere:build: expected package.module:function", id="no module"),
        pytest.param(["--model", "builtins:dict"], "--model builtins:dict: expected a torch.nn.Module, got dict", id="no nn.Module"),
        pytest.param(["--dtype", "int3"], "--dtype: expected one of fp32, fp16, int8, int4, int2, got 'int3'", id="dtype"),
        pytest.param(["--dtype", "itme=int4"], "--dtype 'itme': expected the name of a table", id="pattern"),
        pytest.param(["--max-error", "small"], "--max-error: expected a number, got 'small'", id="number"),
        pytest.param(["--dtype", "int8", "--max-error", "user=1e-9"], "table 'user': INT8 moves an element by", id="limit"),
        pytest.param(["--checkpoint", "nowhere.pt"], "--checkpoint nowhere.pt: expected a file, or a folder with", id="checkpoint"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_said_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = tbe_export(
        "model", "--repository", str(tmp_path / "r"), "--name", "m", "--model", "tests.models:collection", *arguments
    )
    assert done.exit_code == 1
    assert f"tbe-export: {message}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r" / "m").exists()


def test_inspect_shows_what_a_bundle_holds(mixed: Path) -> None:
    shown = tbe_export("inspect", str(mixed)).stdout
    for words in (("user", "user_id", "32.0 kB", "10.0 kB"), ("genre", "genres", "640 B", "320 B")):
        assert any(all(word in line for word in words) for line in shown.splitlines()), (words, shown)
    assert "torchrec 1.8.0" in shown
    done = tbe_export("inspect", str(mixed), "--json")
    assert json.loads(done.stdout) == json.loads((mixed / "manifest.json").read_text())
    done = tbe_export("inspect", str(mixed.parent))
    assert done.exit_code == 1
    assert "manifest.json: cannot be read: No such file or directory" in done.stderr


def test_verify_reads_every_byte_and_asks_every_table(mixed: Path, tmp_path: Path) -> None:
    done = tbe_export("verify", str(mixed))
    assert done.exit_code == 0, done.stderr
    assert "3 files" in done.stdout
    assert "as recorded at export" in done.stdout
    steps = ("float ↔ quantized", "quantized ↔ sharded", "sharded ↔ scripted", "scripted ↔ reloaded")
    for table in ("user", "item", "genre", "word"):
        for step in steps:
            assert any(line.split()[:1] == [table] and step in line for line in done.stdout.splitlines())
    copy = Path(shutil.copytree(mixed, tmp_path / "1"))
    weights = copy / "weights.0.bin"
    content = bytearray(weights.read_bytes())
    content[1000] ^= 1
    weights.write_bytes(content)
    done = tbe_export("verify", str(copy))
    assert done.exit_code == 1
    assert "weights.0.bin: expected SHA-256" in done.stderr


def test_verify_takes_a_model_for_the_version_it_is_to_serve(mixed: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(mixed.parent, tmp_path / "mixed"))
    (Path(shutil.copytree(model / "1", model / "2")) / "program.pt").write_bytes(b"")
    done = tbe_export("verify", str(model))
    assert done.exit_code == 1
    assert f"{model}/2/program.pt: expected" in done.stderr
    config = read_config(model)
    config.version_policy.specific.versions.append(1)
    write_config(model, config)
    assert tbe_export("verify", str(model)).exit_code == 0


def test_verify_beside_the_trained_weights_measures_every_row(mixed: Path, tmp_path: Path) -> None:
    """The numbers are numpy's own, worst row included; weights that have moved on since are noticed."""
    module = collection()
    torch.save(module.state_dict(), tmp_path / "w.pt")
    given = ("--model", "tests.models:collection", "--checkpoint", str(tmp_path / "w.pt"))
    done = tbe_export("verify", str(mixed), *given, "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ok"], report["failures"], report["quantized_measured"]) == (True, [], True)
    for parity in report["tables"]:
        trained = float_tables(module)[parity["table"]].astype(np.float64)
        stored = oracle.exported_table(mixed, parity["table"]).astype(np.float64)
        error = np.abs(trained - stored)
        cosine = (trained * stored).sum() / np.linalg.norm(trained) / np.linalg.norm(stored)
        assert parity["quantized"]["worst_row"] == error.max(axis=1).argmax()
        found = [parity["quantized"][name] for name in ("largest", "mean", "cosine")]
        assert found == pytest.approx([error.max(), error.mean(), cosine], rel=1e-5)

    with torch.no_grad():
        module.state_dict()["embedding_bags.item.weight"][17, 3] += 5
    torch.save(module.state_dict(), tmp_path / "w.pt")
    done = tbe_export("verify", str(mixed), *given)
    assert done.exit_code == 1
    assert "table 'item': row 17 differs by 4.9" in done.stderr
    assert "table 'user'" not in done.stderr
    done = tbe_export("verify", str(mixed), *given, "--json")
    assert (done.exit_code, json.loads(done.stdout)["ok"]) == (1, False)


def test_verify_with_another_model_names_what_differs(mixed: Path) -> None:
    done = tbe_export("verify", str(mixed), "--model", "tests.test_commands:another")
    assert done.exit_code == 1
    assert "expected a model with tables {'user': (500, 16)" in done.stderr
    done = tbe_export("verify", str(mixed), "--checkpoint", "w.pt")
    assert done.exit_code == 1
    assert "--checkpoint: expected --model too" in done.stderr


def another() -> EmbeddingBagCollection:
    return collection(SUM)


PLAN = ("plan", "--model", "tests.models:collection", "--ranks", "4", "--ranks-per-host", "2")


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
        "model", "--model", "tests.models:collection", "--repository", str(tmp_path / "r"), "--name", "m",
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


SETTINGS = """
dtype = { "*" = "int4", user = "fp16" }
id_policy = "zero"
output_dtype = "fp16"

[sharding]
ranks = 4
memory_per_rank = "1 GiB"
types = "column_wise"
min_partition = { item = 16 }

[serving]
instances = 2
max_request_ids = 1000
"""


def test_a_file_says_it_all_and_options_count_after_it(tmp_path: Path) -> None:
    (tmp_path / "export.toml").write_text(SETTINGS)
    done = tbe_export(
        "model", "--model", "tests.models:collection", "--repository", str(tmp_path / "r"), "--name", "m",
        "--config", str(tmp_path / "export.toml"), "--dtype", "us*=int8", "--ranks", "2", "--sharding", "word=row_wise",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    manifest = open_bundle(tmp_path / "r" / "m" / "1").manifest
    assert [table.dtype.value for table in manifest.tables] == ["INT8", "INT4", "INT4", "INT4"]
    assert {table.id_policy.value for table in manifest.tables} == {"zero"}
    assert manifest.output_dtype.value == "FP16"
    assert len(manifest.plan.ranks) == 2
    assert [kind.value for kind in manifest.plan.sharding.values()] == ["column_wise"] * 3 + ["row_wise"]
    assert {shard.width for shard in manifest.plan.shards_by_table["item"]} == {16}
    served = settings_of(read_config(tmp_path / "r" / "m"))
    assert (served.instances, served.max_request_ids) == (2, 1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param('dtpye = "int8"', "unknown field `dtpye`", id="unknown key"),
        pytest.param(
            "[sharding]\nranks = 'two'", "Expected `int | null`, got `str` - at `$.sharding.ranks`", id="type"
        ),
        pytest.param("dtype = ", "Invalid value (at end of document)", id="not TOML"),
        pytest.param('dtype = "int3"', "dtype: expected one of fp32", id="value"),
        pytest.param("[serving]\ninstance = 2", "serving: unknown setting 'instance'", id="unknown setting"),
        pytest.param("[serving]\ninstances = 0", "serving: instances: expected", id="setting"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "export.toml").write_text(text)
    done = tbe_export(*PLAN, "--config", str(tmp_path / "export.toml"))
    assert done.exit_code == 1
    assert message in done.stderr


@pytest.mark.parametrize("package", ["serving", "export"])
def test_help_names_every_command(package: str) -> None:
    done = subprocess.run([sys.executable, "-m", package, "--help"], capture_output=True, text=True, check=True)
    assert {"serving": {"run", "lookup"}, "export": {"model", "plan", "inspect", "verify"}}[package] <= set(
        done.stdout.split()
    )
