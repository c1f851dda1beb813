"""`tbe-serve lookup`."""

import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

from serving.__main__ import app
from serving.commands.lookup import object_of
from serving.engine import Engine
from serving.errors import InvalidRequest
from serving.server import Server
from tests.support.fake_server import FakeServer, serving
from tests.support.servers import tbe_serve


def test_lookup_answers_json_lines(server: Server, mixed: Path) -> None:
    lines = ['{"genres": [[3, 5], [], [1]]}', '{"user_id": {"values": [1, 2], "lengths": [2]}, "genres": [[0]]}']
    done = tbe_serve("lookup", "mixed", "--url", server.grpc, "--timeout-s", "30", stdin="\n".join(lines))
    assert (done.returncode, done.stderr) == (0, "")
    first, second = map(json.loads, done.stdout.splitlines())
    engine = Engine.open(mixed)
    np.testing.assert_array_equal(np.float32(first["genres"]), engine.lookup({"genres": [[3, 5], [], [1]]})["genres"])
    assert list(second) == ["user_id", "genres"]
    np.testing.assert_array_equal(np.float32(second["user_id"]), engine.lookup({"user_id": [[1, 2]]})["user_id"])


def test_lookup_answers_a_table(server: Server) -> None:
    done = tbe_serve("lookup", "mixed", "--url", server.grpc, "--table", stdin='{"genres": [[3, 5], []]}')
    rows = [line.split() for line in done.stdout.splitlines() if "genres" in line]
    assert [row[1:6:2] for row in rows] == [["0", "genres", "8"], ["1", "genres", "8"]]
    assert "+0.0000 +0.0000" in done.stdout


def test_lookup_reports_bad_lines_and_answers_the_others(server: Server, tmp_path: Path) -> None:
    lines = ['{"genres": [[20]]}', "nonsense", "[1]", '{"genres": {"ids": []}}', '{"genres": [[1]]}']
    (tmp_path / "requests").write_text("\n".join(lines))
    done = tbe_serve("lookup", "mixed", str(tmp_path / "requests"), "--url", server.grpc)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    reasons = done.stderr.splitlines()
    assert "line 1: " in reasons[0]
    assert "feature 'genres': expected an id in [0, 20), got 20" in reasons[0]
    assert "line 2: expected JSON" in reasons[1]
    assert "line 3: expected {" in reasons[2]
    assert "line 4: feature 'genres': expected a list of bags" in reasons[3]


def test_lookup_without_a_server_says_so() -> None:
    done = tbe_serve("lookup", "mixed", "--url", "127.0.0.1:1", stdin='{"genres": [[1]]}')
    assert done.returncode == 1
    assert done.stderr.startswith("tbe-serve: --url 127.0.0.1:1: model 'mixed': ")
    assert "Traceback" not in done.stderr


def test_undecodable_lines_are_reported_and_the_others_answered() -> None:
    lines = (
        b'\xff\n{"x": [['
        + b"9" * 5000
        + b']]}\n{"x": {"values": [1], "lengths": [1], "weights": ["x"]}}\n{"x": [[1]]}\n'
    )
    with serving(FakeServer()) as address:
        done = CliRunner().invoke(app, ["lookup", "m", "--url", address], input=lines)
    said = done.stderr.splitlines()
    assert [line.partition(": expected")[0] for line in said[:2]] == ["tbe-serve: line 1", "tbe-serve: line 2"]
    assert said[2].startswith("tbe-serve: line 3: feature 'x': expected numbers as weights")
    assert (len(said), done.exit_code) == (3, 1)
    assert json.loads(done.stdout) == {"x": [[1.0, 1.0]]}


@pytest.mark.parametrize(
    "code", ["INTERNAL", "UNKNOWN", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "UNAVAILABLE"]
)
def test_a_line_that_the_server_does_not_answer_is_one_line(code: str) -> None:
    fake = FakeServer()

    def fail(context: Any) -> None:
        request, _, _ = fake.calls[-1]
        if request.raw_input_contents[0] == np.int64(2).tobytes():
            context.abort(grpc.StatusCode[code], "no")

    fake.fail = fail
    with serving(fake) as address:
        lines = "".join(f'{{"x": [[{id_}]]}}\n' for id_ in (1, 2, 3))
        done = CliRunner().invoke(app, ["lookup", "m", "--url", address, "--timeout-s", "20"], input=lines)
    assert (done.exit_code, len(done.stdout.splitlines())) == (1, 2)
    (said,) = done.stderr.splitlines()
    assert said.startswith("tbe-serve: line 2: ")


def test_a_key_that_a_line_has_twice_is_refused() -> None:
    """Python's own parser takes the last of them."""
    lines = ['{"x": [[1]], "x": [[2]]}', '{"x": {"values": [1], "lengths": [1], "values": [2]}}', '{"x": [[1]]}']
    fake = FakeServer()
    with serving(fake) as address:
        done = CliRunner().invoke(app, ["lookup", "m", "--url", address, "--timeout-s", "20"], input="\n".join(lines))
    assert done.stderr.splitlines() == [
        f"tbe-serve: line {number}: expected each key of a JSON object once, got {key!r} 2 times"
        for number, key in ((1, "x"), (2, "values"))
    ]
    assert (done.exit_code, len(fake.calls)) == (1, 1)
    with pytest.raises(InvalidRequest, match="expected each key of a JSON object once, got 'features' 2 times"):
        object_of(b'{"features": {}, "features": {"x": [[1]]}}', "a line of `score`")


def test_nulls_are_empty_if_the_option_says_so() -> None:
    line = '{"x": [[1, null], null]}'
    fake = FakeServer()
    with serving(fake) as address:
        command = ["lookup", "m", "--url", address, "--timeout-s", "20"]
        refused = CliRunner().invoke(app, command, input=line)
        answered = CliRunner().invoke(app, [*command, "--nulls", "empty"], input=line)
    assert "expected no nulls, got one in sample 0: fill it, or pass" in refused.stderr
    assert "(--nulls empty)" in refused.stderr
    assert (refused.exit_code, answered.exit_code) == (1, 0)
    (request, _, _) = fake.calls[0]
    assert np.frombuffer(request.raw_input_contents[1], np.int32).tolist() == [1, 0]


def test_a_blank_line_is_passed_over_and_counted() -> None:
    lines = '\n{"x": [[1]]}\n \t\r\nnonsense\n\n{"x": [[2]]}\n\n'
    with serving(FakeServer()) as address:
        done = CliRunner().invoke(app, ["lookup", "m", "--url", address], input=lines)
    assert [line.partition(": expected")[0] for line in done.stderr.splitlines()] == ["tbe-serve: line 4"]
    assert len(done.stdout.splitlines()) == 2
