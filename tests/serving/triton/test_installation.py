"""Which tritonserver there is."""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from serving.errors import (
    TritonserverFailed,
)
from serving.server import run_server
from serving.triton import installation
from tests.support.servers import (
    FREE,
)


def test_a_tritonserver_on_the_path_comes_first(
    one_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the official container: its own backends, our Python. Here a script that stands where it would."""
    with contextlib.ExitStack() as stack:
        bundled = installation.find_tritonserver(stack)
        script = tmp_path / "bin" / "tritonserver"
        script.parent.mkdir()
        exports = "".join(f"export {key}='{value}'\n" for key, value in bundled.environment.items())
        script.write_text(
            f"#!/bin/sh\n{exports}echo started from PATH\n"
            f'exec {bundled.program} --backend-directory={bundled.backends} "$@"\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
        with run_server(one_model, FREE, log=tmp_path / "log") as server:
            assert [model.name for model in server.models] == ["m"]
    assert "started from PATH" in (tmp_path / "log").read_text()


_KILLED = """
import contextlib, os, signal
from serving.triton.installation import find_tritonserver
with contextlib.ExitStack() as stack:
    print(find_tritonserver(stack).backends, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_server_removes_leftovers_of_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    killed = subprocess.run([sys.executable, "-c", _KILLED], capture_output=True, text=True, check=False)
    assert [*tmp_path.iterdir()] == [Path(killed.stdout.strip())]
    with contextlib.ExitStack() as stack:
        backends = installation.find_tritonserver(stack).backends
        assert [*tmp_path.iterdir()] == [backends]
    assert [*tmp_path.iterdir()] == []


def test_without_any_tritonserver_it_says_how_to_get_one(one_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda _: None)
    with (
        pytest.raises(TritonserverFailed, match=r"official container, or `pip install 'tbe-serving\[server\]'`"),
        run_server(one_model, FREE),
    ):
        pass


def test_a_python_without_a_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "sys", SimpleNamespace(version_info=SimpleNamespace(major=3, minor=17)))
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(TritonserverFailed, match=r"for Python 3\.17, found none: .*3\.11.*3\.12.*3\.13$"),
    ):
        installation.find_tritonserver(stack)
