"""`tbe-serve bench` against a real server."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from export import ExportConfig, export_model
from serving.__main__ import app
from serving.model.settings import ServingSettings
from serving.server import run_server
from tests.support.models import SUM, collection, exported
from tests.support.ranker import ranker
from tests.support.servers import FREE, metric, tbe_serve
from tests.support.user_sides import used_from


def test_a_served_model_is_measured_and_its_answers_are_checked(tmp_path: Path) -> None:
    right = export_model(collection(SUM), tmp_path / "r", "m")
    other = export_model(collection(SUM, seed=1), tmp_path / "other", "m")
    brief = ("--seconds", "0.4", "--repeats", "3", "--warm-up", "0.2", "--check", "0.02")
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        bench = ("bench", "m", "--url", server.grpc, *brief)
        sizes = ("--samples", "1", "--samples", "16", "--pooling-factor", "3", "--pooling-factor", "y=0.5")
        done = tbe_serve(*bench, "--bundle", str(right), *sizes, "--clients", "2", "--ids", "zipf:1.1", "--json")
        assert done.returncode == 0, done.stderr
        one, many = map(json.loads, done.stdout.splitlines())
        assert (one["samples"], many["samples"]) == (1, 16)
        for report in (one, many):
            assert report["checked"] >= max(1, report["answers"] // 50)
            rates = [report[name]["median"] for name in ("answers_per_s", "samples_per_s", "ids_per_s")]
            assert 0 < rates[0] <= rates[1] < rates[2]
            assert report["answers_per_s"]["low"] <= rates[0] <= report["answers_per_s"]["high"]
            assert 6 <= rates[2] / rates[1] <= 7  # x, y, z: 3 + 0.5 + 3
            assert report["errors"] == {}

        done = tbe_serve(*bench, "--bundle", str(right), "--rate", "50")
        # A machine with other things to do sends late: then there are no figures, and that is said.
        if done.returncode:
            assert "the generator was the bottleneck: half of the requests went out" in done.stderr
            assert done.stdout == ""
        else:
            assert "1 × 50/s" in done.stdout
            assert "answers were compared with the bundle: all right" in done.stdout
            assert max(map(len, done.stdout.splitlines())) <= 80

        done = tbe_serve(*bench, "--bundle", str(other), "--clients", "1")
        assert done.returncode == 1
        assert "refused: wrong answers" in done.stderr
        assert "feature 'x': an answer is off by" in done.stderr
        assert "answers" not in done.stdout

        options = ("--seconds", "0.4", "--repeats", "1", "--warm-up", "0", "--bundle", str(right), "--clients", "2")
        done = tbe_serve("bench", "m", "--url", server.grpc, *options)
        assert done.returncode == 0, done.stderr
        assert "One run of 0.4 s" in done.stdout
        assert "±" not in done.stdout

        wider = export_model(collection(), tmp_path / "wider", "m")
        for arguments, why in (
            (("--bundle", str(wider)), "expected a version of the served model, 'm': features differ"),
            ((), "expected --bundle or --replay"),
            (("--bundle", str(right), "--pooling-factor", "q=1"), "expected one of 'x', 'y', 'z'"),
            (("--bundle", str(right), "--pooling-factor", "-1"), "expected [FEATURE=]X"),
            (("--bundle", str(right), "--ids", "normal"), "expected uniform or zipf:EXPONENT"),
            (("--bundle", str(right), "--repeats", "0"), "repeats: expected > 0"),
            (("--bundle", str(right), "--clients", "0"), "clients: expected > 0"),
            (("--bundle", str(right), "--rate", "-3"), "rate: expected > 0"),
            (("--bundle", str(right), "--samples", "0"), "samples: expected > 0"),
            (("--bundle", str(right), "--check", "2"), "check: expected a share in [0, 1]"),
            (("--bundle", str(right), "--max-errors", "2"), "max-errors: expected a share in [0, 1]"),
            (("--bundle", str(tmp_path)), f"{tmp_path}/manifest.json: cannot be read: "),
        ):
            refused = CliRunner().invoke(app, ["bench", "m", "--url", server.grpc, *arguments, "--timeout-s", "60"])
            assert refused.exit_code == 1
            assert why in refused.stderr

        # Next to nothing is answered within so little, on any machine. Triton 2.51 may die of it.
        late = (*options[:-2], "--rate", "50", "--timeout-s", "0.00001")
        done = tbe_serve("bench", "m", "--url", server.grpc, *late)
        assert done.returncode == 1
        assert "% of the requests failed, more than the 1.0% of --max-errors: " in done.stderr
        assert " DeadlineExceeded" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_captured_requests_are_replayed(tmp_path: Path) -> None:
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
    unreadable = {**good, "traceparent": 7}
    file.write_text("".join(json.dumps(record) + "\n" for record in (good, unreadable, outside, malformed)))
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
        assert "captured.jsonl: lines skipped, which are not captured requests: 1; line 2: expected" in done.stderr
        assert "the answers were not checked" in done.stderr
        samples_per_request = metric(server, "tbe_samples_total", model="m") / metric(
            server, "tbe_requests_total", model="m"
        )
        assert samples_per_request == 2
        done = tbe_serve(*arguments, "--bundle", str(tmp_path / "r/m/1"), "--check", "0.5")
        assert done.returncode == 0, done.stderr
        assert "InvalidRequest" in done.stdout
        assert "all right" in done.stdout


@pytest.mark.long
def test_scores_are_measured_checked_and_replayed(tmp_path: Path) -> None:
    captured = tmp_path / "captured"
    captured.mkdir()
    file = captured / "m.jsonl"
    serving = ServingSettings(capture=str(captured), capture_slow_ms=1e-6, capture_max_bytes=1 << 20)
    config = ExportConfig(scores=True, user_side=["x", "user"], serving=serving)
    with used_from(16):
        right = export_model(ranker(), tmp_path / "r", "m", config)
    changed = ranker()
    with torch.no_grad():
        changed.top.bias.add_(1)
    other = export_model(changed, tmp_path / "other", "m", ExportConfig(scores=True))
    unscored = export_model(collection(SUM), tmp_path / "r", "unscored")
    brief = ("--seconds", "0.4", "--repeats", "2", "--warm-up", "0", "--clients", "2", "--check", "1")
    scores = ("--scores", "--bundle", str(right))
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        bench = ("bench", "m", "--url", server.grpc, *brief)
        done = tbe_serve(*bench, *scores, "--samples", "1", "--samples", "9", "--json")
        assert done.returncode == 0, done.stderr
        for report in map(json.loads, done.stdout.splitlines()):
            assert report["checked"] == report["answers"] > 0
            assert report["errors"] == {}
        assert metric(server, "tbe_stage_seconds_sum", model="m", stage="score") > 0

        done = tbe_serve(*bench, *scores, "--items", "20", "--items", "300", "--json")
        assert done.returncode == 0, done.stderr
        reports = [json.loads(line) for line in done.stdout.splitlines()]
        assert [report["samples"] for report in reports] == [20, 300]
        for report in reports:
            assert report["checked"] == report["answers"] > 0
            assert report["errors"] == {}
        assert metric(server, "tbe_user_side_total", model="m") == sum(report["answers"] for report in reports)

        done = tbe_serve(*bench, "--scores", "--bundle", str(other))
        assert done.returncode == 1
        assert "refused: wrong answers" in done.stderr
        assert "output 'like': a score is off by" in done.stderr

        # What was captured of it are requests for scores, whose every answer is right. Beside them, a line of before
        # there were any, and one of another model.
        lines = file.read_text().splitlines()
        some = tmp_path / "some.jsonl"
        old = '{"at": "2026-01-01", "why": "slow: 9 ms", "features": ["x"], "values": [7], "lengths": [1]}'
        strange = '{"at": "", "why": "", "values": [], "lengths": [0, 0, 0], "outputs": ["click"]}'
        some.write_text("\n".join([*lines[:5], old, strange]) + "\n")
        assert all(json.loads(line)["outputs"] == ["both", "like"] for line in lines[:5])
        before = metric(server, "tbe_rejected_total", model="m")
        done = tbe_serve(*bench, "--replay", str(some), "--bundle", str(right), "--json")
        assert done.returncode == 0, done.stderr
        assert "1 of 7 requests are malformed and are not sent" in done.stderr
        report = json.loads(done.stdout)
        assert report["checked"] == report["answers"]
        assert metric(server, "tbe_rejected_total", model="m") == before

        for model, arguments, why in (
            ("m", (*scores, "--replay", str(some)), "scores: expected random requests"),
            ("unscored", ("--scores", "--bundle", str(unscored)), "scores: expected a bundle with scores"),
            ("m", ("--bundle", str(right), "--items", "9"), "items (--items): expected --scores beside it"),
            ("m", (*scores, "--items", "9", "--samples", "9"), "items (--items): expected no --samples beside it"),
            ("m", (*scores, "--items", "0"), "items: expected > 0"),
            ("m", ("--scores", "--bundle", str(other), "--items", "9"), "expected a bundle with a user side: "),
        ):
            done = tbe_serve("bench", model, "--url", server.grpc, *brief, *arguments)
            assert (done.returncode, done.stdout) == (1, "")
            assert why in done.stderr
