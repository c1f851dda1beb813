"""No row is torn and none becomes older again, however fast they change, and whoever is killed."""

import fcntl
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from export import Sharding, WeightDtype
from serving.bundle.lineage import deltas_folder
from serving.bundle.load import open_bundle
from serving.bundle.signature import TRUSTED_KEYS
from serving.engine import Engine
from serving.errors import ServerUnavailable
from serving.log import server_log
from serving.model.settings import WeightsMemory
from serving.server.delta_service import DeltaService
from serving.tables import delta_writer, live_state, mutable_tables
from serving.tables.huge_page_copy import open_locked
from serving.tables.live_state import State
from serving.tables.mutable_tables import (
    LIVE_DELTAS,
    LIVE_PREFIX,
    LIVE_SERVER,
    LiveCopy,
    live_copies,
    remove_unused_live_copies,
)
from tests.support.long_cases import one_in
from tests.support.mutable_tables import applying, publish_number, published, readers, seen_by, wait_until_applied

KINDS = [
    pytest.param(WeightDtype.INT8, 512, Sharding(), id="int8"),
    pytest.param(WeightDtype.FP16, 512, Sharding(ranks=2, types={"t": "column_wise"}), id="columns"),
    pytest.param(WeightDtype.FP32, 256, Sharding(ranks=2, types={"t": "row_wise"}), id="rows"),
    pytest.param(WeightDtype.INT4, 64, Sharding(ranks=2, types={"t": "data_parallel"}), id="copies"),
    pytest.param(WeightDtype.INT2, 512, Sharding(), id="int2"),
]
ROWS = 1000


@pytest.mark.promise("No answer holds a half-written row, and no server returns an older row after a newer one")
@pytest.mark.parametrize(("dtype", "dim", "sharding"), one_in(3, KINDS))
def test_rows_never_tear_or_go_back_while_deltas_are_applied(
    dtype: WeightDtype, dim: int, sharding: Sharding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 deltas of 1,000 rows, two processes that read them all the time."""
    bundle = published(tmp_path, ROWS, dim, dtype, sharding)
    publish_number(bundle, 1, range(ROWS), dim)
    with applying(bundle, monkeypatch):
        reading = readers(bundle, ROWS, 20, 2)
        for number in range(2, 20):
            publish_number(bundle, number, range(ROWS), dim)
        for reader in reading:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "reading\n"
        publish_number(bundle, 20, range(ROWS), dim)
        reports = [seen_by(reader) for reader in reading]
    assert [(report["torn"], report["backwards"], report["last"]) for report in reports] == [(0, 0, 20.0)] * 2


@pytest.mark.promise("Lookups of rows that a killed delta writer wrote in part wait for its successor")
@pytest.mark.parametrize("lock", [False, True], ids=["fence", "lock"])
def test_a_reader_waits_for_rows_half_written_by_a_killed_delta_writer(
    lock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the next one has written them again. With the lock as well, which other processors use."""
    monkeypatch.setattr(live_state, "_IS_ORDERED", not lock)
    bundle = published(tmp_path, ROWS, 16, WeightDtype.FP32)
    publish_number(bundle, 1, range(ROWS), 16)
    with applying(bundle, monkeypatch) as copies:
        engine = Engine.open(bundle, memory=WeightsMemory.LIVE)
        assert engine.table_files.live is not None
        (writer,) = _delta_writers()
        writer.send_signal(signal.SIGSTOP)
        # As the delta writer does, but killed in the middle of rows [200, 600) of the next delta.
        subprocess.run([sys.executable, "-c", _KILLED_WRITER, engine.table_files.live.path], check=True)
        assert engine.table_files.live.state.half_written == (200, 600)
        publish_number(bundle, 2, range(ROWS), 16)
        writer.kill()  # its successor comes
        rows = engine.rows("t", np.arange(ROWS))
        assert (rows[200:600] == 2).all()
        assert (rows == rows[:, :1]).all()
        wait_until_applied(copies, 2)
        # Rows before the slice had been written by the delta writer that was killed: they are not written again.
        assert (engine.rows("t", np.arange(200)) == 1).all()
        assert (engine.rows("t", np.arange(200, ROWS)) == 2).all()
        engine.close()


_KILLED_WRITER = """
import os, sys
from pathlib import Path
from serving.tables.mutable_tables import LiveCopy
copy = LiveCopy.attach(Path(sys.argv[1]))
with copy.state.writing(200, 400):
    start = (2 << 20) + 300 * 64 + 13
    copy.pages[start : start + 4000] = bytes(4000)
    os._exit(0)
"""


def _delta_writers() -> list[psutil.Process]:
    writers = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            if "serving.tables.delta_writer" in child.cmdline():
                writers.append(child)
    return writers


@pytest.mark.promise("Rows are as after a clean run however often the delta writer is killed")
def test_rows_are_right_after_any_number_of_killed_delta_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dim, last = 64, 20
    bundle = published(tmp_path, ROWS, dim, WeightDtype.INT8)
    random = np.random.default_rng(0)
    expected = np.full(ROWS, 1.0)
    publish_number(bundle, 1, range(ROWS), dim)
    with applying(bundle, monkeypatch) as copies:
        (reader,) = readers(bundle, ROWS, last, 1)
        with Engine.open(bundle, memory=WeightsMemory.LIVE) as engine:  # keeps the copy when the reader has ended
            for number in range(2, last + 1):
                changed = np.sort(random.choice(ROWS, 500, replace=False))
                publish_number(bundle, number, changed.tolist(), dim)
                expected[changed] = number
                if number % 4 == 0:
                    for writer in _delta_writers():
                        writer.kill()
            report = seen_by(reader)
            wait_until_applied(copies, last)
            rows = engine.rows("t", np.arange(ROWS))
    assert (report["torn"], report["backwards"]) == (0, 0)
    np.testing.assert_array_equal(rows, np.repeat(expected[:, np.newaxis], dim, axis=1))


def test_a_lookup_outrun_by_writers_still_gets_whole_rows(tmp_path: Path) -> None:
    """It takes the lock: the writer waits."""
    path = tmp_path / "state"
    path.write_bytes(bytes(2 << 20))
    with path.open("rb+") as file, mmap.mmap(file.fileno(), 0) as pages:
        state = live_state.State(pages, file.fileno())
        calls = []

        def look_up() -> int:
            calls.append(state.half_written)
            if len(calls) <= 2:
                with state.writing(0, 1):  # a writer comes in between
                    pass
            return len(calls)

        assert state.read(look_up) == 3
        assert state.rows == 2
        state.close()


def test_a_copy_is_kept_while_a_model_may_be_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From when it was used last, whenever it is looked at."""
    monkeypatch.setattr(delta_writer, "_UNUSED_S", 0.5)
    bundle = published(tmp_path, ROWS, 16, WeightDtype.FP32)
    monkeypatch.setenv(LIVE_SERVER, "0123456789abcdef")
    monkeypatch.setenv(LIVE_DELTAS, str(tmp_path))
    monkeypatch.setattr(State, "is_caught_up", True)
    engine = Engine.open(bundle, memory=WeightsMemory.LIVE)
    assert engine.table_files.live is not None
    path = engine.table_files.live.path
    copy = delta_writer.AppliedCopy(LiveCopy.attach(path))
    end = time.monotonic() + 0.8
    while time.monotonic() < end:
        used_at = time.monotonic()
        assert not copy.is_unused()
        time.sleep(0.01)
    engine.close()
    while not copy.is_unused():
        time.sleep(0.01)
    assert time.monotonic() - used_at >= 0.5
    assert not path.exists()
    copy.close()


def test_a_server_without_a_delta_writer_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutable_tables, "_CATCH_UP_S", 0.2)
    bundle = published(tmp_path, ROWS, 16, WeightDtype.FP32)
    copies = DeltaService(tmp_path, {}, server_log())
    for name, value in copies.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ServerUnavailable, match="no deltas were applied for a minute"):
        Engine.open(bundle, memory=WeightsMemory.LIVE)
    remove_unused_live_copies()
    assert not live_copies(copies.environment[LIVE_SERVER])


@pytest.mark.promise("The next server adopts the mutable tables of a killed server without copying them")
@pytest.mark.parametrize("what", one_in(2, ["half a row", "nothing", "more deltas"]))
def test_a_server_continues_with_the_copy_of_a_killed_one(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied again. What came while no server ran is there before anything is answered."""
    bundle = published(tmp_path, ROWS, 16, WeightDtype.FP32)
    for number in (1, 2, 3):
        publish_number(bundle, number, range(ROWS), 16)
    inode = _killed_server(bundle, 3 if what == "half a row" else 0, monkeypatch)
    if what == "more deltas":
        publish_number(bundle, 4, range(200), 16)
    with applying(bundle, monkeypatch) as copies, Engine.open(bundle, memory=WeightsMemory.LIVE) as engine:
        rows = engine.rows("t", np.arange(ROWS))
        assert (rows[:200] == (4 if what == "more deltas" else 3)).all()
        assert (rows[200:] == 3).all()
        assert engine.table_files.live is not None
        assert engine.table_files.live.path.stat().st_ino == inode
        publish_number(bundle, 5, [7], 16)
        assert wait_until_applied(copies, 5 if what == "more deltas" else 4).stopped == ""
        assert (engine.rows("t", np.array([7])) == 5).all()


@pytest.mark.promise("Mutable tables with rows of a replaced delta are rebuilt")
@pytest.mark.parametrize("what", one_in(2, ["another applied", "another begun", "gone", "another folder", "keys"]))
def test_a_copy_with_rows_of_another_history_is_replaced(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was applied, or begun, is another by now, or nobody knows whether a trusted key had signed it."""
    path = published(tmp_path, ROWS, 16, WeightDtype.FP32)
    bundle, deltas = open_bundle(path), deltas_folder(tmp_path / "r")
    for number in (1, 2, 3):
        publish_number(path, number, range(ROWS), 16)
    inode = _killed_server(path, 3 if what == "another begun" else 0, monkeypatch)
    (folder,) = (deltas / "m").iterdir()
    if what in ("another applied", "another begun", "gone"):
        (folder / "000000000003.safetensors").unlink()
    if what in ("another applied", "another begun"):
        publish_number(path, 9, [3], 16)
    if what == "another folder":
        deltas = shutil.copytree(deltas, tmp_path / "elsewhere")
    if what == "keys":
        run = partial(subprocess.run, check=True, cwd=tmp_path)
        run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", "key.pem"])
        run(["openssl", "pkey", "-in", "key.pem", "-pubout", "-out", "trusted.pem"])
        monkeypatch.setenv(TRUSTED_KEYS, str(tmp_path / "trusted.pem"))
    monkeypatch.setenv(LIVE_SERVER, "0123456789abcdef")
    monkeypatch.setenv(LIVE_DELTAS, str(deltas))
    copy = LiveCopy.take(bundle.path, bundle.manifest, "")
    assert copy.path.stat().st_ino != inode
    assert (copy.state.sequence, copy.state.half_written, copy.state.is_caught_up) == (0, None, False)
    assert not [*copy.path.parent.glob(f"{LIVE_PREFIX}{_KILLED}-*")]  # it is not in the way
    copy.close()


@pytest.mark.promise("The next server adopts the mutable tables of a killed server without copying them")
def test_a_copy_is_waited_for_while_processes_of_a_killed_server_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(published(tmp_path, ROWS, 16, WeightDtype.FP32))
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, check=True
    )
    monkeypatch.setenv(LIVE_SERVER, f"{int(ended.stdout)}-token")
    monkeypatch.setenv(LIVE_DELTAS, str(deltas_folder(tmp_path / "r")))
    command = [sys.executable, "-c", _MODEL, str(bundle.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as model:
        assert model.stdout is not None
        inode = _locked_inode(model.stdout.readline().strip(), monkeypatch)
        monkeypatch.setenv(LIVE_SERVER, f"{os.getpid()}-token")
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(LiveCopy.take, bundle.path, bundle.manifest, "")
            time.sleep(0.5)
            assert not pending.done()
            model.kill()
            copy = pending.result()
        assert copy.path.stat().st_ino == inode
        copy.close()


_MODEL = """
import os, sys
from pathlib import Path
from serving.bundle.load import open_bundle
from serving.tables.mutable_tables import LiveCopy
bundle = open_bundle(Path(sys.argv[1]))
copy = LiveCopy.take(bundle.path, bundle.manifest, "")
print(copy.path, flush=True)
sys.stdin.read()
"""
_KILLED = "00000000deadbeef"


def _killed_server(bundle: Path, half_written: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The inode of the copy of a server that applied all deltas and was killed; if so, while it wrote that one."""
    environment = {**os.environ, LIVE_SERVER: _KILLED, LIVE_DELTAS: str(deltas_folder(bundle.parent.parent))}
    command = [sys.executable, "-c", _SERVER, str(bundle), str(half_written)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        inode = _locked_inode(server.stdout.readline().strip(), monkeypatch)
        server.communicate()
    assert server.returncode == 0
    return inode


def _locked_inode(path: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The inode of a copy. It is held until its successor takes it: the servers of other tests, which run meanwhile,
    remove copies that nobody holds."""
    descriptor = os.open(path, os.O_RDONLY)
    inode = os.fstat(descriptor).st_ino
    fcntl.flock(descriptor, fcntl.LOCK_SH)

    def let_go(path: Path, flags: int, lock: int) -> int:
        is_wanted = path.exists() and path.stat().st_ino == inode
        if is_wanted:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        try:
            return open_locked(path, flags, lock)
        except BlockingIOError:
            if is_wanted:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            raise

    monkeypatch.setattr(mutable_tables, "open_locked", let_go)
    return inode


_SERVER = """
import os, sys
from pathlib import Path
from serving.bundle.load import open_bundle
from serving.tables import delta_writer
from serving.tables.mutable_tables import LiveCopy
bundle, half_written = open_bundle(Path(sys.argv[1])), int(sys.argv[2])
copy = LiveCopy.take(bundle.path, bundle.manifest, "")
print(copy.path, flush=True)
sys.stdin.read()
applied = delta_writer.AppliedCopy(LiveCopy.attach(copy.path))
while copy.state.sequence < (half_written or 4) - 1:
    applied.step()
if half_written:
    applied._rows = 100
    for _ in range(3):
        applied.step()
    start = (2 << 20) + 350 * 64 + 13
    with applied._state.writing(300, 100):
        applied._copy.pages[start : start + 100] = bytes(100)
        os._exit(0)
os._exit(0)
"""
