"""A draft becomes a version whole and once, whatever happens on the way; an earlier version never changes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from export import export_model
from export.config import Progress
from export.errors import PublishError
from serving.errors import ConfigurationError
from tests.support.folder_contents import files
from tests.support.models import collection


@pytest.mark.usefixtures("fresh_process")
def test_export_publishes_a_whole_version_and_nothing_else(tmp_path: Path) -> None:
    bundle = export_model(collection(), tmp_path / "r", "m")
    assert bundle == tmp_path / "r" / "m" / "1"
    assert sorted(path.name for path in bundle.iterdir()) == [
        "manifest.json",
        "model.py",
        "program.pt",
        "weights.0.bin",
    ]
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["1", "config.pbtxt"]
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    assert (bundle / "program.pt").stat().st_size < 100_000


def test_versions_count_up_and_earlier_ones_do_not_change(tmp_path: Path) -> None:
    first = export_model(collection(seed=1), tmp_path / "r", "m")
    before = files(tmp_path)
    second = export_model(collection(seed=2), tmp_path / "r", "m")
    ninth = export_model(collection(seed=3), tmp_path / "r", "m", version=9)
    assert export_model(collection(seed=4), tmp_path / "r", "m").name == "10"
    assert (first.name, second.name, ninth.name) == ("1", "2", "9")
    assert before.items() <= files(tmp_path).items()


def test_a_version_that_exists_is_never_replaced(tmp_path: Path) -> None:
    export_model(collection(seed=1), tmp_path / "r", "m")
    before = files(tmp_path)
    with pytest.raises(PublishError, match="m/1: exists; published versions are never changed"):
        export_model(collection(seed=2), tmp_path / "r", "m", version=1)
    assert files(tmp_path) == before


def test_a_version_published_during_the_export_is_not_replaced(tmp_path: Path) -> None:
    export_model(collection(seed=1), tmp_path / "r", "m")

    def publish_the_same(progress: Progress) -> None:
        if progress.step == "parity":
            export_model(collection(seed=2), tmp_path / "r", "m", version=2)

    with pytest.raises(PublishError, match="m/2: exists"):
        export_model(collection(seed=3), tmp_path / "r", "m", version=2, progress=publish_the_same)
    assert export_model(collection(seed=4), tmp_path / "r", "m", progress=lambda _: None).name == "3"


@pytest.mark.usefixtures("fresh_process")
def test_two_first_versions_at_once_both_get_published(tmp_path: Path) -> None:
    published = []

    def publish_another(progress: Progress) -> None:
        if progress.step == "parity":
            published.append(export_model(collection(seed=2), tmp_path / "r", "m").name)

    assert export_model(collection(seed=1), tmp_path / "r", "m", progress=publish_another).name == "2"
    assert published == ["1"]


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        pytest.param("../m", None, "name: expected at most 128 letters", id="path"),
        pytest.param(".m", None, "name: expected at most 128 letters", id="hidden"),
        pytest.param("", None, "name: expected at most 128 letters", id="empty"),
        pytest.param("m", 0, "version: expected 1 to 9223372036854775807, got 0", id="version 0"),
    ],
)
def test_names_and_versions_that_triton_would_not_take(
    tmp_path: Path, name: str, version: int | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        export_model(collection(), tmp_path / "r", name, version=version)
    assert files(tmp_path) == {}


def test_a_repository_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PublishError, match="cannot write in it and beside it: Not a directory"):
        export_model(collection(), tmp_path / "file" / "r", "m")


def test_the_root_of_a_file_system_is_no_repository() -> None:
    """Nothing can be renamed into it from beside it."""
    assert os.path.ismount("/dev/shm")

    def folders() -> list[str]:
        return [entry.name for entry in os.scandir("/dev/shm") if entry.is_dir()]  # servers have files there

    before = folders()
    with pytest.raises(
        PublishError, match=r"/dev/shm: (is the root of a file system|cannot write in it and beside it)"
    ):
        export_model(collection(), "/dev/shm", "m")
    assert folders() == before


EXPORT_SLOWLY = """
import signal, sys, time
from export import export_model
from tests.support.models import collection
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background
def wait(progress):
    print(progress.step, flush=True)
    time.sleep(60 if progress.step == sys.argv[2] else 0)
export_model(collection(), sys.argv[1], "m", progress=wait)
"""


@pytest.mark.parametrize(
    ("number", "step"),
    [
        pytest.param(signal.SIGKILL, "parity"),
        pytest.param(signal.SIGINT, "user", marks=pytest.mark.long),
    ],
)
def test_an_interrupted_export_publishes_nothing_and_is_cleaned_up_later(
    tmp_path: Path, number: signal.Signals, step: str
) -> None:
    export_model(collection(seed=1), tmp_path / "r", "m")
    before = files(tmp_path / "r")
    command = [sys.executable, "-c", EXPORT_SLOWLY, str(tmp_path / "r"), step]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as export:
        assert export.stdout is not None
        assert any(line.strip() == step for line in export.stdout)
        export.send_signal(number)
        export.wait()
    assert files(tmp_path / "r") == before
    assert export_model(collection(seed=2), tmp_path / "r", "m").name == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


@pytest.mark.promise("A killed export, or one with a full disk, leaves whole versions or nothing")
@pytest.mark.parametrize("times", [5, pytest.param(25, marks=pytest.mark.long)])
def test_killed_exports_leave_whole_versions_or_nothing(tmp_path: Path, times: int) -> None:
    command = [sys.executable, "-m", "tests.support.killed_exports", str(tmp_path), str(times)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["drafts"] >= times // 5
    assert report["left"] == []


@pytest.mark.long
def test_the_draft_of_a_running_export_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXPORT_SLOWLY, str(tmp_path / "r"), "parity"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as export:
        assert export.stdout is not None
        assert any(line.strip() == "parity" for line in export.stdout)
        export_model(collection(), tmp_path / "r", "m")
        drafts = [path for path in tmp_path.iterdir() if path.name != "r"]
        export.kill()
    assert len(drafts) == 1
    assert (drafts[0] / "version" / "weights.0.bin").exists()
