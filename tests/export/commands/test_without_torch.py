"""What commands do that need no torch: they do not wait for it, and a client-only install has them."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export.__main__ import app as export_app
from serving.__main__ import app as serving_app

_HEAVY = ("fbgemm_gpu", "jinja2", "matplotlib", "torch", "torchrec")
# Each command in a process that has imported the program and nothing else. That is forked: to import it takes a second.
_RUN_EACH = f"""
import json, multiprocessing, sys
from typer.testing import CliRunner
from export.__main__ import app
def run(arguments):
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, repr(done.exception), done.stderr, sorted({_HEAVY} & sys.modules.keys())
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    json.dump(pool.map(run, json.load(sys.stdin), chunksize=1), sys.stdout)
"""
_MANIFESTS = ("--out", "out", "--claim", "c", "--insecure", "--image")
_IMAGE = "r/n@sha256:" + 64 * "0"
_WRITING = ("manifests", "MODEL", *_MANIFESTS, _IMAGE)  # by templates
_EXPORT = ("--model", "no.such:module", "--repository", "r", "--name", "m")


def _export_names() -> list[str]:
    return [
        str(command.callback.__name__).replace("_", "-")
        for command in export_app.registered_commands
        if command.callback
    ]


@pytest.fixture(scope="module")
def model(mixed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two versions."""
    model = Path(shutil.copytree(mixed.parent, tmp_path_factory.mktemp("light") / "mixed"))
    shutil.copytree(model / "1", model / "2")
    return model


_LIGHT: dict[tuple[str, ...], int] = dict(
    [
        (("--help",), 0),
        (("--version",), 0),
        (("no-such-command",), 2),
        *(((name, "--help"), 0) for name in _export_names()),
        *(((name, "--no-such-option"), 2) for name in _export_names()),
        (("model", *_EXPORT, "--dtype", "int7"), 1),
        (("model", *_EXPORT, "--only-hosts", "a"), 1),
        (("model", *_EXPORT, "--ranks", "0"), 1),
        (("plan", "--model", "no.such:module", "--sharding", "none"), 1),
        (("publish-router", *_EXPORT, "--version", "1", "--config", "no-such-file"), 1),
        (("compare", "--out", "out"), 1),
        (("compare", "--out", "out", "--tables", "t.toml", "--dtype", "int7"), 1),
        (("verify", "MODEL", "--checkpoint", "c.pt"), 1),
        (("inspect", "MODEL/1"), 0),
        (("inspect", "MODEL/1", "--json"), 0),
        (("release", "MODEL", "1"), 0),
        (("release", "MODEL", "7"), 1),
        (("push", "MODEL", "file:///nowhere"), 1),
        (_WRITING, 0),
        (("manifests", "MODEL", *_MANIFESTS, "bad"), 1),
        (("prune", "MODEL", "--keep", "1", "--dry-run"), 0),
        (("prune", "MODEL", "--keep", "0"), 1),
    ]
)


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Any]:
    """Of each command: its code, its exception, what it said, and what it imported."""
    typed = [[argument.replace("MODEL", str(model)) for argument in arguments] for arguments in _LIGHT]
    said = subprocess.run(
        [sys.executable, "-c", _RUN_EACH],
        cwd=tmp_path_factory.mktemp("commands"),
        input=json.dumps(typed),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return dict(zip(_LIGHT, json.loads(said), strict=True))


@pytest.mark.parametrize("arguments", _LIGHT, ids=" ".join)
def test_commands_that_need_no_torch_do_not_import_it(
    done: dict[tuple[str, ...], Any], arguments: tuple[str, ...]
) -> None:
    code, exception, stderr, imported = done[arguments]
    assert code == _LIGHT[arguments], stderr
    assert imported == (["jinja2"] if arguments == _WRITING else [])
    assert exception == "None" or exception.startswith("SystemExit"), exception


_NEEDS_TORCH: dict[str, tuple[str, ...]] = {
    "model": _EXPORT,
    "publish-router": (*_EXPORT, "--version", "1"),
    "plan": ("--model", "no.such:module"),
    "verify": ("MODEL/1",),
    "delta": ("MODEL", "--model", "no.such:module"),
    "squash": ("MODEL",),
    "compact": ("MODEL",),
    "compare": ("--out", "out", "--model", "no.such:module"),
    "manifests": ("MODEL", *_MANIFESTS, _IMAGE),
}
_SERVING: dict[str, tuple[tuple[str, ...], Callable[[str], bool]]] = {
    "run": (("REPOSITORY",), lambda said: "tritonserver" in said and "pip install 'tbe-serving[server]'" in said),
    "pull": (("s3://bucket/models", "r"), lambda said: "needs a package: pip install obstore" in said),
    "lookup": (("mixed", "--url", "127.0.0.1:1"), lambda said: "127.0.0.1:1: " in said),
    "score": (("mixed", "--url", "127.0.0.1:1"), lambda said: "127.0.0.1:1: " in said),
    "score-files": (
        ("day.parquet", "--bundle", "MODEL/1", "--out", "scores"),
        lambda said: "pyarrow: " in said and "pip install 'tbe-serving[batch]'" in said,
    ),
    "configure": (("MODEL",), lambda said: said == ""),
    "load": (("mixed", "--url", "127.0.0.1:1"), lambda said: "127.0.0.1:1: " in said),
    "health": (("mixed", "--url", "127.0.0.1:1"), lambda said: "127.0.0.1:1: " in said),
    "status": (("127.0.0.1:1",), lambda said: "127.0.0.1:1: " in said),
    "bench": (("mixed", "--url", "127.0.0.1:1", "--bundle", "MODEL/1"), lambda said: "127.0.0.1:1: " in said),
}


@pytest.fixture(scope="module")
def client_only(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """Of each program and command: its code, its output, its errors and its exception, in a client-only install."""
    commands = {
        **{(program, "--version"): () for program in ("export", "serving")},
        **{("export", command): arguments for command, arguments in _NEEDS_TORCH.items()},
        **{("serving", command): arguments for command, (arguments, _) in _SERVING.items()},
    }
    names = {"REPOSITORY": str(model.parent), "MODEL": str(model)}
    typed = [
        [*command, *(re.sub("REPOSITORY|MODEL", lambda match: names[match[0]], argument) for argument in arguments)]
        for command, arguments in commands.items()
    ]
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.client_only"],
        cwd=tmp_path_factory.mktemp("client_only"),
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin"},
        input=json.dumps(typed),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return dict(zip(commands, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("program", ["export", "serving"])
def test_a_client_only_install_says_its_versions(client_only: dict[tuple[str, str], Any], program: str) -> None:
    code, stdout, stderr, _ = client_only[program, "--version"]
    assert (code, stderr) == (0, "")
    assert "torch not installed (tested with 2.13 and 2.14)" in stdout.splitlines()


@pytest.mark.parametrize("command", _NEEDS_TORCH)
def test_a_client_only_install_says_what_an_export_needs(
    client_only: dict[tuple[str, str], Any], command: str
) -> None:
    """In one line, which names what pip can install."""
    code, stdout, stderr, _ = client_only["export", command]
    assert (code, stdout) == (1, "")
    (line,) = stderr.splitlines()
    assert line.startswith(
        "tbe-export: yaml: " if command == "manifests" else "tbe-export: torch: expected 2.13 or 2.14, "
    )
    assert "pip install 'tbe-serving[export]'" in line


@pytest.mark.parametrize("command", _SERVING)
def test_a_client_only_install_shows_no_trace(client_only: dict[tuple[str, str], Any], command: str) -> None:
    _, is_right = _SERVING[command]
    _, _, stderr, exception = client_only["serving", command]
    assert is_right(stderr), stderr
    assert len(stderr.splitlines()) <= 1
    assert exception == "None" or exception.startswith("SystemExit"), exception


def test_every_command_is_run_in_a_client_only_install() -> None:
    light = {"inspect", "push", "release", "prune"}  # run above, with what needs no torch
    assert _NEEDS_TORCH.keys() | light == set(_export_names())
    assert _SERVING.keys() == {
        command.callback.__name__.replace("_", "-") for command in serving_app.registered_commands if command.callback
    }
