"""`tbe-serve configure`."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from export import ExportConfig, Sharding, export_model
from serving.__main__ import app
from serving.model.config_file import read_config, settings_of
from serving.router.hosts_config import HostsConfig
from tests.support.hosts import export_hosts
from tests.support.models import SUM, collection, exported
from tests.support.scored_models import EXACT, dlrm
from tests.support.servers import tbe_serve


@pytest.mark.parametrize(
    ("setting", "value"), [("capture", "/tmp"), ("capture_slow_ms", "5"), ("warm_up", "captured.jsonl")]
)
def test_capture_and_warm_up_settings_can_be_unset(
    setting: str, value: str, repository: Path, tmp_path: Path
) -> None:
    model = tmp_path / "mixed"
    model.mkdir()
    (model / "config.pbtxt").write_text((repository / "mixed" / "config.pbtxt").read_text())
    before = settings_of(read_config(model))
    captured = tmp_path / "captured.jsonl"
    captured.write_text('{"at": "", "why": "", "values": [1], "lengths": [1, 0, 0, 0, 0]}\n')
    option = f"--{setting.replace('_', '-')}"
    value = str(captured) if setting == "warm_up" else value
    assert CliRunner().invoke(app, ["configure", str(model), option, value]).exit_code == 0
    assert settings_of(read_config(model)) != before or (model / "warm_up.jsonl").exists()
    done = CliRunner().invoke(app, ["configure", str(model), f"--no-{option[2:]}"])
    assert done.exit_code == 0, done.stderr
    assert settings_of(read_config(model)) == before
    assert not (model / "warm_up.jsonl").exists()


@pytest.mark.parametrize(
    ("added", "said"),
    [
        pytest.param('parameters { key: "max_call_ids" value { string_value: "many" } }', "max_call_ids: expected a number, got 'many'", id="parameter"),
        pytest.param("instance_group { count: -1 }", "instances: expected 1 to 2147483647, got ", id="field"),
        pytest.param("nonsense", "", id="no config"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [(), ("--instances", "2")], ids=["shown", "changed"])
def test_a_config_that_cannot_be_used_is_named(
    added: str, said: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.pbtxt").write_text(f'name: "m"\n{added}\n')
    done = CliRunner().invoke(app, ["configure", str(tmp_path), *options])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"tbe-serve: {tmp_path}/config.pbtxt: {said}")


def test_a_config_without_instances_is_configured(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text('name: "m"\n')
    done = CliRunner().invoke(app, ["configure", str(tmp_path), "--instances", "3", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["instances"]) == (0, 3)
    assert "KIND_CPU" in (tmp_path / "config.pbtxt").read_text()


def test_configure_changes_only_the_given_settings(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "options",
    [
        ("--host", "0=a:8001"),
        ("--shard-timeout-ms", "50"),
        ("--on-shard-failure", "zero"),
        ("--hosts-server-name", "m"),
    ],
    ids=lambda options: options[0],
)
def test_router_settings_are_refused_for_other_models(options: tuple[str, ...], tmp_path: Path) -> None:
    bundle = exported(tmp_path / "r")
    before = (bundle.parent / "config.pbtxt").read_bytes()
    done = CliRunner().invoke(app, ["configure", str(bundle.parent), "--instances", "2", *options])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"tbe-serve: {options[0]}: expected a router, got {bundle.parent}")
    assert (bundle.parent / "config.pbtxt").read_bytes() == before
    done = CliRunner().invoke(app, ["configure", str(bundle.parent), "--no-hosts", "--no-on-shard-failure"])
    assert done.exit_code == 0, done.stderr


def shown(model: Path, *options: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The settings as a person sees them, and as JSON."""
    done = CliRunner().invoke(app, ["configure", str(model), *options])
    assert done.exit_code == 0, done.stderr
    text = dict(line.strip().split(None, 1) for line in done.stdout.splitlines() if not line.startswith("written"))
    return text, json.loads(CliRunner().invoke(app, ["configure", str(model), "--json"]).stdout)


def test_effective_defaults_are_shown(tmp_path: Path) -> None:
    """Of the settings that mean something for the model."""
    sharding = Sharding(ranks=2, ranks_per_host=1, types={"*": "row_wise"})
    router = export_hosts(tmp_path, collection(SUM), ExportConfig(sharding=sharding)).parent
    scores = export_model(dlrm(), tmp_path / "r", "scores", EXACT).parent
    text, as_json = shown(router)
    assert (text["shard-timeout-ms"], text["on-shard-failure"], text["score-threads"]) == (
        "300 (default)",
        "error (default)",
        "none",
    )
    assert (as_json["shard_timeout_ms"], as_json["on_shard_failure"], as_json["score_threads"]) == (
        300,
        {"*": "error"},
        None,
    )
    assert as_json["shard_timeout_ms"] == HostsConfig(addresses={}).timeout_s * 1000
    assert HostsConfig(addresses={}).on_shard_failure_of("any").value == "error"
    text, as_json = shown(
        router, "--shard-timeout-ms", "50", "--on-shard-failure", "zero", "--on-shard-failure", "item=error"
    )
    assert (text["shard-timeout-ms"], text["on-shard-failure"]) == ("50", "zero, item=error")
    assert (as_json["shard_timeout_ms"], as_json["on_shard_failure"]) == (50, {"*": "zero", "item": "error"})
    for host in ("movies-host-0", "scores"):
        text, as_json = shown(tmp_path / "r" / host)
        assert (text["shard-timeout-ms"], text["on-shard-failure"]) == ("none", "none")
        assert (as_json["shard_timeout_ms"], as_json["on_shard_failure"]) == (None, None)
    text, as_json = shown(scores)
    assert (text["score-threads"], as_json["score_threads"]) == ("1 (default)", 1)
    assert settings_of(read_config(scores)).score_threads is None
    assert shown(scores, "--score-threads", "3")[1]["score_threads"] == 3


def test_threads_of_scores_are_refused_where_there_are_none(tmp_path: Path) -> None:
    model = exported(tmp_path).parent
    before = (model / "config.pbtxt").read_bytes()
    done = CliRunner().invoke(app, ["configure", str(model), "--instances", "2", "--score-threads", "2"])
    assert done.exit_code == 1
    assert (
        done.stderr
        == f"tbe-serve: --score-threads: expected a model with scores, got {model}: export one with --scores\n"
    )
    assert (model / "config.pbtxt").read_bytes() == before
    assert CliRunner().invoke(app, ["configure", str(model), "--no-score-threads"]).exit_code == 0
