"""Requests that a model answers before it is ready."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from export import ExportConfig, export_model
from serving.requests.captured import CapturedRequest
from serving.requests.types import Tensors
from serving.server import run_server
from tests.support.models import exported
from tests.support.ranker import ranker
from tests.support.servers import FREE, replace_model_py, tbe_serve

RECORD = """
from pathlib import Path
from serving.backend import TritonPythonModel
from serving.lookup.local_ranks import LocalRanks

answer = LocalRanks.answer

def record(self, batches):
    with Path({record!r}).open("a") as file:
        for batch in batches:
            print(*batch.values.tolist(), file=file)
    return answer(self, batches)

LocalRanks.answer = record
"""


def test_a_model_warms_up_before_it_is_ready(tmp_path: Path) -> None:
    bundle = exported(tmp_path)
    replace_model_py(bundle, RECORD.format(record=str(tmp_path / "record")))
    file = tmp_path / "captured.jsonl"
    file.write_text(
        '{"at": "", "why": "slow: 9 ms", "features": ["x"], "values": [7, 8], "lengths": [2]}\n'
        '{"at": "", "why": "refused: ids", "features": ["x"], "values": [-1], "lengths": [1]}\n'
        '{"at": "", "why": "refused: ids", "values": [-1], "lengths": [1], "traceparent": 7}\n'
        '{"at": "", "why": "slow: 9 ms", "features": ["x"], "values": [9], "lengths": [1]}\n'
        '{"at": "", "why": "slow: 9'
    )
    done = tbe_serve("configure", str(bundle.parent), "--warm-up", str(file))
    assert done.returncode == 0, done.stderr
    assert "lines skipped, which are not captured requests: 2; line 3: expected a captured request" in done.stderr
    assert "warm-up" in done.stdout
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log"):
        assert (tmp_path / "record").read_text() == "7 8\n9\n"
    assert (
        "warm_up.jsonl: lines skipped, which are not captured requests: 2; line 3" in (tmp_path / "log").read_text()
    )
    done = tbe_serve("configure", str(bundle.parent), "--no-warm-up")
    (tmp_path / "record").unlink()
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log"):
        assert not (tmp_path / "record").exists()


RECORD_SCORES = """
from pathlib import Path
from serving.backend import TritonPythonModel
from serving.lookup.dense_program import DenseProgram

score = DenseProgram.score_all

def record(self, *given):
    found = score(self, *given)
    with Path({record!r}).open("a") as file:
        print(*(list(each) for each in found.values()), file=file)
    return found

DenseProgram.score_all = record
"""


@pytest.mark.long
def test_captured_score_requests_are_scored_before_a_model_is_ready(tmp_path: Path) -> None:
    bundle = export_model(ranker(), tmp_path / "r", "m", ExportConfig(scores=True))
    replace_model_py(bundle, RECORD_SCORES.format(record=str(tmp_path / "record")))
    dense = {"user": np.zeros((1, 3), np.float32), "item": np.zeros((1, 2), np.float32)}
    request = Tensors(None, np.array([1]), np.array([1, 0, 0], np.int32), outputs=["like", "both"], dense=dense)
    bad = replace(request, dense={"user": dense["user"]})
    lookup = replace(request, outputs=["embeddings"], dense={})
    with (tmp_path / "captured.jsonl").open("wb") as file:
        for captured in (request, bad, lookup):
            file.write(msgspec.json.encode(CapturedRequest.of(captured, "", "slow: 9 ms")) + b"\n")
    done = tbe_serve("configure", str(bundle.parent), "--warm-up", str(tmp_path / "captured.jsonl"))
    assert done.returncode == 0, done.stderr
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log"):
        assert (tmp_path / "record").read_text().splitlines() == ["['like', 'both']", ""]


def test_an_invalid_warm_up_is_refused(tmp_path: Path) -> None:
    bundle = exported(tmp_path)
    file = tmp_path / "captured.jsonl"
    file.write_text('{"values": 3}\n')
    done = tbe_serve("configure", str(bundle.parent), "--warm-up", str(file))
    assert done.returncode == 1
    assert "captured.jsonl: line 1: expected a captured request" in done.stderr
    assert not (bundle.parent / "warm_up.jsonl").exists()
