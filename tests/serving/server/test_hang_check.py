"""When a model counts as one that hangs, by a clock that tests turn."""

import time
from pathlib import Path
from typing import Any

import pytest

from export import ExportConfig, export_model
from serving.model.config_file import as_json, read_config
from serving.model.settings import ServingSettings
from serving.server import run_server
from serving.server.hang_check import HangCheck
from serving.triton.control import Control
from tests.support.models import collection
from tests.support.ranker import ranker
from tests.support.scored_models import two_tower
from tests.support.sequence_models import sequences
from tests.support.servers import FREE

NOWHERE = Control(address="127.0.0.1:1", key=None, timeout_s=0.01)


def hangs_after(monkeypatch: pytest.MonkeyPatch, settings: ServingSettings) -> int:
    """After how many seconds without progress a model hangs."""
    config: Any = {
        "input": [{"name": "values", "data_type": "TYPE_INT64"}],
        "output": [{"name": "embeddings"}],
        "parameters": {name: {"string_value": text} for name, text in settings.parameters.items()},
    }
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    check = HangCheck("m", 1, config)
    check.is_overdue(1, NOWHERE)
    while not check.is_overdue(1, NOWHERE):
        now += 1
    return int(now) - 1


def test_a_model_counts_as_hung_after_25_s_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hangs_after(monkeypatch, ServingSettings()) == 25
    assert hangs_after(monkeypatch, ServingSettings(shard_timeout_ms=30_000)) == 25  # it has no hosts


@pytest.mark.promise("A router with a lost host is unhealthy but live, and is not restarted as hung")
def test_a_router_with_a_long_shard_timeout_counts_as_hung_later(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {"0": "127.0.0.1:8001"}
    assert hangs_after(monkeypatch, ServingSettings(hosts=hosts, shard_timeout_ms=30_000)) == 85
    assert hangs_after(monkeypatch, ServingSettings(hosts=hosts)) == 25


MODELS: dict[str, Any] = {
    "scores": ranker,
    "two_tower": two_tower,
    "sequences": sequences,
    "weighted": lambda: collection(weighted=True),
}


@pytest.mark.long
def test_every_kind_of_model_answers_the_watcher(tmp_path: Path) -> None:
    """One that is refused counts as none: an idle model would be killed, again and again."""
    for name, make in MODELS.items():
        export_model(make().eval(), tmp_path / "r", name, ExportConfig(scores=name in ("scores", "two_tower")))
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        for name in MODELS:
            check = HangCheck(name, 1, as_json(read_config(tmp_path / "r" / name)))
            server.control(30).infer(name, 1, check.request)
