"""Programs that make files for their user alone, whatever they ask for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from serving.server.child_process import SETUP_COMMAND

MADE = """
import os, sys
file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o666)
modes = [os.fstat(file).st_mode & 0o777]
for mode in (0o644, 0o640, 0o644):
    os.fchmod(file, mode)
    modes.append(os.fstat(file).st_mode & 0o777)
os.chmod(sys.argv[1], 0o604)
print(*modes, os.fstat(file).st_mode & 0o777)
"""


EXECUTABLE = """
import os, sys
os.umask(0o022)
path = sys.argv[1]
os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o640))
modes = []
for mode in (0o100, 0o700, 0o100, 0o200):
    os.chmod(path, mode)
    modes.append(os.stat(path).st_mode & 0o777)
print(*modes)
"""


def test_a_chmod_of_tritons_python_backend_to_its_program_is_ignored(tmp_path: Path) -> None:
    """By chmod(2) or fchmodat(2), as the C library has it."""
    set_up = [*SETUP_COMMAND, str(os.getpid()), str(1 << 20)]
    command = [*set_up, sys.executable, "-c", EXECUTABLE, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(mode) for mode in (0o640, 0o700, 0o700, 0o200)]


def test_files_opened_for_all_users_as_boost_does_are_private(tmp_path: Path) -> None:
    """In its children, too."""
    command = [sys.executable, "-c", MADE, str(tmp_path / "file")]
    shell = str(shutil.which("sh"))
    for within in ([], [shell, "-c", '"$0" "$@"; exit $?']):
        set_up = [*SETUP_COMMAND, str(os.getpid()), str(1 << 20)]
        done = subprocess.run([*set_up, *within, *command], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(mode) for mode in (0o600, 0o600, 0o640, 0o640, 0o604)]
        (tmp_path / "file").unlink()
