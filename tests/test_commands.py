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
from typer.testing import CliRunner

from export.__main__ import app as export_app
from serving.bundle import open_bundle
from serving.engine import Engine
from serving.server import Server
from tests.models import collection


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
    assert done.stderr.startswith("tbe-serve: 127.0.0.1:1: model 'mixed': ")
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
        pytest.param(["--dtype", "int3"], "dtype: expected one of fp32, fp16, int8, int4, int2, got 'int3'", id="dtype"),
        pytest.param(["--dtype", "itme=int4"], "dtype 'itme': expected the name of a table", id="pattern"),
        pytest.param(["--max-error", "small"], "max-error: expected a number, got 'small'", id="number"),
        pytest.param(["--dtype", "int8", "--max-error", "user=1e-9"], "table 'user': INT8 moves an element by", id="limit"),
        pytest.param(["--checkpoint", "nowhere.pt"], "nowhere.pt: expected a file, or a folder with", id="checkpoint"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_said_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = tbe_export(
        "model", "--repository", str(tmp_path / "r"), "--name", "m", "--model", "tests.models:collection", *arguments
    )
    assert done.exit_code == 1
    assert f"tbe-export: {message}" in done.stderr
    assert "Nothing was published." in done.stderr
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
    assert "4 tables are as exported" in done.stdout
    copy = Path(shutil.copytree(mixed, tmp_path / "1"))
    weights = copy / "weights.0.bin"
    content = bytearray(weights.read_bytes())
    content[1000] ^= 1
    weights.write_bytes(content)
    done = tbe_export("verify", str(copy))
    assert done.exit_code == 1
    assert "weights.0.bin: expected SHA-256" in done.stderr


@pytest.mark.parametrize("package", ["serving", "export"])
def test_help_names_every_command(package: str) -> None:
    done = subprocess.run([sys.executable, "-m", package, "--help"], capture_output=True, text=True, check=True)
    assert {"serving": {"run", "lookup"}, "export": {"model", "inspect", "verify"}}[package] <= set(
        done.stdout.split()
    )
