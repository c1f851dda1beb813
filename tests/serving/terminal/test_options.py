"""Every option of every command, given what it does not expect: it is refused in one line that names it, or taken."""

import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from torch import nn
from typer.testing import CliRunner, Result

from export.__main__ import app as tbe_export
from serving.__main__ import app as tbe_serve
from tests.support.long_cases import one_in
from tests.support.models import collection

LONG = "n" * 5000
NUMBERS = ["-1", "0", "nan", "inf", "-inf", "1e309", f"{10**30}", "1.5"]
WORDS = ["", "x", ":x:", "[red]", "a=b=c", "\udcff", "a\nb\x1b[31m", LONG]
# Files by name, for options that take one; nothing draws a picture into a .txt, which takes time.
FILES = {
    "not-utf8.txt": b"\xff\xfe\xe9",
    "empty.txt": b"",
    "words.txt": b"some words\n",
    "deep.txt": b"[" * 100_000,
    "digits.txt": b"9" * 5000,
    "huge.json": b'{"a": 1e999}',
    "zip.txt": b"PK\x03\x04" + bytes(50),
    "pem.txt": b"-----BEGIN CERTIFICATE----- AAAA -----END CERTIFICATE-----\n",
    "a.safetensors": b"\xff" * 20,
    "a.safetensors.index.json": b"\xff",
}
PATHS = [*FILES, "folder", "nowhere", "words.txt/under"]


def values(param: Any) -> list[str]:
    if getattr(param, "is_flag", False):
        return [""]
    described = param.type_descriptor
    return [*WORDS, *PATHS] if described.is_path or described.is_file else [*NUMBERS, *WORDS]


def small() -> nn.Module:
    module: nn.Module = collection()
    return module


# What a command is given beside the option, arguments first; and how it ends once the option was taken, if not with 0:
# no server is started or reached, which comes after all that was typed was understood.
UNREACHED = "connections to all backends failing"
MODEL = ["--model", "tests.serving.terminal.test_options:small"]
HOSTS = ["--version", "1", "--ranks", "2", "--sharding", "table_wise", "--hosts-as-models"]
KUBERNETES = ["--out", "base", "--image", f"registry.example/tbe@sha256:{'0' * 64}", "--claim", "models"]
BENCH = ["--bundle", "repository/mixed/1"]
BASES: dict[str, tuple[list[str], list[str], str]] = {
    "tbe-export model": ([], [*MODEL, "--repository", "r", "--name", "m"], ""),
    "tbe-export publish-router": (
        [],
        [*MODEL, "--repository", "r", "--name", "m", *HOSTS],
        "the set is not complete",
    ),
    "tbe-export plan": ([], MODEL, ""),
    "tbe-export inspect": (["repository/mixed/1"], [], ""),
    "tbe-export verify": (["repository/mixed/1"], [], ""),
    "tbe-export manifests": (["repository/mixed"], KUBERNETES, "or an earlier base for"),
    "tbe-export release": (["repository/mixed", "1"], [], ""),
    "tbe-export push": (["repository/mixed", "file:///nowhere"], [], "cannot be opened"),
    "tbe-export delta": (["repository/mixed"], MODEL, ""),
    "tbe-export compact": (["repository/mixed"], [], "expected deltas of"),
    "tbe-export squash": (["repository/mixed"], [], "expected two deltas or more"),
    "tbe-export prune": (["repository/mixed"], ["--keep", "1"], ""),
    "tbe-export compare": (
        [],
        ["--tables", "tables.toml", "--out", "out", "--dtype", "int2"],
        "multiple of 8 for INT2",
    ),
    "tbe-serve run": (
        ["repository"],
        ["--grpc-port", "TAKEN", "--operations-port", "TAKEN"],
        "Address already in use",
    ),
    "tbe-serve pull": (["file:///nowhere", "here"], [], "cannot be opened"),
    "tbe-serve lookup": (["m"], ["--url", "127.0.0.1:1"], UNREACHED),
    "tbe-serve score": (["m"], ["--url", "127.0.0.1:1"], UNREACHED),
    "tbe-serve score-files": (
        ["day.parquet"],
        ["--server", "127.0.0.1:1", "--model", "m", "--out", "scores"],
        UNREACHED,
    ),
    "tbe-serve configure": (["repository/mixed"], [], ""),
    "tbe-serve load": (["m"], ["--url", "127.0.0.1:1"], "found none: run this on the server's machine"),
    "tbe-serve status": (["127.0.0.1:1"], [], UNREACHED),
    "tbe-serve health": (["m"], ["--url", "127.0.0.1:1"], UNREACHED),
    "tbe-serve bench": (["m"], ["--url", "127.0.0.1:1", *BENCH], UNREACHED),
}


def programs() -> Iterator[tuple[typer.Typer, str, Any]]:
    for app in (tbe_export, tbe_serve):
        program: Any = typer.main.get_command(app)
        for name, command in program.commands.items():
            yield app, f"{program.name} {name}", command


# The names of the arguments of each command, in order.
ARGUMENTS = {
    name: [param.name for param in command.params if param.param_type_name == "argument"]
    for _, name, command in programs()
}


def everything() -> Iterator[Any]:
    for app, name, command in programs():
        for param in command.params:
            yield pytest.param(app, name, param, id=f"{name} {param.opts[0]}")


@pytest.fixture(scope="module")
def valid_value(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """In a folder with what commands need: a port that somebody listens on."""
    folder = tmp_path_factory.mktemp("options")
    shutil.copytree(repository / "mixed", folder / "repository" / "mixed")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "tables.toml").write_text("[tables.a]\nrows = 10\ndim = 4\n")
    before = Path.cwd(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    os.chdir(folder)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])
    os.chdir(before[0])
    signal.signal(signal.SIGINT, before[1])
    signal.signal(signal.SIGTERM, before[2])


def test_every_command_has_a_base_case() -> None:
    assert set(BASES) == {name for _, name, _ in programs()}


@pytest.mark.parametrize(("app", "command", "param"), one_in(9, everything()))
def test_an_option_is_accepted_or_refused_by_name_in_one_line(
    app: typer.Typer, command: str, param: Any, valid_value: str, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for value in values(param):
        capfd.readouterr()
        done = CliRunner().invoke(app, typed(command, param, value, valid_value), input='{"a": [[1]]}')
        written = capfd.readouterr().err  # what libraries wrote past Python
        if not (is_taken(done, command) or is_refused(done, command, param, value)) or (done.exit_code and written):
            wrong.append(f"{value[:40]!r}: {done.exit_code} {done.exception!r}: {done.stderr[:300]}{written[:300]}")
    assert not wrong, "\n".join(wrong)


def typed(command: str, param: Any, value: str, port: str) -> list[str]:
    arguments, options, _ = BASES[command]
    options = [port if option == "TAKEN" else option for option in options]
    if param.param_type_name == "option":
        if param.opts[0] in options:  # an option is given once
            position = options.index(param.opts[0])
            options = [*options[:position], *options[position + 2 :]]
        options += [param.opts[0]] if param.is_flag else [param.opts[0], value]
    elif param.name in ARGUMENTS[command] and ARGUMENTS[command].index(param.name) < len(arguments):
        arguments = [
            value if name == param.name else argument
            for name, argument in zip(ARGUMENTS[command], arguments, strict=False)
        ]
    else:
        arguments = [*arguments, value]
    return [command.split()[1], *options, "--", *arguments]


def is_taken(done: Result, command: str) -> bool:
    return done.exit_code == 0 or bool((late := BASES[command][2]) and late in done.stderr)


def is_refused(done: Result, command: str, param: Any, value: str) -> bool:
    """The exit code of an error, and one line."""
    program = command.split()[0]
    lines = done.stderr.splitlines()
    if not isinstance(done.exception, SystemExit) or len(lines) != 1 or not lines[0].startswith(f"{program}: "):
        return False
    shown = re.sub(r"\s*[\x00-\x1f]+\s*", " ", value).replace("\udcff", r"\udcff")
    named = [param.opts[0]] if param.param_type_name == "option" else [shown, f"'{param.name}'"]
    return any(name in lines[0] for name in named)
