"""Where a running server is found, and its key."""

import json
import os
import subprocess
import sys
from io import BufferedReader
from pathlib import Path

import msgspec
import pytest

from serving.errors import ConfigurationError
from serving.files import open_file
from serving.server import run_file as run_file_module
from serving.server.run_file import RunFile, RunFileWriter, find_run_file
from tests.support.servers import apart

KEY = "0123456789abcdef"


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return RunFile(
        grpc="127.0.0.1:8001", control="unix:/c", metrics="unix:/m", key=KEY, repository="/r", private=None, process=1
    )


def test_the_key_is_private_to_its_user_while_the_server_runs(tmp_path: Path, run_file: RunFile) -> None:
    with RunFileWriter(run_file).published():
        (folder,) = tmp_path.iterdir()
        (file,) = folder.iterdir()
        assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
        assert find_run_file("127.0.0.1:8001") == find_run_file("localhost:8001") == run_file
        assert find_run_file("127.0.0.1:8002") is None
        assert KEY not in repr(run_file)
    assert find_run_file("127.0.0.1:8001") is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_key_is_not_sent_to_another_machine(run_file: RunFile) -> None:
    with RunFileWriter(run_file).published():
        assert find_run_file("10.0.0.1:8001") is None
        assert find_run_file("lookup.example:8001") is None


def test_a_folder_that_others_can_open_is_not_used(tmp_path: Path, run_file: RunFile) -> None:
    with RunFileWriter(run_file).published():
        (folder,) = tmp_path.iterdir()
        folder.chmod(0o755)
        assert find_run_file("127.0.0.1:8001") is None
    with (
        pytest.raises(ConfigurationError, match="expected a folder that only its user can open"),
        RunFileWriter(run_file).published(),
    ):
        pass
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(ConfigurationError, match="expected a folder that only its user can open"),
        RunFileWriter(run_file).published(),
    ):
        pass


def test_a_damaged_run_file_is_ignored(tmp_path: Path, run_file: RunFile) -> None:
    with RunFileWriter(run_file).published():
        (file,) = tmp_path.rglob("*.json")
        file.write_bytes(b"{")
        assert find_run_file("127.0.0.1:8001") is None


def test_two_servers_with_one_port_have_a_file_each(run_file: RunFile) -> None:
    """As those of two addresses of this machine do; and one that listens everywhere, or on a network."""
    other = msgspec.structs.replace(run_file, grpc="127.0.0.2:8001", key="another")
    with RunFileWriter(run_file).published():
        with RunFileWriter(other).published():
            assert find_run_file("127.0.0.1:8001") == find_run_file("localhost:8001") == run_file
            assert find_run_file("127.0.0.2:8001") == other
            assert find_run_file("127.0.0.3:8001") is None
        assert find_run_file("127.0.0.1:8001") == run_file
        assert find_run_file("127.0.0.2:8001") is None
    for host in ("0.0.0.0", "10.1.2.3"):
        anywhere = msgspec.structs.replace(run_file, grpc=f"{host}:8001")
        with RunFileWriter(anywhere).published():
            assert find_run_file("127.0.0.1:8001") == find_run_file("127.0.0.2:8001") == anywhere


OTHER_SERVER = """
import sys
from serving.server import run_file as run_file_module
from serving.server.run_file import RunFileWriter, RunFile, find_run_file
mine = RunFile(grpc="127.0.0.1:8001", control="unix:/o", metrics="unix:/m", key="other", repository="/o", private=None, process=2)
print(find_run_file("127.0.0.1:8001") is None)
with RunFileWriter(mine).published():
    print(find_run_file("127.0.0.1:8001").key, flush=True)
    if "killed" in sys.argv:
        os = __import__("os")
        os.kill(os.getpid(), 9)
    input()
"""


def other_server(*within: str, killed: bool = False) -> "subprocess.Popen[str]":
    arguments = [*within, sys.executable, "-c", OTHER_SERVER, *(["killed"] if killed else [])]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.promise(
    "`tbe-serve load` reaches a server although servers in other network namespaces share its port and temporary folder"
)
def test_a_server_in_another_network_namespace_has_its_own_file(tmp_path: Path, run_file: RunFile) -> None:
    with RunFileWriter(run_file).published():
        with other_server(*apart()) as other:
            assert other.stdout is not None
            assert [other.stdout.readline() for _ in range(2)] == ["True\n", "other\n"]
            assert len(list(tmp_path.rglob("*.json"))) == 2
            assert find_run_file("127.0.0.1:8001") == run_file
            other.communicate("\n")
        assert find_run_file("127.0.0.1:8001") == run_file


def test_the_file_of_a_killed_server_is_ignored_and_removed(tmp_path: Path, run_file: RunFile) -> None:
    with other_server(killed=True) as other:
        other.communicate()
    (leftover,) = tmp_path.rglob("*.json")
    assert json.loads(leftover.read_bytes())["key"] == "other"
    assert find_run_file("127.0.0.1:8001") is None
    with RunFileWriter(run_file).published():
        assert not leftover.exists()
        assert find_run_file("127.0.0.1:8001") == run_file


def test_a_removed_run_file_is_written_again(tmp_path: Path, run_file: RunFile) -> None:
    writer = RunFileWriter(run_file)
    with writer.published():
        (file,) = tmp_path.rglob("*.json")
        file.unlink()
        assert find_run_file("127.0.0.1:8001") is None
        writer.restore()
        assert find_run_file("127.0.0.1:8001") == run_file
        file.unlink()
        os.rmdir(file.parent)
        writer.update(recoveries=1)
        written = find_run_file("127.0.0.1:8001")
        assert written is not None
        assert written.recoveries == 1
        assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    writer.update(recoveries=2)
    writer.restore()
    assert not file.exists()


def test_a_run_file_replaced_during_a_read_is_found_and_kept(
    tmp_path: Path, run_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old file is unlocked by then, and is nobody's to remove."""
    writer = RunFileWriter(run_file)
    with writer.published():
        (file,) = tmp_path.rglob("*.json")

        def replaced_then(path: Path) -> BufferedReader:
            opened = open_file(path)
            writer.update(recoveries=writer.content.recoveries + 1)
            return opened

        monkeypatch.setattr(run_file_module, "open_file", replaced_then)
        assert find_run_file("127.0.0.1:8001") is not None
        other = msgspec.structs.replace(run_file, grpc="127.0.0.1:8002")
        with RunFileWriter(other).published():
            assert file.exists()
