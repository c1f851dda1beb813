"""Files are scored from and into an object store: found, read while they stay the same, and whole with `_SUCCESS`."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pytest
from pyarrow import parquet

from serving.batch import objects
from serving.batch.inputs import find_inputs
from serving.batch.object_output import SUCCESS
from serving.batch.run import score_files
from serving.batch.sources import BundleSource
from serving.errors import ConfigurationError, InvalidRequest, ServerUnavailable
from tests.support.day import ROW_GROUP, ROWS, contents, day_table, partitioned_day, write_day
from tests.support.killed_batches import killed
from tests.support.long_cases import one_in
from tests.support.s3 import BUCKET, S3
from tests.support.stopped_runs import Stopped, stop_after

PARTS = -(-ROWS // ROW_GROUP)


@pytest.fixture
def url(s3: S3, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A prefix in the store that has nothing yet."""
    objects.objects_of.cache_clear()
    return s3.new_prefix(monkeypatch, request)


def put(s3: S3, url: str, path: Path) -> str:
    s3.put(url.removeprefix(f"s3://{BUCKET}/"), path.read_bytes())
    return url


def stored(url: str) -> dict[str, bytes]:
    """The objects below a URL."""
    below = objects.objects_of(url)
    return {name: below.read(name) or b"" for name in below.states()}


def scores_in(url: str) -> dict[str, bytes]:
    return {name: content for name, content in stored(url).items() if not name.startswith("_")}


def test_a_prefix_a_glob_and_an_object_are_found(url: str, s3: S3, tmp_path: Path) -> None:
    day = write_day(tmp_path / "day.parquet", day_table(10))
    for name in ("b.parquet", "a.parquet", "deep/c.parquet", "_hidden/d.parquet", "deep/.e.parquet", "a.txt"):
        put(s3, f"{url}/{name}", day)

    def names(*patterns: str) -> list[str]:
        return [file.path.removeprefix(f"{url}/") for file in find_inputs(patterns)]

    assert names(url) == names(f"{url}/") == ["a.parquet", "b.parquet", "deep/c.parquet"]
    assert names(f"{url}/*.parquet") == ["a.parquet", "b.parquet"]
    assert names(f"{url}/**/[cd].parquet") == ["_hidden/d.parquet", "deep/c.parquet"]
    assert names(f"{url}/deep/c.parquet", f"{url}/a.parquet") == ["deep/c.parquet", "a.parquet"]
    (file,) = find_inputs([f"{url}/a.parquet"])
    assert (file.size_bytes, file.rows) == (day.stat().st_size, (10,))
    assert file.e_tag.strip('"') == hashlib.md5(day.read_bytes()).hexdigest()
    with pytest.raises(ConfigurationError, match=r"a\.parquet: expected each file once, got it twice"):
        find_inputs([url, f"{url}/a.parquet"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        pytest.param("URL/none", "/none: expected Parquet objects: one, a prefix with", id="no object"),
        pytest.param("URL/*.csv", r"/\*\.csv: expected Parquet objects", id="a glob of nothing"),
        pytest.param("URL/a.txt", r"/a\.txt: expected a Parquet file: ", id="text"),
        pytest.param("http://bucket/a", "http://bucket/a: expected a path on this machine, or s3://", id="http"),
        pytest.param("s3://bucket", "s3://bucket: expected a path on this machine, or s3://", id="a bucket"),
    ],
)
def test_inputs_without_parquet_are_refused(url: str, s3: S3, wrong: str, message: str) -> None:
    s3.put(f"{url.removeprefix(f's3://{BUCKET}/')}/a.txt", b"id,ts\n" * 100)
    with pytest.raises(ConfigurationError, match=message):
        find_inputs([wrong.replace("URL", url)])


def test_a_bucket_that_is_missing_is_named(url: str) -> None:  # noqa: ARG001
    with pytest.raises(ServerUnavailable, match=r"s3://no-such-bucket/day.*is there a bucket of that name\?"):
        find_inputs(["s3://no-such-bucket/day"])


def test_credentials_that_are_missing_are_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # a machine without a role
    with pytest.raises(ServerUnavailable, match="no credentials: neither AWS_ACCESS_KEY_ID and so on"):
        find_inputs([url])


def test_the_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    objects.objects_of.cache_clear()
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigurationError, match=r"s3://bucket: needs a package: pip install 'tbe-serving\[batch\]'"):
        find_inputs(["s3://bucket/day.parquet"])


def test_an_object_is_scored_into_a_prefix(url: str, s3: S3, bundle: Path, day: Path, tmp_path: Path) -> None:
    source, inputs = BundleSource(bundle), [put(s3, f"{url}/days/day.parquet", day)]
    summary = score_files(source, inputs, f"{url}/scores", keep=["id"])
    assert (summary.scored_rows, summary.parts, summary.errors) == (ROWS, PARTS, None)
    score_files(source, inputs, tmp_path / "scores", keep=["id"])
    assert scores_in(f"{url}/scores") == contents(tmp_path / "scores")
    written = [
        key.rpartition("/")[2] for method, key in s3.requests() if method == "PUT" and f"{url[12:]}/scores" in key
    ]
    assert written == ["_journal.json", *sorted(contents(tmp_path / "scores")), SUCCESS]
    assert score_files(source, inputs, f"{url}/scores", keep=["id"]).scored_rows == 0
    with pytest.raises(
        ConfigurationError, match=r"another run: --keep changed: it was \['id'\], and is \[\]: name another prefix"
    ):
        score_files(source, inputs, f"{url}/scores")
    assert score_files(source, inputs, f"{url}/scores", restart=True).scored_rows == ROWS
    score_files(source, inputs, tmp_path / "without", restart=True)
    assert scores_in(f"{url}/scores") == contents(tmp_path / "without")


def test_an_interrupted_run_resumes(url: str, bundle: Path, day: Path, tmp_path: Path) -> None:
    source = BundleSource(bundle)
    with pytest.raises(Stopped):
        score_files(source, [str(day)], url, progress=stop_after(4 * ROW_GROUP + 1))
    assert sorted(stored(url)) == ["_journal.json", *(f"part-{number:05}.parquet" for number in range(4))]
    with pytest.raises(ConfigurationError, match=r"an earlier run did not finish, and --keep changed"):
        score_files(source, [str(day)], url, keep=["id"])
    assert score_files(source, [str(day)], url).scored_rows == ROWS - 4 * ROW_GROUP
    score_files(source, [str(day)], tmp_path / "scores")
    assert scores_in(url) == contents(tmp_path / "scores")


def test_an_object_that_changes_while_it_is_scored_is_named(url: str, s3: S3, bundle: Path, day: Path) -> None:
    inputs = [put(s3, f"{url}/day.parquet", day)]

    def progress(done: int, _: int) -> None:
        if done == 2 * ROW_GROUP:
            put(s3, inputs[0], write_day(day, day_table(seed=1)))

    with pytest.raises(
        ConfigurationError, match=r"day\.parquet: changed while it was scored: start again with --rest"
    ):
        score_files(BundleSource(bundle), inputs, f"{url}/scores", progress=progress)
    assert SUCCESS not in stored(f"{url}/scores")
    with pytest.raises(ConfigurationError, match=r"the input s3://.*day\.parquet changed: it was \d+ bytes .*ETag"):
        score_files(BundleSource(bundle), inputs, f"{url}/scores")


def test_bytes_of_a_changed_object_are_not_read(url: str, s3: S3, tmp_path: Path) -> None:
    path = put(s3, f"{url}/day.parquet", write_day(tmp_path / "day.parquet"))
    (file,) = find_inputs([path])
    with file.open() as opened:
        s3.put(path.removeprefix(f"s3://{BUCKET}/"), b"x" * file.size_bytes)
        with pytest.raises(ConfigurationError, match=r"day\.parquet: changed while it was scored"):
            opened.read()


def test_bad_rows_are_listed_below_errors(url: str, bundle: Path, tmp_path: Path) -> None:
    table = day_table(10)
    day = write_day(tmp_path / "day.parquet", table.set_column(2, "x", pa.array([[50], *[[]] * 9])), 5)
    with pytest.raises(InvalidRequest, match=r"row group 0, row 0"):
        score_files(BundleSource(bundle), [str(day)], url)
    summary = score_files(BundleSource(bundle), [str(day)], url, keep=["id"], on_error="skip", restart=True)
    assert (summary.skipped_rows, summary.errors) == (1, f"{url}/_errors")
    line = json.loads(stored(url)["_errors/part-00000.parquet.jsonl"])
    assert (line["file"], line["row_group"], line["row"]) == (str(day), 0, 0)
    assert parquet.read_table(pa.BufferReader(scores_in(url)["part-00000.parquet"]))["id"].to_pylist() == [1, 2, 3, 4]
    with pytest.raises(ConfigurationError, match=r"has no scores of the rows in .*_errors: --on-error skip accepts"):
        score_files(BundleSource(bundle), [str(day)], url, keep=["id"])


def test_objects_of_another_program_are_not_replaced(url: str, s3: S3, bundle: Path, day: Path) -> None:
    for name in (SUCCESS, "part-00000.parquet"):
        s3.put(f"{url.removeprefix(f's3://{BUCKET}/')}/{name}", b"spark's")
    for restart in (False, True):
        with pytest.raises(ConfigurationError, match="expected no objects, or earlier scores"):
            score_files(BundleSource(bundle), [str(day)], url, restart=restart)
    assert set(stored(url).values()) == {b"spark's"}


def test_partitions_are_written_as_prefixes_also_after_a_resume(url: str, bundle: Path, tmp_path: Path) -> None:
    """Also after an interruption. Names are those of a folder, percent signs and all."""
    source, days = BundleSource(bundle), str(write_day(tmp_path / "days.parquet", partitioned_day()))
    keep, by = ["id", "day", "country"], ["day", "country"]
    with pytest.raises(Stopped):
        score_files(source, [days], url, keep=keep, partition_by=by, progress=stop_after(2 * ROW_GROUP + 1))
    finished = {name for name in stored(url) if name.startswith("_finished/")}
    assert finished == {f"_finished/part-{number:05}.parquet" for number in range(2)}
    objects.objects_of(url).write("day=2026-11-01/country=DE/part-00002.parquet", b"of a part that is not finished")
    summary = score_files(source, [days], url, keep=keep, partition_by=by)
    assert summary.scored_rows == ROWS - 2 * ROW_GROUP
    score_files(source, [days], tmp_path / "scores", keep=keep, partition_by=by)
    assert scores_in(url) == contents(tmp_path / "scores")
    assert sorted(name for name in stored(url) if name.startswith("_")) == [SUCCESS, "_journal.json"]
    assert score_files(source, [days], url, keep=keep, restart=True).scored_rows == ROWS
    assert sorted(scores_in(url)) == [f"part-{number:05}.parquet" for number in range(PARTS)]


@pytest.mark.parametrize("partition_by", one_in(2, [[], ["day"]]), ids=["parts", "partitions"])
def test_a_run_stops_when_a_restart_takes_its_prefix(
    url: str, bundle: Path, tmp_path: Path, partition_by: list[str]
) -> None:
    """What the other run writes has `_SUCCESS`, and nothing of the first."""
    source, days = BundleSource(bundle), str(write_day(tmp_path / "days.parquet", partitioned_day()))
    taken: list[int] = []

    def take(done: int, _: int) -> None:
        if done > 2 * ROW_GROUP and not taken:
            taken.append(done)
            score_files(source, [days], url, keep=["country"], restart=True)

    with pytest.raises(ConfigurationError, match="a run with --restart took this prefix while this one wrote it"):
        score_files(source, [days], url, keep=["day"], partition_by=partition_by, progress=take)
    score_files(source, [days], tmp_path / "scores", keep=["country"])
    assert scores_in(url) == contents(tmp_path / "scores")
    assert score_files(source, [days], url, keep=["country"]).scored_rows == 0


@pytest.mark.parametrize("partition_by", one_in(2, [["day"], []]), ids=["partitions", "parts"])
def test_two_runs_of_one_command_at_once_write_the_same(
    url: str, bundle: Path, tmp_path: Path, partition_by: list[str]
) -> None:
    """The second begins and stops while the first writes a part, and deletes nothing of it."""
    source, days = BundleSource(bundle), str(write_day(tmp_path / "days.parquet", partitioned_day()))
    write_file = objects.Objects.write_file
    begun: list[str] = []

    def write_and_begin_another(below: objects.Objects, name: str, file: BinaryIO) -> None:
        write_file(below, name, file)
        if not begun and "part-00002" in name:
            begun.append(name)
            with pytest.raises(Stopped):
                score_files(source, [days], url, keep=["day"], partition_by=partition_by, progress=stop_after(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects.Objects, "write_file", write_and_begin_another)
        score_files(source, [days], url, keep=["day"], partition_by=partition_by)
    assert begun
    score_files(source, [days], tmp_path / "scores", keep=["day"], partition_by=partition_by)
    assert scores_in(url) == contents(tmp_path / "scores")


def _kill(url: str, bundle: Path, tmp_path: Path, kills: int) -> None:
    report = killed(bundle, write_day(tmp_path / "day.parquet"), url, kills)
    for output in range(report["outputs"]):
        assert scores_in(f"{url}/scores-{output}") == scores_in(f"{url}/whole")
        assert SUCCESS in stored(f"{url}/scores-{output}")


def test_a_run_may_be_killed_at_any_moment(url: str, bundle: Path, tmp_path: Path) -> None:
    _kill(url, bundle, tmp_path, 3)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_many_runs_may_be_killed(url: str, bundle: Path, tmp_path: Path) -> None:
    """KILLS=100 makes more of them."""
    _kill(url, bundle, tmp_path, int(os.environ.get("KILLS", "15")))
