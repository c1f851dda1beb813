"""Tests that are killed leave no process behind."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.servers import lives

ROOT = Path(__file__).parent.parent

# What a test starts: a server, and a process in a session of its own that nothing but SIGKILL ends.
HANGS = """
import subprocess, sys, time

from tests.support.servers import running

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(3600)"


def test_that_hangs(one_model):
    with (
        running(one_model),
        subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True) as stubborn,
    ):
        stubborn.stdout.readline()
        print("started", flush=True)
        time.sleep(3600)
"""


@pytest.mark.long
def test_processes_of_a_killed_pytest_end_with_it(tmp_path: Path) -> None:
    path = tmp_path / "test_hangs.py"
    path.write_text(HANGS)
    options = ["-s", "-p", "tests.conftest", "-c", ROOT / "pyproject.toml", "--basetemp", tmp_path / "base"]
    command = [sys.executable, "-m", "pytest", *map(str, [*options, path])]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as pytest:
        try:
            assert any(line.endswith("started\n") for line in pytest.stdout)  # type: ignore[union-attr]
            started = psutil.Process(pytest.pid).children(recursive=True)
            names = {each.name() for each in started}
        finally:
            pytest.kill()
    assert names >= {"tritonserver", "triton_python_backend_stub"}
    deadline = time.monotonic() + 120
    while (left := [each for each in started if lives(each)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for each in left:
        each.kill()
    assert left == []
