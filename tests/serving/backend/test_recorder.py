"""Requests that are kept for replay."""

import json
import os
import queue
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from export import ExportConfig, export_model
from serving.backend.recorder import Recorder
from serving.client import LookupClient
from serving.errors import ConfigurationError, InvalidRequest
from serving.model.config_file import as_json, read_config
from serving.model.settings import ServingSettings
from serving.requests.captured import SkippedLines, read_captured
from serving.requests.types import Tensors
from serving.server import run_server
from serving.server.hang_check import HangCheck
from tests.support.models import exported
from tests.support.ranker import ranker
from tests.support.servers import DTYPES, FREE, lens, metric, row

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def lines(path: Path, count: int) -> list[dict[str, Any]]:
    """The captured lines, once there are `count`: they are written a moment later."""
    deadline = time.monotonic() + 60
    while len(written := path.read_text().splitlines()) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(written) == count
    return [json.loads(line) for line in written]


@pytest.mark.long
def test_nothing_is_captured_unless_it_is_asked_for(tmp_path: Path) -> None:
    exported(tmp_path)
    before = {path for path in tmp_path.rglob("*") if path.suffix == ".jsonl"}
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        with LookupClient(server.grpc, "m", 30) as client, pytest.raises(InvalidRequest):
            client.lookup({"x": [[-1]]})
        assert metric(server, "tbe_captured_total") == 0
    assert {path for path in tmp_path.rglob("*") if path.suffix == ".jsonl"} == before == set()


def test_refused_requests_are_captured_with_their_trace_without_weights(tmp_path: Path) -> None:
    exported(tmp_path, weighted=True, capture=str(tmp_path))
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        with LookupClient(server.grpc, "m", 30) as client:
            client.lookup({"x": ([1], [1], [0.25])})
            with pytest.raises(InvalidRequest):
                client.lookup({"x": ([1, -5], [2], [0.25, 0.5])}, trace=TRACE)
        (first,) = lines(tmp_path / "m.jsonl", 1)
        assert metric(server, "tbe_captured_total", model="m") == 1
    assert first.pop("at") > "2026"
    assert first == {
        "why": "refused: ids", "features": ["x"], "values": [1, -5], "lengths": [2], "traceparent": TRACE,
    }  # fmt: skip
    assert "0.25" not in (tmp_path / "m.jsonl").read_text()
    assert (tmp_path / "m.jsonl").stat().st_mode & 0o077 == 0


@pytest.mark.promise("Nothing that a client sends makes a captured file unreadable")
def test_a_request_with_an_invalid_trace_is_captured_without_it(tmp_path: Path) -> None:
    exported(tmp_path, capture=str(tmp_path))
    with (
        run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server,
        triton.InferenceServerClient(server.grpc) as client,
    ):
        for trace in (7, True, "x" * 1000, "a\nb", TRACE):
            inputs = []
            for name, array in (("values", row(-1)), ("lengths", lens(1))):
                inputs.append(triton.InferInput(name, list(array.shape), DTYPES[str(array.dtype)]))
                inputs[-1].set_data_from_numpy(array)
            with pytest.raises(InferenceServerException, match="got -1 for sample 0"):
                client.infer("m", inputs, parameters={"traceparent": trace, "features": "x"})
        lines(tmp_path / "m.jsonl", 5)
    assert [captured.traceparent for captured in read_captured(tmp_path / "m.jsonl")] == [*[None] * 4, TRACE]


@pytest.mark.long
def test_requests_of_the_watcher_are_not_captured(tmp_path: Path) -> None:
    exported(tmp_path, capture=str(tmp_path), capture_slow_ms=0.000001)
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        server.control(30).infer("m", 1, HangCheck("m", 1, as_json(read_config(tmp_path / "r" / "m"))).request)
        with LookupClient(server.grpc, "m", 30) as client:
            client.lookup({"x": [[7]]})
        (line,) = lines(tmp_path / "m.jsonl", 1)
    assert line["values"] == [7]


@pytest.mark.long
def test_slow_requests_are_kept_until_the_file_is_full(tmp_path: Path) -> None:
    exported(tmp_path, capture=str(tmp_path), capture_slow_ms=0.001, capture_max_bytes=2000)
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        with LookupClient(server.grpc, "m", 30) as client:
            for number in range(100):
                client.lookup({"x": [[number % 50]]})
        captured = metric(server, "tbe_captured_total", model="m")
    assert 5 < captured < 30
    assert (tmp_path / "m.jsonl").stat().st_size <= 2000
    requests = list(read_captured(tmp_path / "m.jsonl"))
    assert [request.values for request in requests] == [[number] for number in range(len(requests))]
    assert all(request.why.startswith("slow: ") and request.features == ["x"] for request in requests)


def test_requests_for_scores_are_captured_with_dense_inputs_and_outputs(tmp_path: Path) -> None:
    """Those that were refused as they came; lookups of the same model name their output."""
    serving = ServingSettings(capture=str(tmp_path), capture_slow_ms=0.001)
    export_model(ranker(), tmp_path / "r", "m", ExportConfig(scores=True, serving=serving))
    features: dict[str, Any] = {"x": [[1]], "y": [[2]], "z": [[3]]}
    dense = {"user": np.array([[0.1, np.nan, 3]], np.float32), "item": np.array([[1, -np.inf]], np.float32)}
    with (
        run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server,
        LookupClient(server.grpc, "m", 30) as client,
    ):
        client.score(features, dense, outputs=["both"])
        client.lookup({"x": [[1]]})
        with pytest.raises(InvalidRequest):
            client.score(features | {"x": [[-1]]}, dense)
        lines(tmp_path / "m.jsonl", 3)
    scored, looked_up, refused = read_captured(tmp_path / "m.jsonl")
    assert (scored.outputs, looked_up.outputs, refused.outputs) == (["both"], ["embeddings"], ["both", "like"])
    for captured in (scored, refused):
        for name, array in captured.tensors.dense.items():
            assert array.tobytes() == dense[name].tobytes()
    assert scored.dense.keys() == refused.dense.keys() == dense.keys()
    assert not looked_up.dense


class NotRead(np.ndarray[Any, Any]):
    """Ids that nobody may turn into text."""

    def tolist(self) -> Any:
        raise AssertionError("it was read")


def test_a_request_too_large_for_the_file_is_not_read(tmp_path: Path) -> None:
    """Two bytes for each number, at least: four million ids are not made into text to be thrown away."""
    written: queue.SimpleQueue[None] = queue.SimpleQueue()
    recorder = Recorder(
        tmp_path / "file", None, 1000, lambda is_kept: written.put(None) if is_kept else None, pytest.fail
    )
    lengths = np.array([498], np.int32)
    recorder.record(Tensors(None, np.zeros(499, np.int64).view(NotRead), lengths), "refused: lengths")
    with pytest.raises(AssertionError, match="it was read"):
        recorder.record(Tensors(None, np.zeros(498, np.int64).view(NotRead), lengths), "refused: lengths")
    large = {"user": np.zeros((1, 250), np.float32)}
    recorder.record(Tensors(None, np.zeros(1, np.int64).view(NotRead), lengths, dense=large), "refused: dense")
    recorder.record(Tensors(None, np.zeros(1, np.int64), lengths), "refused: lengths")
    written.get(timeout=60)
    assert len((tmp_path / "file").read_text().splitlines()) == 1


FULL = """
import queue, sys
from pathlib import Path
import numpy as np
from serving.backend.recorder import Recorder
from serving.requests.types import Tensors

folder = Path(sys.argv[1])
said = queue.SimpleQueue()
recorder = Recorder(folder / "file", None, 1 << 30, lambda is_kept: said.put("kept") if is_kept else None, said.put)

def record(size):
    recorder.record(Tensors(["x"], np.full(size, 10**6), np.array([size], np.int32)), "refused: ids")

record(100)
assert said.get(timeout=60) == "kept"
before = (folder / "file").read_bytes()
(folder / "other").write_bytes(bytes(40 << 10))
for _ in range(3):
    record(4000)  # 32 KB, of which a part fits
(warning,) = [said.get(timeout=60)]
assert "a request was not written: [Errno 28] No space left on device: later ones are tried" in warning, warning
record(1)
assert said.get(timeout=60) == "kept"  # the three were tried before, and nothing was said a second time
assert (folder / "file").read_bytes().startswith(before)
(folder / "other").unlink()
record(4000)
assert said.get(timeout=60) == "kept"
print((folder / "file").read_text(), end="")
"""


@pytest.mark.promise("A full disk truncates no captured request, and capture resumes when there is space")
def test_a_full_disk_leaves_whole_lines_and_capture_resumes(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    mine = () if os.getuid() == 0 else ("--user", "--map-root-user")
    mount = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$0" -c "$2" "$1"'
    done = subprocess.run(
        ["unshare", "--mount", *mine, "sh", "-ec", mount, sys.executable, str(tmp_path / "disk"), FULL],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (tmp_path / "file").write_text(done.stdout)
    skipped = SkippedLines()
    assert [len(captured.values) for captured in read_captured(tmp_path / "file", skipped)] == [100, 1, 4000]
    assert skipped.count == 0


def recorded(path: Path, written: "queue.SimpleQueue[None]", values: Any = ()) -> None:
    recorder = Recorder(path, None, 10_000, lambda is_kept: written.put(None) if is_kept else None, pytest.fail)
    recorder.record(Tensors(["x"], np.array(values, np.int64), np.array([1], np.int32)), "refused: lengths")
    written.get(timeout=60)


def test_a_full_file_drops_requests_until_it_is_emptied(tmp_path: Path) -> None:
    counted: queue.SimpleQueue[bool] = queue.SimpleQueue()
    recorder = Recorder(tmp_path / "file", None, 300, counted.put, pytest.fail)

    def record() -> bool:
        recorder.record(Tensors(["x"], np.array([1]), np.array([1], np.int32)), "refused: ids")
        return counted.get(timeout=60)

    outcomes = [record() for _ in range(20)]
    assert outcomes == sorted(outcomes, reverse=True)  # kept first, then dropped
    assert {*outcomes} == {True, False}
    captured = outcomes.count(True)
    assert len(list(read_captured(tmp_path / "file"))) == captured
    os.truncate(tmp_path / "file", 0)
    assert [record() for _ in range(captured + 1)] == [True] * captured + [False]
    assert len(list(read_captured(tmp_path / "file"))) == captured


def test_the_half_line_of_a_killed_writer_is_terminated(tmp_path: Path) -> None:
    written: queue.SimpleQueue[None] = queue.SimpleQueue()
    recorded(tmp_path / "file", written, [1])
    with (tmp_path / "file").open("ab") as file:
        file.write(b'{"at": "2026')
    recorded(tmp_path / "file", written, [2])
    recorded(tmp_path / "file", written, [3])
    skipped = SkippedLines()
    assert [captured.values for captured in read_captured(tmp_path / "file", skipped)] == [[1], [2], [3]]
    assert skipped.count == 1


def test_a_failed_capture_is_logged_and_the_next_one_succeeds(tmp_path: Path) -> None:
    """A name may have half a character, over HTTP."""
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    recorder = Recorder(
        tmp_path / "file", None, 10_000, lambda is_kept: said.put("kept" if is_kept else "dropped"), said.put
    )
    for names in (["\ud800"], ["x"]):
        recorder.record(Tensors(names, np.array([1]), np.array([1], np.int32)), "refused: features")
    assert "a request was not written: 'utf-8' codec can't encode character" in said.get(timeout=60)
    assert [said.get(timeout=60) for _ in range(2)] == ["dropped", "kept"]
    assert [captured.features for captured in read_captured(tmp_path / "file")] == [["x"]]


@pytest.mark.promise("A file of captured requests is readable by the server's user alone")
def test_a_readable_capture_file_is_made_private_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.jsonl").touch()
    (tmp_path / "m.jsonl").chmod(0o666)
    settings = ServingSettings(capture=str(tmp_path))
    assert Recorder.of(settings, "m", lambda _: None, pytest.fail) is not None
    assert (tmp_path / "m.jsonl").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "m.jsonl").stat().st_uid + 1)
    with pytest.raises(ConfigurationError, match=r"m\.jsonl cannot be written: is another user's: remove it"):
        Recorder.of(settings, "m", lambda _: None, pytest.fail)
