"""Files are scored once, in order, and appear whole, whatever happens in between."""

import fcntl
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet

from serving.batch import folder_output, part_scores
from serving.batch.run import score_files
from serving.batch.sources import BundleSource
from serving.engine import Engine
from serving.errors import ConfigurationError, InternalError, InvalidRequest
from tests.support.day import ROW_GROUP, ROWS, contents, day_table, write_day
from tests.support.deadlines import PATIENT_S
from tests.support.killed_batches import kill_folder_runs
from tests.support.memory_limit import NoControlGroup, memory_limit
from tests.support.stopped_runs import Stopped, stop_after

ROOT = Path(__file__).parents[3]


def test_scores_have_one_row_for_each_input_row_in_order(bundle: Path, day: Path, tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    summary = score_files(
        BundleSource(bundle),
        [str(day)],
        tmp_path / "out" / "scores",
        keep=["id", "day"],
        progress=lambda *rows: done.append(rows),
    )
    assert (summary.rows, summary.scored_rows, summary.skipped_rows, summary.errors) == (ROWS, ROWS, 0, None)
    assert (done[0], done[-1]) == ((0, ROWS), (ROWS, ROWS))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["scores"]
    assert len([*(tmp_path / "out" / "scores").iterdir()]) == summary.parts == -(-ROWS // ROW_GROUP)
    scores = parquet.read_table(tmp_path / "out" / "scores")
    assert scores.column_names == ["id", "day", "like", "both"]
    assert scores["id"].to_pylist() == [*range(ROWS)]
    with Engine.open(bundle) as engine:
        expected = engine.score(day_table())
        metadata = parquet.read_schema(tmp_path / "out" / "scores" / "part-00000.parquet").metadata
        assert metadata[b"tbe-serving.bundle"].decode() == engine.bundle.digest
    np.testing.assert_allclose(scores["like"].to_numpy(), expected["like"], atol=1e-6)
    np.testing.assert_allclose(np.stack(scores["both"].to_numpy()), expected["both"], atol=1e-6)


def test_an_interrupted_run_resumes(bundle: Path, day: Path, tmp_path: Path) -> None:
    source, out = BundleSource(bundle), tmp_path / "scores"
    score_files(source, [str(day)], tmp_path / "undisturbed")
    with pytest.raises(Stopped):
        score_files(source, [str(day)], out, progress=stop_after(4 * ROW_GROUP + 1))
    assert not out.exists()
    hidden = tmp_path / ".scores.scoring"
    finished = {path.name: path.stat().st_mtime_ns for path in (hidden / "scores").iterdir()}
    assert len(finished) == 4
    for leftover in ("scores/.part-00004.parquet.abc", "scores/part-00009.parquet", ".journal.json.x", "errors/.e"):
        (hidden / leftover).write_bytes(b"half")
    (hidden / "replaced").mkdir()
    summary = score_files(source, [str(day)], out)
    assert summary.scored_rows == ROWS - 4 * ROW_GROUP
    assert contents(out) == contents(tmp_path / "undisturbed")
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == finished
    assert not hidden.exists()
    assert score_files(source, [str(day)], out).scored_rows == 0
    assert not hidden.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"keep": ["id"]}, r"--keep changed: it was \[\], and is \['id'\]", id="columns to keep"),
        pytest.param({"nulls": "empty"}, "--nulls changed: it was refuse, and is empty", id="nulls"),
        pytest.param({"names": {"x": "y"}}, "--columns changed: it was {}, and is ", id="names"),
        pytest.param("rows", r"the input .*day\.parquet changed: it was \d+ bytes with footer", id="other rows"),
        pytest.param("more", r"the input .*more\.parquet changed: it was missing", id="another file"),
        pytest.param("bundle", "where scores come from changed: it was {'bundle': ", id="another bundle"),
    ],
)
def test_another_run_is_refused_unless_it_restarts(
    bundle: Path, day: Path, tmp_path: Path, change: Any, message: str
) -> None:
    out, inputs, options = tmp_path / "scores", [str(day)], change if isinstance(change, dict) else {}
    with pytest.raises(Stopped):
        score_files(BundleSource(bundle), inputs, out, progress=stop_after(ROW_GROUP + 1))
    source = BundleSource(bundle)
    if change == "rows":
        write_day(day, day_table(seed=1))
    elif change == "more":
        inputs.append(str(write_day(tmp_path / "more.parquet")))
    elif change == "bundle":
        source = BundleSource(_copied(bundle, tmp_path))
    with pytest.raises(ConfigurationError, match=f"an earlier run did not finish, and {message}"):
        score_files(source, inputs, out, **options)
    assert score_files(source, inputs, out, restart=True, **options).scored_rows == ROWS * len(inputs)
    score_files(source, inputs, tmp_path / "undisturbed", **options)
    assert contents(out) == contents(tmp_path / "undisturbed")


def _copied(bundle: Path, tmp_path: Path) -> Path:
    """The same weights as another bundle."""
    copy = tmp_path / "other" / "ranker" / "1"
    copy.mkdir(parents=True)
    for path in bundle.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((copy / "manifest.json").read_bytes())
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def test_only_a_restart_replaces_the_scores_of_another_run(bundle: Path, day: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores"
    score_files(BundleSource(bundle), [str(day)], out)
    before = contents(out)
    with pytest.raises(ConfigurationError, match="another run: its inputs or options differ: name another folder"):
        score_files(BundleSource(bundle), [str(day)], out, keep=["id"])
    other = BundleSource(_copied(bundle, tmp_path))
    digests = f"{BundleSource(bundle).identity()}, and is {other.identity()}"
    with pytest.raises(ConfigurationError, match=re.escape(f"where scores come from changed: it was {digests}")):
        score_files(other, [str(day)], out)
    assert contents(out) == before
    with pytest.raises(Stopped):
        score_files(BundleSource(bundle), [str(day)], out, keep=["id"], restart=True, progress=stop_after(ROWS))
    assert contents(out) == before
    score_files(BundleSource(bundle), [str(day)], out, keep=["id"], restart=True)
    assert parquet.read_table(out).column_names == ["id", "like", "both"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day.parquet", "other", "scores"]


def test_replaced_scores_are_completed_after_a_kill(
    bundle: Path, day: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between the two renames of a restart."""
    out = tmp_path / "scores"
    score_files(BundleSource(bundle), [str(day)], out)
    with monkeypatch.context() as patch:
        patch.setattr(folder_output, "put_in_place", lambda *_: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            score_files(BundleSource(bundle), [str(day)], out, keep=["id"], restart=True)
    assert not out.exists()
    assert score_files(BundleSource(bundle), [str(day)], out, keep=["id"]).scored_rows == 0
    assert parquet.read_table(out)["id"].to_pylist() == [*range(ROWS)]


@pytest.mark.parametrize("kind", ["file", "folder", "parquet"])
def test_other_files_are_not_replaced(bundle: Path, day: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "scores"
    if kind == "file":
        out.write_text("mine")
    elif kind == "folder":
        (out / "mine").mkdir(parents=True)
    else:
        write_day(out / "part-00000.parquet")
    for restart in (False, True):
        with pytest.raises(ConfigurationError, match="expected no such file or folder, or earlier scores"):
            score_files(BundleSource(bundle), [str(day)], out, restart=restart)
    assert out.exists()
    assert not (tmp_path / ".scores.scoring").exists()


@pytest.mark.parametrize("out", ["days", "days/scores", "days/deep/scores", "link/scores"])
def test_an_output_in_a_folder_that_is_read_is_refused(bundle: Path, tmp_path: Path, out: str) -> None:
    """The next run would score its scores."""
    write_day(tmp_path / "days" / "day.parquet")
    (tmp_path / "link").symlink_to("days")
    with pytest.raises(
        ConfigurationError, match=rf"{out}: expected an output outside of the inputs, got the input .*days"
    ):
        score_files(BundleSource(bundle), [str(tmp_path / "days")], tmp_path / out)
    assert [path.name for path in (tmp_path / "days").iterdir()] == ["day.parquet"]


def test_scores_that_a_glob_finds_are_refused(bundle: Path, tmp_path: Path) -> None:
    write_day(tmp_path / "days" / "day.parquet")
    run = BundleSource(bundle), [f"{tmp_path}/days/**/*.parquet"], tmp_path / "days" / "scores"
    keep = day_table().column_names
    score_files(*run, keep=keep)
    with pytest.raises(ConfigurationError, match=r"got the input .*days/scores/part-00000\.parquet: name another"):
        score_files(*run, keep=keep, restart=True)


def test_two_runs_at_once_do_not_write_one_output(bundle: Path, day: Path, tmp_path: Path) -> None:
    hidden = tmp_path / ".scores.scoring"
    hidden.mkdir()
    lock = os.open(hidden, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigurationError, match="another run writes it"):
            score_files(BundleSource(bundle), [str(day)], tmp_path / "scores")
    finally:
        os.close(lock)
    score_files(BundleSource(bundle), [str(day)], tmp_path / "scores")


def _with_bad_rows(day: Path) -> list[int]:
    """Ids outside of their table in rows 3, 4 and 700, and all rows of the last row group."""
    table = day_table()
    column = table["x"].to_pylist()
    bad = [3, 4, 700, *range(ROWS - ROWS % ROW_GROUP, ROWS)]
    for row in bad:
        column[row] = [50]
    write_day(day, table.set_column(table.column_names.index("x"), "x", pa.array(column)))
    return bad


def test_a_bad_row_is_named(bundle: Path, day: Path, tmp_path: Path) -> None:
    _with_bad_rows(day)
    with pytest.raises(
        InvalidRequest, match=r"day\.parquet: row group 0, row 3: feature 'x': expected an id in \[0, 50\), got 50"
    ):
        score_files(BundleSource(bundle), [str(day)], tmp_path / "scores")


def test_bad_rows_are_left_out_and_listed(bundle: Path, day: Path, tmp_path: Path) -> None:
    bad = _with_bad_rows(day)
    source, out, errors = BundleSource(bundle), tmp_path / "scores", tmp_path / "scores.errors.jsonl"
    summary = score_files(source, [str(day)], out, keep=["id"], on_error="skip")
    assert (summary.skipped_rows, summary.errors) == (len(bad), str(errors))
    scores = parquet.read_table(out)
    assert scores["id"].to_pylist() == [row for row in range(ROWS) if row not in bad]
    lines = [json.loads(line) for line in errors.read_text().splitlines()]
    assert [line["row_group"] * ROW_GROUP + line["row"] for line in lines] == bad
    assert {line["file"] for line in lines} == {str(day)}
    assert all("feature 'x': expected an id in [0, 50), got 50" in line["reason"] for line in lines)
    with pytest.raises(ConfigurationError, match=r"has no scores of the rows in .*--on-error skip accepts that"):
        score_files(source, [str(day)], out, keep=["id"])
    write_day(day)
    score_files(source, [str(day)], out, keep=["id"], restart=True)
    assert not errors.exists()


def test_a_run_that_failed_at_a_bad_row_resumes_without_it(bundle: Path, day: Path, tmp_path: Path) -> None:
    bad = _with_bad_rows(day)
    source, out = BundleSource(bundle), tmp_path / "scores"
    score_files(source, [str(day)], tmp_path / "undisturbed", on_error="skip")
    with pytest.raises(Stopped):
        score_files(source, [str(day)], out, on_error="skip", progress=stop_after(ROW_GROUP + 1))
    with pytest.raises(InvalidRequest, match="row group 0, row 3: "):
        score_files(source, [str(day)], out)
    assert score_files(source, [str(day)], out, on_error="skip").skipped_rows == len(bad)
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_nulls_are_bad_rows_or_empty_bags(bundle: Path, day: Path, tmp_path: Path) -> None:
    table = day_table()
    column = [*table["z"].to_pylist()]
    column[160] = None
    write_day(day, table.set_column(table.column_names.index("z"), "z", pa.array(column)))
    with pytest.raises(InvalidRequest, match="row group 1, row 10: feature 'z': expected no nulls"):
        score_files(BundleSource(bundle), [str(day)], tmp_path / "scores")
    assert score_files(BundleSource(bundle), [str(day)], tmp_path / "empty", nulls="empty").skipped_rows == 0


def test_files_without_rows_have_scores_without_rows(bundle: Path, tmp_path: Path) -> None:
    empty = [write_day(tmp_path / "day" / f"{number}.parquet", day_table(0)) for number in range(2)]
    summary = score_files(BundleSource(bundle), [str(tmp_path / "day")], tmp_path / "scores", keep=["id"])
    assert (summary.rows, summary.parts) == (0, len(empty))
    assert parquet.read_table(tmp_path / "scores").column_names == ["id", "like", "both"]


def test_small_batches_are_written_in_large_row_groups(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bounds the memory: batches that are read, and rows that wait to be written."""
    day = write_day(tmp_path / "day.parquet", row_group=ROWS)
    monkeypatch.setattr(part_scores, "BATCH_ROWS", 70)
    monkeypatch.setattr(part_scores, "_WRITTEN_ROWS", 200)
    score_files(BundleSource(bundle), [str(day)], tmp_path / "scores", keep=["id"])
    written = parquet.ParquetFile(tmp_path / "scores" / "part-00000.parquet")
    assert [written.metadata.row_group(group).num_rows for group in range(written.num_row_groups)] == [210] * 4 + [
        160
    ]
    assert written.read()["id"].to_pylist() == [*range(ROWS)]


_PEAK = """
import re, sys
from pathlib import Path

from serving.batch.run import score_files
from serving.batch.sources import BundleSource

score_files(BundleSource(Path(sys.argv[1])), [sys.argv[2]], Path(f"{sys.argv[2]}.scores"))
# getrusage(2) would count the memory of the test that started this process, too.
print(1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]))
"""


_LIMITED = """
import os, sys
from pathlib import Path

Path(sys.argv[3]).write_text(str(os.getpid()))
from serving.batch.run import score_files
from serving.batch.sources import BundleSource

print(score_files(BundleSource(Path(sys.argv[1])), [sys.argv[2]], Path(f"{sys.argv[2]}.scores")).scored_rows)
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_file_three_times_the_memory_is_scored(bundle: Path, tmp_path: Path) -> None:
    """1.6 GB in a control group of 512 MiB, which also counts libraries and the page cache."""
    limit, rows = 512 << 20, 100_000
    random = np.random.default_rng(0)
    schema = pa.schema({name: pa.list_(pa.int64()) for name in ("x", "y", "z")}).append(
        pa.field("user", pa.list_(pa.float32(), 3))
    )
    schema = schema.append(pa.field("item", pa.list_(pa.float32(), 2)))
    ids = pa.ListArray.from_arrays(
        np.arange(0, rows * 30 + 1, 30, dtype=np.int32), pa.array(random.integers(0, 10, rows * 30))
    )
    dense = {
        name: pa.FixedSizeListArray.from_arrays(random.random(rows * width, np.float32), width)
        for name, width in (("user", 3), ("item", 2))
    }
    table = pa.table({"x": ids, "y": ids, "z": ids, **dense}, schema)
    day = tmp_path / "day.parquet"
    written = 0
    with parquet.ParquetWriter(day, schema, use_dictionary=False, compression="none") as writer:
        while day.stat().st_size < 3 * limit:
            writer.write_table(table, row_group_size=rows)
            written += rows
    command = [sys.executable, "-c", _LIMITED, str(bundle), str(day)]
    try:
        with memory_limit(limit) as processes:
            enter = f"import os; open({str(processes)!r}, 'w').write(str(os.getpid())); "
            hog = subprocess.run([sys.executable, "-c", f"{enter}bytearray(b'x' * {limit})"], check=False)
            assert hog.returncode == -signal.SIGKILL, "the limit has no effect"
            done = subprocess.run([*command, str(processes)], cwd=ROOT, capture_output=True, text=True, check=False)
    except NoControlGroup as error:
        pytest.skip(f"needs a control group with a memory limit: {error}")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == written


@pytest.mark.long
def test_memory_does_not_depend_on_the_size_of_a_row_group(bundle: Path, tmp_path: Path) -> None:
    """Columns of 72 MiB and of 579 MiB in one row group each."""
    random = np.random.default_rng(0)
    peaks = []
    for rows in (100_000, 800_000):
        bounds = np.arange(0, rows * 30 + 1, 30, dtype=np.int32)
        ids = {name: pa.array(random.integers(0, 10, rows * 30)) for name in ("x", "y", "z")}
        lists = {name: pa.ListArray.from_arrays(bounds, values) for name, values in ids.items()}
        dense = {
            name: pa.FixedSizeListArray.from_arrays(random.random(rows * width, np.float32), width)
            for name, width in (("user", 3), ("item", 2))
        }
        day = write_day(tmp_path / f"{rows}.parquet", pa.table({**lists, **dense}), row_group=rows)
        command = [sys.executable, "-c", _PEAK, str(bundle), str(day)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 128 << 20


def test_workers_write_what_one_process_writes(bundle: Path, day: Path, tmp_path: Path) -> None:
    done: list[int] = []
    source = BundleSource(bundle)
    score_files(source, [str(day)], tmp_path / "scores", workers=2, progress=lambda rows, _: done.append(rows))
    score_files(source, [str(day)], tmp_path / "alone")
    assert contents(tmp_path / "scores") == contents(tmp_path / "alone")
    assert done[-1] == ROWS


def test_a_run_resumes_after_a_worker_was_killed(bundle: Path, day: Path, tmp_path: Path) -> None:
    def kill(*_: int) -> None:
        for worker in multiprocessing.active_children():
            worker.kill()

    with pytest.raises(InternalError, match=r"one of the --workers was killed: .* with fewer --workers"):
        score_files(BundleSource(bundle), [str(day)], tmp_path / "scores", workers=2, progress=kill)
    score_files(BundleSource(bundle), [str(day)], tmp_path / "scores")
    score_files(BundleSource(bundle), [str(day)], tmp_path / "alone")
    assert contents(tmp_path / "scores") == contents(tmp_path / "alone")


@pytest.mark.parametrize("row_group", [150, ROWS])
def test_a_file_replaced_during_the_run_is_named(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_group: int
) -> None:
    """Also if it has one row group: `cp` writes over a file in place, and rows that are read afterwards are new."""
    monkeypatch.setattr(part_scores, "BATCH_ROWS", 50)
    day = write_day(tmp_path / "day.parquet", row_group=row_group)

    def replace(done: int, _: int) -> None:
        if done == 50:  # by a rename, so that this test never reads half a file
            write_day(tmp_path / "other.parquet", day_table(seed=1), row_group).replace(day)

    with pytest.raises(ConfigurationError, match=r"day\.parquet: changed while it was scored: start again"):
        score_files(BundleSource(bundle), [str(day)], tmp_path / "scores", progress=replace)
    assert not (tmp_path / "scores").exists()


def test_a_damaged_row_group_is_named(bundle: Path, day: Path, tmp_path: Path) -> None:
    content = bytearray(day.read_bytes())
    start = parquet.read_metadata(day).row_group(2).column(day_table().column_names.index("user")).data_page_offset
    content[start + 60 : start + 80] = bytes(20)
    day.write_bytes(content)
    with pytest.raises(
        ConfigurationError, match=r"day\.parquet: row group 2: cannot be read: .*: write the file again"
    ):
        score_files(BundleSource(bundle), [str(day)], tmp_path / "scores", on_error="skip")


@pytest.mark.long
def test_a_bad_row_that_a_worker_meets_is_named(bundle: Path, day: Path, tmp_path: Path) -> None:
    _with_bad_rows(day)
    with pytest.raises(InvalidRequest, match=r"row group \d, row \d+: feature 'x'"):
        score_files(BundleSource(bundle), [str(day)], tmp_path / "scores", workers=2)


@pytest.mark.long
def test_workers_end_with_a_run_that_is_killed(bundle: Path, tmp_path: Path) -> None:
    day = write_day(tmp_path / "day.parquet", day_table(200_000), row_group=20_000)
    command = [sys.executable, "-m", "serving", "score-files", str(day), "--bundle", str(bundle), "--out"]
    drafts = tmp_path / ".scores.scoring" / "scores"
    with subprocess.Popen([*command, str(tmp_path / "scores"), "--workers", "2"], cwd=ROOT) as process:
        try:
            while not [*drafts.glob(".part-*")]:
                assert process.poll() is None
                time.sleep(0.01)
            workers = psutil.Process(process.pid).children(recursive=True)
        finally:
            process.kill()
    _, alive = psutil.wait_procs(workers, PATIENT_S)
    assert len(workers) >= 2
    assert alive == []
    summary = score_files(BundleSource(bundle), [str(day)], tmp_path / "scores", workers=2)
    assert summary.rows == 200_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day.parquet", "scores"]


def _kill(bundle: Path, tmp_path: Path, kills: int) -> None:
    kill_folder_runs(bundle, write_day(tmp_path / "day.parquet"), tmp_path, kills)


def test_a_run_may_be_killed_at_any_moment(bundle: Path, tmp_path: Path) -> None:
    _kill(bundle, tmp_path, 5)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_many_runs_may_be_killed(bundle: Path, tmp_path: Path) -> None:
    """KILLS=100 makes more of them."""
    _kill(bundle, tmp_path, int(os.environ.get("KILLS", "15")))
