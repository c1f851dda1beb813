"""`tbe-serve score`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.engine import Engine
from serving.server import Server
from tests.support.servers import tbe_serve

FEATURES = {"x": [[1, 2], []], "y": [3, 4], "z": {"values": [5], "lengths": [1, 0]}}
DENSE = {"user": [[0.5, 1, 2], [3, 4, 5]], "item": [[1, 0], [0, 1]]}


def line(**changes: Any) -> str:
    return json.dumps({"features": FEATURES, "dense": DENSE} | changes)


def test_score_answers_json_lines_with_every_output(score_server: Server, scored: Path) -> None:
    lines = [line(), line(features=dict(reversed(FEATURES.items())))]
    done = tbe_serve("score", "ranker", "--url", score_server.grpc, "--timeout-s", "30", stdin="\n".join(lines))
    assert (done.returncode, done.stderr) == (0, "")
    expected = Engine.open(scored / "ranker" / "1").score(FEATURES, DENSE)  # type: ignore[arg-type]
    for answer in map(json.loads, done.stdout.splitlines()):
        assert list(answer) == ["like", "both"]
        np.testing.assert_array_equal(np.float32(answer["like"]), expected["like"])
        np.testing.assert_array_equal(np.float32(answer["both"]), expected["both"])


def test_a_model_of_ids_alone_needs_no_dense_inputs(score_server: Server, scored: Path) -> None:
    done = tbe_serve("score", "of_ids", "--url", score_server.grpc, stdin=json.dumps({"features": FEATURES}))
    assert (done.returncode, done.stderr) == (0, "")
    expected = Engine.open(scored / "of_ids" / "1").score(FEATURES)  # type: ignore[arg-type]
    assert json.loads(done.stdout) == {"scores": pytest.approx(expected["scores"].tolist(), abs=1e-6)}


def test_score_answers_a_table(score_server: Server) -> None:
    done = tbe_serve("score", "ranker", "--url", score_server.grpc, "--table", stdin=line())
    assert done.returncode == 0, done.stderr
    rows = [row.replace("│", " ").split() for row in done.stdout.splitlines()]
    assert ["┃", "row", "┃", "like", "┃", "both", "┃"] in rows
    assert [(row[0], len(row)) for row in rows if row and row[0].isdigit()] == [("0", 4), ("1", 4)]


def test_score_reports_bad_lines_and_answers_the_others(score_server: Server, tmp_path: Path) -> None:
    bad = {
        "nonsense": 'expected JSON, {"features": ',
        "[1]": 'expected {"features": {"feature": ',
        json.dumps(FEATURES): "got the keys 'x', 'y', 'z'",
        line(more=1): "got the keys 'features', 'dense', 'more'",
        line(
            dense={"user": DENSE["user"]}
        ): "dense input 'item': expected float32 [2, 2], a row for each sample, got none",
        line(dense=DENSE | {"user": [[1], [2]]}): "dense input 'user': expected float32 [2, 3]",
        line(dense=DENSE | {"other": [[1], [2]]}): "dense input 'other': expected one of 'user', 'item'",
        line(dense=DENSE | {"user": [["a"]]}): "dense input 'user': expected numbers",
        line(dense=[]): "dense: expected arrays by name",
        line(
            features={"x": [[1], [2]]}
        ): "got no ids of 'y', 'z': send empty bags for samples without ids, or request",
        line(features=FEATURES | {"x": [[50], []]}): "feature 'x': expected an id in [0, 50), got 50",
    }
    (tmp_path / "requests").write_text("\n".join([*bad, line()]))
    done = tbe_serve("score", "ranker", str(tmp_path / "requests"), "--url", score_server.grpc)
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 1)
    said = done.stderr.splitlines()
    assert len(said) == len(bad)
    for number, (one, expected) in enumerate(zip(said, bad.values(), strict=True), start=1):
        assert f"requests: line {number}: " in one
        assert expected in one


def test_a_model_without_scores_is_refused_once(score_server: Server) -> None:
    done = tbe_serve("score", "without", "--url", score_server.grpc, stdin=f"{line()}\n{line()}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "tbe-serve: MODEL 'without': expected a model with scores: export it with --scores\n"


def test_score_without_a_server_says_so() -> None:
    done = tbe_serve("score", "ranker", "--url", "127.0.0.1:1", stdin=line())
    assert done.returncode == 1
    assert done.stderr.startswith("tbe-serve: --url 127.0.0.1:1: model 'ranker': ")
    assert "Traceback" not in done.stderr
