"""What commands say of what people wrote: their modules, their files, and how names look on a terminal."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from export.__main__ import app as tbe_export
from export.config import ExportConfig
from export.errors import ConfigError
from export.settings import Settings, ShardingSettings, export_config
from export.sharding import Sharding
from export.toml_file import read_toml
from serving.__main__ import app as tbe_serve
from serving.capture import read_captured
from serving.client import LookupClient, Retries
from serving.config_file import read_config, settings_of
from serving.errors import ConfigurationError, InvalidRequest, ServerFailed
from serving.server import Control
from serving.server.private import PrivateFolder
from serving.server.run_file import RunFile
from serving.settings import ServingSettings

USERS = """
import sys
def deep(x):
    return x["weight"]
def raises():
    return deep({})
def lines():
    raise ValueError("one\\ntwo :x: [red]")
def leaves():
    sys.exit(0)
def asks(size):
    pass
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with somebody's module, which is the working directory."""
    (tmp_path / "theirs.py").write_text(USERS)
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "needs.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        pytest.param("theirs:raises", "KeyError: 'weight' (FOLDER/theirs.py:4)", id="raises"),
        pytest.param("theirs:lines", "ValueError: one two :x: [red] (FOLDER/theirs.py:8)", id="several lines"),
        pytest.param("theirs:leaves", "SystemExit: 0 (FOLDER/theirs.py:10)", id="exits"),
        pytest.param("needs:build", "ModuleNotFoundError: No module named 'no_such_package' (FOLDER/needs.py:1)", id="imports"),
        pytest.param("theirs:asks", "expected package.module:function, without arguments: TypeError", id="arguments"),
        pytest.param("broken:build", "expected package.module:function, without arguments: SyntaxError", id="syntax"),
    ],
)  # fmt: skip
def test_what_a_users_module_raises_is_told_in_one_line_with_its_place(users: Path, spec: str, said: str) -> None:
    done = CliRunner().invoke(tbe_export, ["plan", "--model", spec])
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 1
    assert line.startswith(f"tbe-export: --model {spec}: ")
    assert said.replace("FOLDER", str(users)) in line


@pytest.mark.parametrize("arguments", [["--verbose", "plan"], ["plan", "--verbose"]])
@pytest.mark.usefixtures("users")
def test_verbose_shows_how_it_came_there(arguments: list[str]) -> None:
    done = CliRunner().invoke(tbe_export, [*arguments, "--model", "theirs:raises"])
    assert done.exit_code == 1
    assert 'return x["weight"]' in done.stderr
    assert done.stderr.splitlines()[-1].startswith("tbe-export: --model theirs:raises: KeyError")


def test_what_torch_advises_is_not_passed_on(tmp_path: Path) -> None:
    """Its advice is to run the code in the file."""
    torch.save({"w": torch.zeros(2), "at": Path("x"), "config": ExportConfig()}, tmp_path / "w.pt")
    given = ["plan", "--model", "tests.models:collection", "--max-error", "1", "--checkpoint", str(tmp_path / "w.pt")]
    done = CliRunner().invoke(tbe_export, given)
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"tbe-export: --checkpoint {tmp_path / 'w.pt'}: expected tensors and plain containers alone"
    )
    assert "weights_only" not in line


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """Neither as pictures nor as styles."""
    (tmp_path / "t.toml").write_text('[tables.":x: [red]"]\nrows = 10\ndim = 4\n')
    given = [
        "compare",
        "--tables",
        str(tmp_path / "t.toml"),
        "--out",
        str(tmp_path / ":x: [b]"),
        "--seconds",
        "0.001",
    ]
    done = CliRunner().invoke(tbe_export, [*given, "--ranks", "2", "--dtype", "int8", "--strategy", "row_wise"])
    assert done.exit_code == 0, done.stderr
    assert f"written {tmp_path / ':x: [b]'}" in done.stdout


def test_a_path_of_any_bytes_is_taken(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux has paths that are no UTF-8; JSON, HTML and protobuf do not."""
    bundle = shutil.copytree(mixed, tmp_path / "\udcff" / "m" / "1")
    done = CliRunner().invoke(tbe_export, ["verify", str(bundle), "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["bundle"] == str(bundle).replace("\udcff", "\ufffd")
    (tmp_path / "t.toml").write_text("[tables.a]\nrows = 10\ndim = 4\n")
    given = ["compare", "--tables", str(tmp_path / "t.toml"), "--out", str(tmp_path / "\udcff" / "out")]
    given += ["--seconds", "0.001", "--ranks", "2", "--dtype", "int8", "--strategy", "row_wise"]
    monkeypatch.setattr(sys, "argv", ["tbe-export", *given])
    assert CliRunner().invoke(tbe_export, given).exit_code == 0
    private = PrivateFolder(
        path=str(tmp_path), source=str(bundle), keys="keys.pem", weights_in_place=False, min_versions={}
    )
    run_file = RunFile(grpc="127.0.0.1:1", control="unix:/c", key="k", private=private)
    with pytest.raises(ServerFailed, match="expected a path in UTF-8"), run_file.written():
        pass


def test_lines_that_are_no_text_are_reported_and_the_others_answered() -> None:
    lines = b'\xff\n{"a": [[' + b"9" * 5000 + b']]}\n{"a": {"values": [1], "lengths": [1], "weights": ["x"]}}\n'
    done = CliRunner().invoke(tbe_serve, ["lookup", "m", "--url", "127.0.0.1:1"], input=lines)
    said = done.stderr.splitlines()
    assert [line.partition(": expected")[0] for line in said[:2]] == ["tbe-serve: line 1", "tbe-serve: line 2"]
    assert "connections to all backends failing" in said[2]
    assert len(said) == 3


@pytest.mark.parametrize("number", ["9" * 5000, f"{10**30}", "1e400", "nan", '"x"', "\udcff"])
def test_a_captured_number_that_is_none_is_refused_by_its_line(number: str, tmp_path: Path) -> None:
    good = '{"at": "", "why": "", "values": [1], "lengths": [1]}\n'
    for bad in (good.replace("[1]", f"[{number}]", 1), good.replace('"lengths": [1]', f'"lengths": [{number}]')):
        (tmp_path / "captured.jsonl").write_bytes((good + bad).encode(errors="surrogateescape"))
        with pytest.raises(InvalidRequest, match=r"captured\.jsonl: line 2: expected a captured request: "):
            list(read_captured(tmp_path / "captured.jsonl"))


NUMBERS = ["-1", "0", "nan", "inf", "-inf", "1e400", f"{10**30}", "9" * 5000, '"nan"', '"inf"', '"x"', "true", "[]"]
FIELDS = [
    *(("", field) for field in Settings.__struct_fields__),
    *(("[sharding]\n", field) for field in ShardingSettings.__struct_fields__),
    *(("[serving]\n", field.name) for field in dataclasses.fields(ServingSettings)),
]


@pytest.mark.parametrize(("table", "field"), FIELDS, ids=lambda each: each.strip())
def test_a_number_in_a_file_is_one_that_can_be_published_or_refused_by_name(
    table: str, field: str, tmp_path: Path
) -> None:
    path = tmp_path / "export.toml"
    for number in NUMBERS:
        path.write_text(f"{table}{field} = {number}\n")
        refused, found = "", [0.0]
        try:
            found = numbers(export_config(read_toml(path, Settings)))
        except ConfigError as error:
            refused = str(error)
        assert field in refused or (len(number) == 5000 and refused.startswith(str(path))) or not refused
        assert all(math.isfinite(each) and (isinstance(each, float) or abs(each) < 2**63) for each in found)


def numbers(config: Any) -> list[float]:
    """Every number in a config, and in the configs in it."""
    found: list[float] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for each in value.values() if isinstance(value, dict) else [value]:
            found += (
                numbers(each) if dataclasses.is_dataclass(each) else [each] if isinstance(each, int | float) else []
            )
    return found


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0, -math.inf, 1e300], ids=str)
def test_configs_refuse_numbers_that_are_none(number: float) -> None:
    if number != 1e300:
        with pytest.raises(ConfigError, match="max_error 't': expected a finite number > 0"):
            ExportConfig(max_error={"t": number})
    with pytest.raises(ConfigError, match="pooling_factors 't': expected"):
        Sharding(pooling_factors={"t": number})
    if number != 1e300:
        with pytest.raises(ConfigurationError, match="capture_slow_ms: expected"):
            ServingSettings(capture_slow_ms=number)
    with pytest.raises(InvalidRequest, match="timeout_s: expected"):
        LookupClient("127.0.0.1:1", "m", number)
    with pytest.raises(InvalidRequest, match="timeout_s: expected"):
        Control(address="127.0.0.1:1", key=None, timeout_s=number)
    with pytest.raises(InvalidRequest, match="max_backoff_s: expected"):
        Retries(max_backoff_s=number)


@pytest.mark.parametrize(
    "address", ["", "x", ":1", "a:x", "a:99999", "a b:1", "[::1", "ftp://a:1", "a:1/b", "\udcff:1"]
)
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(InvalidRequest, match=r"expected host:port, such as 127\.0\.0\.1:8001"):
        LookupClient(address, "m")


@pytest.mark.parametrize(
    "address", ["localhost:1", "127.0.0.1:1", "[::1]:1", "dns:///name.svc:8001", "my_host-2.x:65535"]
)
def test_addresses_that_grpc_takes_are_taken(address: str) -> None:
    LookupClient(address, "m").close()


@pytest.mark.parametrize(
    ("setting", "value"), [("capture", "/tmp"), ("capture_slow_ms", "5"), ("warm_up", "captured.jsonl")]
)
def test_what_can_be_set_can_be_unset(setting: str, value: str, repository: Path, tmp_path: Path) -> None:
    model = tmp_path / "mixed"
    model.mkdir()
    (model / "config.pbtxt").write_text((repository / "mixed" / "config.pbtxt").read_text())
    before = settings_of(read_config(model))
    captured = tmp_path / "captured.jsonl"
    captured.write_text('{"at": "", "why": "", "values": [1], "lengths": [1, 0, 0, 0, 0]}\n')
    option = f"--{setting.replace('_', '-')}"
    value = str(captured) if setting == "warm_up" else value
    assert CliRunner().invoke(tbe_serve, ["configure", str(model), option, value]).exit_code == 0
    assert settings_of(read_config(model)) != before or (model / "warm_up.jsonl").exists()
    done = CliRunner().invoke(tbe_serve, ["configure", str(model), f"--no-{option[2:]}"])
    assert done.exit_code == 0, done.stderr
    assert settings_of(read_config(model)) == before
    assert not (model / "warm_up.jsonl").exists()


@pytest.mark.parametrize("package", ["serving", "export"])
def test_a_program_tells_its_version_and_what_it_is_tested_with(package: str) -> None:
    done = subprocess.run([sys.executable, "-m", package, "--version"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tbe-serving ")
    assert any(line.startswith("torch 2.13.") and line.endswith("(tested with 2.13)") for line in lines)
    assert any(line.startswith("nvidia-pytriton 0.7") for line in lines)
