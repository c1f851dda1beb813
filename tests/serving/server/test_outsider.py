"""Another user of the machine gets nothing of what a server makes while it serves and captures."""

import os
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from export import ExportConfig, export_model
from serving.client import LookupClient
from serving.errors import InvalidRequest
from serving.model.settings import ServingSettings
from serving.server import run_server
from tests.support.models import SUM, collection
from tests.support.other_user import try_all
from tests.support.servers import FREE, running

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

SHARED = Path("/dev/shm")


@pytest.fixture
def open_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that everybody reaches, with `tmp` in place of /tmp, and `captured`, into which anybody may write."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    for name in ("tmp", "captured", "huge"):
        (folder / name).mkdir()
        (folder / name).chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    # As many a shell has it: whoever is careless about a file makes it readable.
    before = os.umask(0o022)
    yield folder
    os.umask(before)
    shutil.rmtree(folder)


def signed(open_folder: Path, memory: str = "mapped") -> Path:
    """A signed model that captures what it refuses; the file of trusted keys."""
    for command in ("genpkey -algorithm ed25519 -out key.pem", "pkey -in key.pem -pubout -out trusted.pem"):
        subprocess.run(["openssl", *command.split()], cwd=open_folder, check=True)
    serving = ServingSettings(capture=str(open_folder / "captured"), capture_slow_ms=1e-6, weights_memory=memory)
    export_model(
        collection(SUM), open_folder / "r", "m", ExportConfig(serving=serving), signing_key=open_folder / "key.pem"
    )
    return open_folder / "trusted.pem"


def below(*folders: Path) -> set[Path]:
    """All that lies in folders, but not what others remove meanwhile."""
    paths = set()
    for folder in folders:
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):
                path.lstat()
                paths.add(path)
    return paths


def wait_for_capture(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.promise(
    "Another user of the machine can neither read, change, remove nor reach what a running server creates"
)
def test_another_user_can_access_nothing_that_a_server_creates(open_folder: Path) -> None:
    trusted = signed(open_folder, "live")
    shared = {*SHARED.iterdir()}
    with (
        running(open_folder / "r", "--trusted-keys", str(trusted)) as server,
        LookupClient(server.grpc, "m", 30) as client,
    ):
        client.lookup({"x": [[1]]})
        with pytest.raises(InvalidRequest):
            client.lookup({"x": [[-1]]})
        wait_for_capture(open_folder / "captured" / "m.jsonl")
        children = psutil.Process(server.process.pid).children(recursive=True)
        processes = [server.process.pid, *(child.pid for child in children)]
        mine = {path for path in {*SHARED.iterdir()} - shared if is_of(path, processes, server.process.pid)}
        created = below(open_folder / "tmp", open_folder / "captured") | mine
        # Nothing was overlooked: a socket, regions, keys, a live copy of the weights, what was captured.
        assert any(stat.S_ISSOCK(path.lstat().st_mode) for path in created)
        assert {path.name for path in created} >= {"weights.0.bin", "m.jsonl", "manifest.json", "config.pbtxt"}
        assert len(mine) >= 3
        assert any(path.name.startswith("tbe-live-") for path in mine)
        assert any(path.suffix == ".json" and path.parent.name == "tbe-serve-0" for path in created)
        assert try_all(sorted(created), processes) == set()
        assert client.lookup({"x": [[1]]}).version == 1


def is_of(path: Path, processes: list[int], server: int) -> bool:
    """Whether a file in /dev/shm is of these processes: others serve at the same time."""
    try:
        maps = "".join((Path("/proc") / str(process) / "maps").read_text() for process in processes)
        opened = {file.path for file in psutil.Process(server).open_files()}
    except (OSError, psutil.Error):
        return False
    return str(path) in maps or str(path) in opened


@pytest.mark.promise("The shared copy of weights is readable by the server's user alone")
def test_shared_copies_of_weights_are_private_to_their_user(open_folder: Path) -> None:
    """The file system of huge pages is mounted for the server alone; the other user comes in there."""
    signed(open_folder, "huge")
    mount = f'mount -t tmpfs -o huge=always,mode=1777 tmpfs {open_folder}/huge && exec "$0" "$@"'
    with running(open_folder / "r", within=("unshare", "--mount", "sh", "-ec", mount)) as server:
        root = Path(f"/proc/{server.process.pid}/root{open_folder}/huge")
        (copy,) = root.iterdir()
        assert copy.lstat().st_mode & 0o777 == 0o600


@pytest.mark.promise("The log of `run_server(log=…)` is readable by the server's user alone")
def test_the_log_of_a_server_is_its_user_s_alone(open_folder: Path) -> None:
    export_model(collection(SUM), open_folder / "r", "m")
    with run_server(open_folder / "r", FREE, log=open_folder / "log"):
        assert try_all([open_folder / "log"], []) == set()


@pytest.mark.promise("A published bundle is readable by the user that serves it, and writable by its publisher alone")
def test_a_published_bundle_is_read_only_for_other_users(open_folder: Path) -> None:
    """The user that exports and the one that serves differ."""
    signed(open_folder)
    created = below(open_folder / "r")
    assert len(created) > 6
    expected = {("list" if path.is_dir() else "read", str(path)) for path in created}
    assert try_all(sorted(created), []) == expected


def test_the_check_finds_files_open_to_another_user(open_folder: Path) -> None:
    """Of what lies open, all attempts succeed."""
    folder = open_folder / "tmp" / "open"
    folder.mkdir()
    folder.chmod(0o777)
    for name in ("read", "changed"):
        (folder / name).write_text("x")
    (folder / "read").chmod(0o644)
    (folder / "changed").chmod(0o666)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        (folder / "socket").chmod(0o777)
        possible = try_all([folder / "read", folder / "changed", folder / "socket", folder], [])
    assert possible >= {("read", f"{folder}/read"), ("rename", f"{folder}/read"), ("list", str(folder))}
    assert possible >= {(name, f"{folder}/changed") for name in ("read", "write", "truncate")}
    assert possible >= {("connect", f"{folder}/socket"), ("create", str(folder))}
