"""Where a running server is found, and its key."""

from pathlib import Path

import pytest

from serving.errors import ConfigurationError
from serving.server.run_file import RunFile, find_run_file

KEY = "0123456789abcdef"


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return RunFile(grpc="127.0.0.1:8001", control="unix:/c", key=KEY, repository="/r", private=None, process=1)


def test_the_key_lies_where_its_user_alone_reads_it_while_the_server_runs(tmp_path: Path, run_file: RunFile) -> None:
    with run_file.written():
        (folder,) = tmp_path.iterdir()
        (file,) = folder.iterdir()
        assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
        assert find_run_file("127.0.0.1:8001") == find_run_file("localhost:8001") == run_file
        assert find_run_file("127.0.0.1:8002") is None
        assert KEY not in repr(run_file)
    assert find_run_file("127.0.0.1:8001") is None


def test_the_key_is_not_sent_to_another_machine(run_file: RunFile) -> None:
    with run_file.written():
        assert find_run_file("10.0.0.1:8001") is None
        assert find_run_file("lookup.example:8001") is None


def test_a_folder_that_others_can_open_is_not_used(tmp_path: Path, run_file: RunFile) -> None:
    with run_file.written():
        (folder,) = tmp_path.iterdir()
        folder.chmod(0o755)
        assert find_run_file("127.0.0.1:8001") is None
    with pytest.raises(ConfigurationError, match="expected a folder that nobody else can open"), run_file.written():
        pass
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="expected a folder that nobody else can open"), run_file.written():
        pass


def test_a_damaged_file_is_none(tmp_path: Path, run_file: RunFile) -> None:
    with run_file.written():
        (file,) = tmp_path.rglob("*.json")
        file.write_bytes(b"{")
        assert find_run_file("127.0.0.1:8001") is None
