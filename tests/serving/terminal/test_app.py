"""What a terminal shows of names, paths and advice that people did not write for it."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from export.__main__ import app as tbe_export
from export.config import ExportConfig
from serving.errors import ConfigurationError
from serving.server.private_folder import PrivateFolder
from serving.server.run_file import RunFile, RunFileWriter
from tests.support.commands import TRAINED


def test_torch_s_advice_is_left_out_of_an_error(tmp_path: Path) -> None:
    """Its advice is to run the code in the file."""
    torch.save({"at": Path("x"), "config": ExportConfig()}, tmp_path / "w.pt")
    arguments = ["plan", *TRAINED, "--max-error", "1", "--checkpoint", str(tmp_path / "w.pt")]
    done = CliRunner().invoke(tbe_export, arguments)
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"tbe-export: --checkpoint {tmp_path / 'w.pt'}: expected tensors and plain containers alone"
    )
    assert "weights_only" not in line


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """Neither as pictures nor as styles."""
    (tmp_path / "t.toml").write_text('[tables.":x: [red]"]\nrows = 10\ndim = 4\n')
    arguments = [
        "compare",
        "--tables",
        str(tmp_path / "t.toml"),
        "--out",
        str(tmp_path / ":x: [b]"),
        "--seconds",
        "0.001",
    ]
    done = CliRunner().invoke(tbe_export, [*arguments, "--ranks", "2", "--dtype", "int8", "--strategy", "row_wise"])
    assert done.exit_code == 0, done.stderr
    assert f"written {tmp_path / ':x: [b]'}" in done.stdout


def test_a_path_of_any_bytes_is_taken(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux has paths that are no UTF-8; JSON, HTML and protobuf do not."""
    bundle = shutil.copytree(mixed, tmp_path / "\udcff" / "m" / "1")
    done = CliRunner().invoke(tbe_export, ["verify", str(bundle), "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["bundle"] == str(bundle).replace("\udcff", "\ufffd")
    (tmp_path / "t.toml").write_text("[tables.a]\nrows = 10\ndim = 4\n")
    arguments = ["compare", "--tables", str(tmp_path / "t.toml"), "--out", str(tmp_path / "\udcff" / "out")]
    arguments += ["--seconds", "0.001", "--ranks", "2", "--dtype", "int8", "--strategy", "row_wise"]
    monkeypatch.setattr(sys, "argv", ["tbe-export", *arguments])
    assert CliRunner().invoke(tbe_export, arguments).exit_code == 0
    private = PrivateFolder(
        path=str(tmp_path), source=str(bundle), keys="keys.pem", weights_in_place=False, min_versions={}
    )
    for repository, folder in (("r", private), (str(bundle), None)):
        run_file = RunFile(
            grpc="127.0.0.1:1",
            control="unix:/c",
            metrics="unix:/m",
            key="k",
            repository=repository,
            private=folder,
            process=1,
        )
        with pytest.raises(ConfigurationError, match="expected a path in UTF-8"), RunFileWriter(run_file).published():
            pass


_PRINTS = (
    "from rich.table import Table; from serving.terminal.app import out; table = Table('name', 'path', title='t'); "
    "table.add_row('n' * 100, 'p' * 300); out.print(table); out.print('word ' * 60)"
)


@pytest.mark.parametrize("columns", [None, "80"])
def test_output_to_a_pipe_is_not_truncated(columns: str | None) -> None:
    """Programs read it."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-c", _PRINTS],
        env=environment | ({} if columns is None else {"COLUMNS": columns}),
        capture_output=True,
        text=True,
        check=True,
    )
    (row,) = (line for line in done.stdout.splitlines() if "n" * 100 in line)
    assert "p" * 300 in row
    assert done.stdout.splitlines()[-1].split() == ["word"] * 60


def test_output_to_a_terminal_fits_its_width() -> None:
    ours, terminal = pty.openpty()
    try:
        environment = {**os.environ, "COLUMNS": "60", "TERM": "xterm"}
        subprocess.run([sys.executable, "-c", _PRINTS], env=environment, stdout=terminal, check=True)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", os.read(ours, 1 << 16).decode()).splitlines()
        assert max(map(len, shown)) == 60
    finally:
        os.close(ours)
        os.close(terminal)
