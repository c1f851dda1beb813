"""Requests that are kept for replay, and what is done with them."""

import json
import queue
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import ExportConfig, export_model
from serving.capture import Recorder, read_captured
from serving.client import LookupClient, Retries
from serving.errors import InvalidRequest, ServerUnavailable
from serving.kjt import Tensors
from serving.server import run_server
from serving.settings import ServingSettings
from tests.models import SUM, collection
from tests.served.tools import FREE, add_gate, held, metric, replace_model_py, tbe_serve, wait_for_execution

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def exported(folder: Path, weighted: bool = False, **settings: Any) -> Path:
    config = ExportConfig(serving=ServingSettings(**settings))
    return export_model(collection(SUM, weighted=weighted), folder / "r", "m", config)


def lines(path: Path, count: int) -> list[dict[str, Any]]:
    """The captured lines, once there are `count`: they are written a moment later."""
    deadline = time.monotonic() + 10
    while len(found := path.read_text().splitlines()) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(found) == count
    return [json.loads(line) for line in found]


def test_nothing_is_captured_unless_it_is_asked_for(tmp_path: Path) -> None:
    exported(tmp_path)
    before = {path for path in tmp_path.rglob("*") if path.suffix == ".jsonl"}
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        with LookupClient(server.grpc, "m", 30) as client, pytest.raises(InvalidRequest):
            client.lookup({"x": [[-1]]})
        assert metric(server, "tbe_captured_total") == 0
    assert {path for path in tmp_path.rglob("*") if path.suffix == ".jsonl"} == before == set()


def test_refused_requests_are_kept_without_weights_and_with_their_trace(tmp_path: Path) -> None:
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


def test_slow_requests_are_kept_until_the_file_is_full(tmp_path: Path) -> None:
    exported(tmp_path, capture=str(tmp_path), capture_slow_ms=0.001, capture_max_bytes=2000)
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        with LookupClient(server.grpc, "m", 30) as client:
            for each in range(100):
                client.lookup({"x": [[each % 50]]})
        kept = metric(server, "tbe_captured_total", model="m")
    assert 5 < kept < 30
    assert (tmp_path / "m.jsonl").stat().st_size <= 2000
    requests = list(read_captured(tmp_path / "m.jsonl"))
    assert [request.values for request in requests] == [[each] for each in range(len(requests))]
    assert all(request.why.startswith("slow: ") and request.features == ["x"] for request in requests)


class NotRead(np.ndarray[Any, Any]):
    """Ids that nobody may turn into text."""

    def tolist(self) -> Any:
        raise AssertionError("it was read")


def test_a_request_that_the_file_has_no_room_for_is_not_even_read(tmp_path: Path) -> None:
    """Two bytes for each number, at least: four million ids are not made into text to be thrown away."""
    kept: queue.SimpleQueue[None] = queue.SimpleQueue()
    recorder = Recorder(tmp_path / "file", None, 1000, lambda: kept.put(None))
    lengths = np.array([498], np.int32)
    recorder.record(Tensors(None, np.zeros(499, np.int64).view(NotRead), lengths), "refused: lengths")
    with pytest.raises(AssertionError, match="it was read"):
        recorder.record(Tensors(None, np.zeros(498, np.int64).view(NotRead), lengths), "refused: lengths")
    recorder.record(Tensors(None, np.zeros(1, np.int64), lengths), "refused: lengths")
    kept.get(timeout=60)
    assert len((tmp_path / "file").read_text().splitlines()) == 1


def test_what_was_captured_is_replayed(tmp_path: Path) -> None:
    exported(tmp_path, weighted=True)
    file = tmp_path / "captured.jsonl"
    good = {
        "at": "2026-01-01",
        "why": "slow: 9 ms",
        "features": ["z", "x"],
        "values": [1, 2, 3],
        "lengths": [1, 0, 1, 1],
    }
    outside = {"at": "2026-01-01", "why": "refused: ids", "values": [-1], "lengths": [1, 0, 0]}
    malformed = {"at": "2026-01-01", "why": "refused: lengths", "values": [1], "lengths": [1, 5, 0]}
    file.write_text("".join(json.dumps(each) + "\n" for each in (good, outside, malformed)))
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        brief = ("--seconds", "1", "--repeats", "2", "--clients", "1")
        # What was refused is refused again.
        arguments = ("bench", "m", "--url", server.grpc, *brief, "--replay", str(file), "--max-errors", "1")
        done = tbe_serve(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["clients"], report["samples"]) == (1, None)
        assert report["answers_per_s"]["median"] * 2 == pytest.approx(report["samples_per_s"]["median"])
        assert list(report["errors"]) == ["InvalidRequest"]
        assert "1 of 3 requests are malformed and are not sent" in done.stderr
        assert "the answers were not checked" in done.stderr
        asked = metric(server, "tbe_samples_total", model="m") / metric(server, "tbe_requests_total", model="m")
        assert asked == 2
        done = tbe_serve(*arguments, "--bundle", str(tmp_path / "r/m/1"), "--check", "0.5")
        assert done.returncode == 0, done.stderr
        assert "InvalidRequest" in done.stdout
        assert "all right" in done.stdout


RECORD = """
from pathlib import Path
from serving.backend import TritonPythonModel
from serving.engine import Engine

run = Engine.run

def record(self, batch):
    with Path({record!r}).open("a") as file:
        print(*batch.values.tolist(), file=file)
    return run(self, batch)

Engine.run = record
"""


def test_a_model_warms_up_before_it_is_ready(tmp_path: Path) -> None:
    bundle = exported(tmp_path)
    replace_model_py(bundle, RECORD.format(record=str(tmp_path / "record")))
    file = tmp_path / "captured.jsonl"
    file.write_text(
        '{"at": "", "why": "slow: 9 ms", "features": ["x"], "values": [7, 8], "lengths": [2]}\n'
        '{"at": "", "why": "refused: ids", "features": ["x"], "values": [-1], "lengths": [1]}\n'
    )
    done = tbe_serve("configure", str(bundle.parent), "--warm-up", str(file))
    assert done.returncode == 0, done.stderr
    assert "warm-up" in done.stdout
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log"):
        assert (tmp_path / "record").read_text() == "7 8\n"
    done = tbe_serve("configure", str(bundle.parent), "--no-warm-up")
    (tmp_path / "record").unlink()
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log"):
        assert not (tmp_path / "record").exists()


def test_a_warm_up_that_is_none_is_refused(tmp_path: Path) -> None:
    bundle = exported(tmp_path)
    file = tmp_path / "captured.jsonl"
    file.write_text('{"values": 3}\n')
    done = tbe_serve("configure", str(bundle.parent), "--warm-up", str(file))
    assert done.returncode == 1
    assert "captured.jsonl: line 1: expected a captured request" in done.stderr
    assert not (bundle.parent / "warm_up.jsonl").exists()


def test_configure_shows_and_changes_what_is_said_and_nothing_else(tmp_path: Path) -> None:
    bundle = exported(tmp_path, queue_requests=7)
    model = str(bundle.parent)
    before = json.loads(tbe_serve("configure", model, "--json").stdout)
    assert before["queue_requests"] == 7
    assert before["queue_timeout_ms"] == 0
    said = (
        "--queue-timeout-ms",
        "50",
        "--merged-requests",
        "16",
        "--max-request-ids",
        "100",
        "--capture",
        str(tmp_path),
    )
    done = tbe_serve("configure", model, *said, "--json")
    after = json.loads(done.stdout)
    changed = {key: value for key, value in after.items() if before[key] != value}
    assert changed == {
        "queue_timeout_ms": 50,
        "merged_requests": 16,
        "max_request_ids": 100,
        "capture": str(tmp_path),
    }
    assert json.loads(tbe_serve("configure", model, "--no-capture", "--json").stdout)["capture"] is None
    text = (bundle.parent / "config.pbtxt").read_text()
    for wrong in (("--instances", "0"), ("--capture", "relative"), ("--capture-slow-ms", "0")):
        done = tbe_serve("configure", model, *wrong)
        assert done.returncode == 1
        assert "expected" in done.stderr
    assert (bundle.parent / "config.pbtxt").read_text() == text
    assert tbe_serve("configure", str(tmp_path / "nobody")).returncode == 1


def test_settings_are_what_the_server_does(tmp_path: Path) -> None:
    exported(tmp_path, max_request_ids=10, max_request_samples=4, max_call_ids=6, max_call_samples=3)
    with (
        run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server,
        LookupClient(server.grpc, "m", 30) as client,
    ):
        with pytest.raises(
            InvalidRequest, match=r"ids: expected at most 10 in a request, got 11: .*--max-request-ids"
        ):
            client.lookup({"x": [list(range(11))]})
        with pytest.raises(InvalidRequest, match=r"samples: expected at most 4 in a request, got 5"):
            client.lookup({"x": [[]] * 5})
        assert client.lookup({"x": [list(range(10))]})["x"].shape == (1, 8)  # more than a call takes: alone
        assert metric(server, "tbe_rejected_total", model="m", reason="size") == 2


def test_a_queue_has_no_limits_of_triton_s_unless_they_are_asked_for(tmp_path: Path) -> None:
    """With any of them, Triton stalls idle models for up to 500 ms: docs/decisions/0009."""
    config = exported(tmp_path).parent / "config.pbtxt"
    assert "default_queue_policy" not in config.read_text()
    assert tbe_serve("configure", str(config.parent), "--queue-requests", "5").returncode == 0
    assert "default_queue_policy" in config.read_text()
    assert tbe_serve("configure", str(config.parent), "--queue-requests", "0").returncode == 0
    assert "default_queue_policy" not in config.read_text()


def test_limits_of_the_queue_are_kept_where_they_are_asked_for(tmp_path: Path) -> None:
    bundle = exported(tmp_path, queue_requests=3, queue_timeout_ms=1500)
    add_gate(bundle)
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        once = Retries(attempts=1)
        with LookupClient(server.grpc, "m", 60, retries=once) as client, ThreadPoolExecutor(8) as pool:
            client.lookup({"x": [[1]]})
            with held(bundle):
                first = pool.submit(client.lookup, {"x": [[1]]})
                wait_for_execution(bundle)
                # One may be prepared beside the one that is answered; three wait; of eight, some find no room.
                others = [pool.submit(client.lookup, {"x": [[1]]}) for _ in range(7)]
                wait(others, return_when=FIRST_EXCEPTION)
                time.sleep(4)  # longer than those that wait may
            first.result()
            errors = [error for other in others if (error := other.exception()) is not None]
        assert {type(error) for error in errors} == {ServerUnavailable}
        full = [error for error in errors if "maximum queue size" in str(error)]
        late = [error for error in errors if "timeout expired" in str(error)]
        assert full
        assert late
        assert len(full) + len(late) == len(errors)
        # Triton counts those that waited too long, not those that found no room.
        assert metric(server, "nv_inference_request_failure", model="m", reason="REJECTED") == len(late)
