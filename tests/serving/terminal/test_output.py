"""What is printed where the output has no UTF-8, no reader or no room: it never decides an exit code."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from export.__main__ import app as tbe_export
from serving.__main__ import app as tbe_serve
from serving.bundle.release import release_path
from serving.terminal.output import TAKE_ALL, Output, escaped, print_json
from tests.support.commands import TRAINED
from tests.support.fake_server import FakeServer, serving

ENCODINGS = ["ascii", "latin-1", "utf-8"]
FULL = b"standard output: No space left on device: what was printed is not complete\n"
NAMES = "é → 漢 🙂"


def stream(encoding: str) -> tuple[io.BytesIO, Any]:
    raw = io.BytesIO()
    return raw, io.TextIOWrapper(raw, encoding=encoding)


@pytest.mark.parametrize(
    ("encoding", "written"),
    [
        ("ascii", rb"\u00e9 -> \u6f22 \ud83d\ude42" + b" \xff ..."),
        ("latin-1", b"\xe9 -> " + rb"\u6f22 \ud83d\ude42" + b" \xff ..."),
        ("utf-8", NAMES.encode() + b" \xff " + "…".encode()),
    ],
)
def test_names_are_written_in_any_encoding(encoding: str, written: bytes) -> None:
    """\\udcff is a byte of a path that is not UTF-8. It is written as it is, as `ls` does."""
    raw, text = stream(encoding)
    output = Output(text, TAKE_ALL)
    output.write(f"{NAMES} \udcff …")
    output.flush()
    assert raw.getvalue() == written
    assert output.problem is None


def test_a_surrogate_alone_is_escaped() -> None:
    raw, text = stream("utf-8")
    output = Output(text, TAKE_ALL)
    output.write("\ud800")
    output.flush()
    assert raw.getvalue() == rb"\ud800"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_json_stays_json(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, text = stream(encoding)
    monkeypatch.setattr(sys, "stdout", Output(text, TAKE_ALL))
    print_json(msgspec.json.encode({NAMES: NAMES}))
    assert json.loads(raw.getvalue().decode(encoding)) == {NAMES: NAMES}
    assert json.loads(f'"{escaped(NAMES)}"') == NAMES


def test_a_closed_stream_accepts_output() -> None:
    output = Output(None)
    assert output.write(NAMES) == len(NAMES)
    output.flush()


def commands(app: Any) -> list[str]:
    """The names of all commands of a program."""
    done = CliRunner().invoke(app, [])
    listed = done.stdout.partition("Commands:")[2].splitlines()
    return [
        line.split()[0]
        for line in listed
        if line[:3].strip(" │") != "" or (line.startswith("  ") and line[2:3].isalpha())
    ]


@pytest.mark.parametrize("app", [tbe_export, tbe_serve], ids=["tbe-export", "tbe-serve"])
def test_the_help_of_every_command_is_printed_in_ascii(app: Any) -> None:
    names = commands(app)
    assert {"verify", "lookup"} & set(names)
    for name in names:
        done = CliRunner(charset="ascii").invoke(app, [name, "--help"])
        assert done.exit_code == 0, (name, done.exception)


def run(command: Sequence[str], *, into: str = "", **more: Any) -> "subprocess.CompletedProcess[bytes]":
    """Run a command of ours in ASCII; `into` is what a shell makes of its output."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    quoted = " ".join(f"'{word}'" for word in [sys.executable, "-m", *command])
    shell = ["bash", "-o", "pipefail", "-c", f"{quoted} {into}"]
    return subprocess.run(shell, env=environment, capture_output=True, check=False, timeout=300, **more)


def test_answers_are_printed_in_ascii_or_to_a_closed_stream() -> None:
    lines = b'{"x": [[1]]}\n' * 5000
    fake = FakeServer()
    with serving(fake) as address:
        lookup = ["serving", "lookup", "m", "--url", address, "--timeout-s", "60"]
        done = run([*lookup, "--table"], input=lines[:13])
        assert (done.returncode, done.stderr) == (0, b"")
        done = run(lookup, into="| head -n 1", input=lines)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.count(b"\n") == 1
        assert len(fake.calls) < 5000  # nobody reads further answers, so none is asked for
        done = run(lookup, into="> /dev/full", input=lines)
        assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"tbe-serve: " + FULL)


def test_an_export_succeeds_where_its_names_cannot_be_printed(tmp_path: Path) -> None:
    arguments = [*TRAINED, "--max-error", "1", "--repository", str(tmp_path / "réposi→tory"), "--name", "m"]
    done = CliRunner(charset="ascii").invoke(tbe_export, ["model", *arguments])
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"published {tmp_path}/r\\u00e9posi->tory/m/1\n" in done.stdout
    assert (tmp_path / "réposi→tory" / "m" / "1" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("into", "says"),
    [("", b""), ("| true", b""), (">&-", b""), ("2>&-", b""), ("> /dev/full", b"tbe-export: " + FULL)],
    ids=["ascii", "no reader", "closed", "no errors", "full"],
)
def test_a_release_succeeds_however_it_is_printed(into: str, says: bytes, mixed: Path, tmp_path: Path) -> None:
    model = tmp_path / "é→" / "mixed"
    shutil.copytree(mixed.parent, model)
    done = run(["export", "release", str(model), "1"], into=into)
    assert (done.returncode, done.stderr) == (0, says)
    assert release_path(model).is_file()
