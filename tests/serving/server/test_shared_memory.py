"""Shared memory of servers that are no more is removed, and no other."""

import fcntl
import os
from pathlib import Path

import pytest

from serving.errors import TritonserverFailed
from serving.server import shared_memory
from serving.server.shared_memory import is_open, region_prefix


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shared_memory, "_FOLDER", folder)
    return folder


def leave_regions(folder: Path, name: str) -> list[Path]:
    """What a server leaves that is killed."""
    paths = [folder / f"tbe-serving-{name}{end}" for end in (".lock", "-a", "-b")]
    for path in paths:
        path.write_bytes(b"x")
    return paths


def test_a_server_s_regions_are_removed_at_its_end(shm: Path) -> None:
    with region_prefix() as first, region_prefix() as second:
        assert first != second
        (shm / f"{first}-a").touch()
        (shm / f"{second}-a").touch()
        with region_prefix():
            assert len(list(shm.iterdir())) == 5  # who lives keeps what it has
    assert list(shm.iterdir()) == []


@pytest.mark.promise("The next server removes the shared memory that a killed server left")
def test_the_next_server_removes_shared_memory_of_a_killed_one(shm: Path) -> None:
    leave_regions(shm, "dead")
    living = leave_regions(shm, "living")
    (shm / "triton_python_backend_shm_region_of_somebody").touch()
    with living[0].open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with region_prefix() as mine:
            names = {path.name for path in shm.iterdir()} - {f"{mine}.lock"}
    assert names == {path.name for path in living} | {"triton_python_backend_shm_region_of_somebody"}


def test_shared_memory_of_a_server_that_just_starts_is_kept(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, other_servers = fcntl.flock, ["another"]

    def another_starts_first(file: int, operation: int) -> None:
        if other_servers:
            other_servers.clear()
            with region_prefix():
                pass
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", another_starts_first)
    with region_prefix() as prefix:
        assert [path.name for path in shm.iterdir()] == [f"{prefix}.lock"]


def test_lock_files_of_other_users_remove_nothing(shm: Path, tmp_path: Path) -> None:
    """Everybody may write to /dev/shm."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (shm / "tbe-serving-link.lock").symlink_to(precious)
    (shm / "tbe-serving-*.lock").touch()
    living = leave_regions(shm, "living")
    with living[0].open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with region_prefix():
            assert all(path.exists() for path in living)
    assert precious.read_text() == "precious"


def test_shared_memory_of_another_user_is_kept(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = leave_regions(shm, "theirs")
    monkeypatch.setattr(os, "getuid", lambda: paths[0].stat().st_uid + 1)
    with region_prefix():
        pass
    assert all(path.exists() for path in paths)


def test_a_region_that_others_can_open_is_noticed(shm: Path) -> None:
    with region_prefix() as prefix:
        (shm / f"{prefix}-a").touch()
        (shm / f"{prefix}-a").chmod(0o600)
        (shm / "another").touch()
        assert not is_open(prefix)
        (shm / f"{prefix}-a").chmod(0o644)
        assert is_open(prefix)


def test_a_missing_shared_memory_folder_is_reported(shm: Path) -> None:
    shm.rmdir()
    with pytest.raises(
        TritonserverFailed, match=r"shm/tbe-serving-.*\.lock: cannot be made: No such file or directory"
    ):
        region_prefix().__enter__()
