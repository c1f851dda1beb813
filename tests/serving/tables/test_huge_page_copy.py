"""One copy of the weights for all processes, on a real tmpfs of huge pages that programs mount for themselves."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from export import ExportConfig, export_model
from serving.bundle import open_bundle
from serving.engine import Engine
from serving.errors import ServingError
from serving.model.settings import ServingSettings
from serving.server import run_server
from serving.tables.huge_page_copy import huge_page_folders
from tests.support.huge_pages import run_beside_huge_pages
from tests.support.models import Spec, collection
from tests.support.servers import FREE

ROWS = 80_000

# What every program below begins with.
BEGIN = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from serving.bundle import open_bundle
from serving.bundle.load import FileDigest
from serving.errors import ServingError
from serving.tables import huge_page_copy
from serving.tables.huge_page_copy import SharedCopies
folder, bundle = Path(sys.argv[1]), open_bundle(Path(sys.argv[2]))
file, digest = bundle.path / "weights.0.bin", bundle.manifest.files["weights.0.bin"]
def copies():
    return sorted(each.name for each in folder.iterdir())
def other():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", OTHER, *sys.argv[1:]], **pipes)
    process.stdout.readline()
    return process
OTHER = '''
import sys
from pathlib import Path
from serving.bundle import open_bundle
from serving.tables.huge_page_copy import SharedCopies
bundle = open_bundle(Path(sys.argv[2]))
held = SharedCopies()
held.take(bundle.path / "weights.0.bin", bundle.manifest.files["weights.0.bin"])
print("taken", flush=True)
sys.stdin.read()
'''
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copied")
    return export_model(collection((Spec("t", ROWS, 64, "SUM", ("x",)),)), folder / "r", "m")


def run(tmp_path: Path, bundle: Path, program: str, size: str = "64m") -> str:
    folder = tmp_path / "huge"
    return run_beside_huge_pages(folder, size, BEGIN + program, folder, bundle).strip()


def test_processes_share_a_copy_and_the_last_one_removes_it(tmp_path: Path, bundle: Path) -> None:
    program = """
mine = SharedCopies()
path = mine.take(file, digest)
assert path.read_bytes()[:digest.size_bytes] == file.read_bytes()
second, inode = other(), path.stat().st_ino
print(len(copies()), path.stat().st_ino == inode)
mine.close()
print(len(copies()))
second.communicate()
print(len(copies()))
"""
    assert run(tmp_path, bundle, program).split("\n") == ["1 True", "1", "0"]


def test_the_copy_of_killed_processes_is_replaced(tmp_path: Path, bundle: Path) -> None:
    program = """
first = other(); first.kill(); first.wait()
with (folder / copies()[0]).open("rb+") as left:
    left.write(b"another")
mine = SharedCopies()
print(mine.take(file, digest).read_bytes()[:digest.size_bytes] == file.read_bytes(), len(copies()))
mine.close()
print(len(copies()))
"""
    assert run(tmp_path, bundle, program).split("\n") == ["True 1", "0"]


def test_an_unused_copy_is_removed_when_another_is_made(tmp_path: Path, bundle: Path) -> None:
    program = """
import hashlib
first = other(); first.kill(); first.wait()
(folder / (copies()[0] + "0.partial")).write_bytes(b"half")
another = folder.parent / "another"
another.write_bytes(b"x" * 100)
sha256 = hashlib.sha256(b"x" * 100).hexdigest()
mine = SharedCopies()
mine.take(another, FileDigest(size_bytes=100, sha256=sha256))
print([each.endswith(sha256) for each in copies()])
"""
    assert run(tmp_path, bundle, program) == "[True]"


def test_a_copy_may_be_larger_than_the_shared_memory_of_a_model(tmp_path: Path, bundle: Path) -> None:
    """Whose limit the kernel enforces for all files of the process (`tbe-serve run --shm-mib`)."""
    program = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
mine = SharedCopies()
print(mine.take(file, digest).read_bytes()[:digest.size_bytes] == file.read_bytes(), digest.size_bytes > 1 << 20)
print(resource.getrlimit(resource.RLIMIT_FSIZE)[0] == 1 << 20)
"""
    assert run(tmp_path, bundle, program) == "True True\nTrue"


def test_an_unfinished_copy_is_replaced(tmp_path: Path, bundle: Path) -> None:
    program = """
partial = folder / f"tbe-weights-{digest.sha256}.partial"
partial.write_bytes(b"half")
mine = SharedCopies()
print(mine.take(file, digest).read_bytes()[:digest.size_bytes] == file.read_bytes(), len(copies()))
"""
    assert run(tmp_path, bundle, program) == "True 1"


@pytest.mark.parametrize("how", ["copy.write_bytes(b'hi')", "copy.mkdir()", "os.mkfifo(copy)"])
def test_invalid_copies_are_not_used(how: str, tmp_path: Path, bundle: Path) -> None:
    program = f"""
copy = folder / f"tbe-weights-{{digest.sha256}}"
{how}
import fcntl
held = os.open(copy, os.O_RDONLY | os.O_NONBLOCK)
fcntl.flock(held, fcntl.LOCK_SH)  # else it is removed
try:
    SharedCopies().take(file, digest)
except ServingError as error:
    print(str(copy) + ": is no copy of it: remove it" in str(error))
"""
    assert run(tmp_path, bundle, program) == "True"


def test_weights_without_room_in_memory_are_not_copied(tmp_path: Path, bundle: Path) -> None:
    program = """
try:
    SharedCopies(lacks="there is no room").take(file, digest)
except ServingError as error:
    print("there is no room" in str(error), "unload what else is served" in str(error), copies())
held = other()
mine = SharedCopies(lacks="there is no room")  # it takes no more memory
print(len(copies()), mine.take(file, digest).exists())
held.communicate()
"""
    assert run(tmp_path, bundle, program).split("\n") == ["True True []", "1 True"]


def test_a_copy_of_another_user_is_not_taken(tmp_path: Path, bundle: Path) -> None:
    program = """
copy = folder / f"tbe-weights-{digest.sha256}"
copy.write_bytes(file.read_bytes())
os.geteuid = lambda: 12345
try:
    SharedCopies().take(file, digest)
except ServingError as error:
    print(error)
print(len(copies()))
"""
    said, remaining = run(tmp_path, bundle, program).split("\n")
    assert "is another user's" in said
    assert remaining == "1"


def test_many_processes_at_once_make_one_copy(tmp_path: Path, bundle: Path) -> None:
    program = """
many = [subprocess.Popen([sys.executable, "-c", OTHER, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(4)]
for each in many:
    assert each.stdout.readline() == b"taken\\n"
print(len(copies()))
for each in many:
    each.stdin.close()
for each in many:
    each.wait()
print(len(copies()))
"""
    assert run(tmp_path, bundle, program).split("\n") == ["1", "0"]


@pytest.mark.parametrize(
    ("size", "change", "expected"),
    [
        pytest.param("64m", "sha256='0' * 64", "expected SHA-256 000000000000…", id="another digest"),
        pytest.param("4m", "sha256=digest.sha256", "takes 3 pages of 2 MiB: ", id="no room"),
    ],
)
def test_a_failed_copy_is_reported_and_leaves_nothing(
    size: str, change: str, expected: str, tmp_path: Path, bundle: Path
) -> None:
    program = f"""
try:
    SharedCopies().take(file, FileDigest(size_bytes=digest.size_bytes, {change}))
except ServingError as error:
    print(error)
print(copies())
"""
    said, remaining = run(tmp_path, bundle, program, size).split("\n")
    assert expected in said
    assert remaining == "[]"


SERVED = """
import json, sys
from pathlib import Path
from serving.client import LookupClient
from serving.server import Ports, run_server
from serving.server.status import process_memory
from serving.triton.stubs import living_stubs
folder, repository, log = map(Path, sys.argv[1:4])
with run_server(repository, Ports(grpc=0, http=0, operations=0), log=log) as server:
    with LookupClient(server.grpc, "m", 60) as client:
        answer = client.lookup({"x": [[0, 5], [79999]]})["x"].tolist()
    memory = [process_memory(each.process.pid) for each in living_stubs(server.process.pid)]
    while_serving = len(list(folder.iterdir()))
    if sys.argv[4] == "killed":
        server.process.kill()
left = len(list(folder.iterdir()))
print(json.dumps([answer, [each.mapped for each in memory], [each.huge for each in memory], while_serving, left]))
"""


@pytest.mark.long
@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_instances_of_a_server_share_a_copy_until_it_ends(tmp_path: Path, end: str) -> None:
    config = ExportConfig(serving=ServingSettings(instances=2, weights_memory="huge"))
    bundle = export_model(collection((Spec("t", ROWS, 64, "SUM", ("x",)),)), tmp_path / "r", "m", config)
    folder = tmp_path / "huge"
    said = run_beside_huge_pages(folder, "64m", SERVED, folder, tmp_path / "r", tmp_path / "log", end, timeout_s=300)
    answer, mapped, huge, while_serving, remaining = json.loads(said.splitlines()[-1])
    with Engine.open(bundle) as engine:
        np.testing.assert_array_equal(engine.lookup({"x": [[0, 5], [ROWS - 1]]})["x"], np.array(answer, np.float32))
    size = open_bundle(bundle).manifest.files["weights.0.bin"].size_bytes
    assert len(mapped) == 2
    assert all(size <= mapped_bytes < size + (2 << 20) for mapped_bytes in mapped)
    assert all(0 <= huge_bytes <= size for huge_bytes in huge)  # as many as the kernel has
    assert (while_serving, remaining) == (1, 0)


def test_a_server_without_huge_pages_says_what_to_do(tmp_path: Path) -> None:
    config = ExportConfig(serving=ServingSettings(weights_memory="huge"))
    export_model(collection((Spec("t", 10, 64, "SUM", ("x",)),)), tmp_path / "r", "m", config)
    refused = pytest.raises(ServingError, match="no hugetlbfs, and no tmpfs with huge=")
    with refused, run_server(tmp_path / "r", FREE, log=tmp_path / "log"):
        pass


def test_file_systems_of_huge_pages_are_found(tmp_path: Path) -> None:
    lines = []
    device = os.stat(tmp_path).st_dev
    device_id = f"{os.major(device)}:{os.minor(device)}"
    for number, (name, kind, options) in enumerate(
        [
            ("plain", "tmpfs", "rw,size=4k"),
            ("always", "tmpfs", "rw,huge=always"),
            ("never", "tmpfs", "rw,huge=never"),
            ("with space and é", "hugetlbfs", "rw,pagesize=2M"),
            ("giant", "hugetlbfs", "rw,pagesize=1024M"),
            ("disk", "ext4", "rw"),
        ]
    ):
        (tmp_path / name).mkdir()
        where = str(tmp_path / name).replace(" ", "\\040")
        lines.append(f"{number} 1 {device_id} / {where} rw,relatime shared:1 - {kind} none {options}\n")
    lines.append(f"9 1 {device_id} / {tmp_path}/gone rw - tmpfs none rw,huge=always\n")
    (tmp_path / "covered").mkdir()
    lines.append(f"10 1 0:9999 / {tmp_path}/covered rw - tmpfs none rw,huge=always\n")
    (tmp_path / "mountinfo").write_text("".join(lines))
    folders = [(folder.path.name, folder.is_hugetlbfs) for folder in huge_page_folders(tmp_path / "mountinfo")]
    assert folders == [("with space and é", True), ("always", False)]
