"""The files of weights: compared with their digests, brought into memory, locked, or read one by one."""

import gc
import mmap
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from export import export_model
from serving.bundle import Bundle, open_bundle
from serving.engine import Engine
from serving.errors import BundleError, ConfigurationError
from serving.model.settings import ServingSettings, WeightsMemory
from serving.tables import memory_budget, pages, table_files
from serving.tables.pages import HUGE_PAGE, cached
from serving.tables.table_files import PagesUsed, TableFiles
from tests.support.huge_pages import expect_huge, write_in_small_pieces
from tests.support.models import Spec, collection

ROWS = 80_000  # 68 bytes each: two huge pages and a half


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = collection((Spec("t", ROWS, 64, "SUM", ("x",)),))
    return export_model(module, tmp_path_factory.mktemp("table_files") / "r", "m")


@pytest.fixture
def bundle(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A copy that a test may damage."""
    monkeypatch.setattr(pages, "_CHUNK_BYTES", HUGE_PAGE)
    return open_bundle(shutil.copytree(published, tmp_path / "r" / "m" / "1"))


def of(bundle: Bundle, memory: WeightsMemory = WeightsMemory.MAPPED) -> TableFiles:
    return TableFiles(bundle.path, bundle.manifest, memory)


@pytest.mark.parametrize("position", [0, HUGE_PAGE - 1, HUGE_PAGE, 2 * HUGE_PAGE + 5, ROWS * 68 - 1])
@pytest.mark.parametrize("fits", [True, False])
def test_a_byte_that_changed_anywhere_is_found(
    position: int, fits: bool, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fits:
        monkeypatch.setattr(memory_budget, "memory_limit", lambda: 1 << 20)
    of(bundle).verify()
    with (bundle.path / "weights.0.bin").open("rb+") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(BundleError, match=r"weights\.0\.bin: expected SHA-256"):
        of(bundle).verify()


def test_a_file_that_cannot_be_read_is_named(bundle: Bundle) -> None:
    opened = of(bundle)
    with (bundle.path / "weights.0.bin").open("rb+") as file:
        file.truncate(100)
    with pytest.raises(BundleError, match=r"weights\.0\.bin: cannot be read: .*: publish the bundle again"):
        opened.verify()


def test_weights_are_loaded_in_the_background(bundle: Bundle, tmp_path: Path) -> None:
    done, reported = threading.Event(), []

    def populated(used: PagesUsed) -> None:
        reported.append(used)
        done.set()

    opened = of(bundle)
    opened.populate(populated)
    opened.populate(populated)  # it is at it
    assert done.wait(60)
    opened.close()
    (used,) = reported
    assert used.mapped == ROWS * 68
    assert used.most_huge == 2 * HUGE_PAGE
    expect_huge(used.huge, used.most_huge, tmp_path)


def own_threads(before: list[threading.Thread]) -> list[threading.Thread]:
    """Those of weights that were not there before: engines of other tests may be left."""
    return [thread for thread in threading.enumerate() if thread.name == "weights" and thread not in before]


def test_an_engine_that_is_closed_has_no_thread_left(bundle: Bundle) -> None:
    before = threading.enumerate()
    with Engine.open(bundle.path) as engine:
        assert engine.lookup({"x": [[1]]})["x"].shape == (1, 64)
        assert own_threads(before)
    assert not own_threads(before)


def test_weights_larger_than_memory_are_read_row_by_row(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.open(bundle.path) as engine:
        expected = engine.lookup({"x": [[0, 5], [ROWS - 1]]})["x"]
    monkeypatch.setattr(memory_budget, "memory_limit", lambda: ROWS * 68)  # beside them nothing would have room
    with Engine.open(bundle.path) as engine:
        assert not engine.table_files.fits
        assert "rr" in flags_of(engine.table_files)
        np.testing.assert_array_equal(engine.lookup({"x": [[0, 5], [ROWS - 1]]})["x"], expected)
    with pytest.raises(ConfigurationError, match=rf"'locked': .* has {ROWS * 68} bytes of weights.* has room for 0 "):
        of(bundle, WeightsMemory.LOCKED)


def test_a_limit_that_changes_is_noticed(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table_files, "_CHECK_PERIOD_S", 0.01)
    memory = [ROWS * 68]
    monkeypatch.setattr(memory_budget, "memory_limit", lambda: memory[0])
    done = threading.Event()
    opened = of(bundle)
    opened.populate(lambda _: done.set())
    assert not done.wait(0.2)
    assert not opened.fits
    assert "has room for 0 beside" in opened.why_small()
    memory[0] = 1 << 30
    assert done.wait(60)
    assert opened.fits
    expect_huge(opened.used().huge, 2 * HUGE_PAGE, tmp_path)

    done.clear()
    memory[0] = ROWS * 68  # and is lowered again
    wait_until(lambda: not opened.fits)
    assert {"rr", "nh"} <= flags_of(opened)
    assert "hg" not in flags_of(opened)
    memory[0] = 1 << 30
    assert done.wait(60)
    assert opened.fits
    assert "hg" in flags_of(opened)
    assert "rr" not in flags_of(opened)
    opened.close()


def test_a_thread_keeps_no_weights_that_are_otherwise_unused(bundle: Bundle) -> None:
    before = threading.enumerate()
    done = threading.Event()
    opened = of(bundle)
    opened.populate(lambda _: done.set())
    assert done.wait(60)
    (thread,) = own_threads(before)
    reference = weakref.ref(opened)
    del opened
    wait_until(lambda: reference() is None)
    thread.join(60)
    assert not thread.is_alive()


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def flags_of(opened: TableFiles) -> set[str]:
    """What Linux says of the mapping: VmFlags of proc_pid_smaps(5)."""
    (file,) = opened._files.values()
    of_file = Path("/proc/self/smaps").read_text().partition(str(file.path))[2]
    return {*of_file.partition("VmFlags: ")[2].partition("\n")[0].split()}


def test_weights_fit_only_beside_the_memory_of_all_processes(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "memory_limit", lambda: 1 << 30)
    with Engine(bundle, processes=3) as three, Engine(bundle, processes=4) as four:
        assert three.table_files.fits
        assert not four.table_files.fits
        np.testing.assert_array_equal(four.rows("t", [0, ROWS - 1]), three.rows("t", [0, ROWS - 1]))


def test_weights_without_room_are_loaded_when_another_version_is_freed(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_budget, "memory_limit", lambda: memory_budget.PROCESS_BYTES + ROWS * 68 * 3 // 2)
    monkeypatch.setattr(table_files, "_CHECK_PERIOD_S", 0.01)
    second = bundle.path.parent / "2"
    shutil.copytree(bundle.path, second)
    request = {"x": [[0, 5], [ROWS - 1]]}

    before = Engine.open(bundle.path)
    expected = before.lookup(request)["x"]
    with Engine.open(second) as engine:
        assert before.table_files.fits
        assert not engine.table_files.fits
        engine.table_files.verify()
        np.testing.assert_array_equal(engine.lookup(request)["x"], expected)
        with pytest.raises(ConfigurationError, match=r"'locked': .* beside other bundles"):
            TableFiles(second, engine.bundle.manifest, WeightsMemory.LOCKED)
        before.close()
        del before
        gc.collect()
        end = time.monotonic() + 60
        while engine.table_files.ahead is not None and time.monotonic() < end:
            time.sleep(0.005)
            np.testing.assert_array_equal(engine.lookup(request)["x"], expected)
        assert engine.table_files.fits
        assert engine.table_files.ahead is None
        resident = cached(bundle.path / "weights.0.bin")
        assert resident is not None
        assert resident.size == 0  # what gave its room takes none
        np.testing.assert_array_equal(engine.lookup(request)["x"], expected)
        expect_huge(engine.table_files.used().huge, 2 * HUGE_PAGE, tmp_path)


LOCKED = """
import resource, sys
from pathlib import Path
from serving.bundle import open_bundle
from serving.errors import ConfigurationError
from serving.model.settings import WeightsMemory
from serving.tables.table_files import TableFiles
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[2]),) * 2)
bundle = open_bundle(Path(sys.argv[1]))
try:
    weights = TableFiles(bundle.path, bundle.manifest, WeightsMemory.LOCKED)
    print(Path("/proc/self/status").read_text().partition("VmLck:")[2].split()[0])
except ConfigurationError as error:
    print(error)
"""


def test_locked_weights_are_locked_or_refused_with_advice(bundle: Bundle) -> None:
    for limit, expected in ((7 << 20, ""), (1 << 20, "cannot be locked: ")):
        # In a user namespace, so that nobody has root's right to lock as much as there is.
        command = ["unshare", "--user", sys.executable, "-c", LOCKED, str(bundle.path), str(limit)]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.strip()
        if expected:
            assert expected in said
            assert "ulimit -l" in said
        else:
            assert ROWS * 68 <= int(said) << 10 <= ROWS * 68 + 4096


def test_locked_weights_in_small_pages_are_verified(bundle: Bundle) -> None:
    path = bundle.path / "weights.0.bin"
    content = path.read_bytes()
    path.unlink()
    write_in_small_pieces(path, content)
    # Who uses small pages keeps them.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as used:
        assert bytes(used) == content
        locked = of(bundle, WeightsMemory.LOCKED)
        locked.verify()
        assert locked.tensors[0].numpy().tobytes() == content
        done = threading.Event()
        locked.populate(lambda _: done.set())
        assert done.wait(60)
        locked.close()


def test_the_weights_memory_setting_accepts_each_name() -> None:
    for way in WeightsMemory:
        assert ServingSettings(weights_memory=way.value).weights_memory == way.value
    with pytest.raises(ConfigurationError, match="expected mapped, locked, huge or live, got 'swapped'"):
        ServingSettings(weights_memory="swapped")
