"""When a model counts as one that hangs, by a clock that tests turn."""

import time
from typing import Any

import pytest

from serving.model.settings import ServingSettings
from serving.server.canary import Canary
from serving.triton.control import Control

NOWHERE = Control(address="127.0.0.1:1", key=None, timeout_s=0.01)


def hangs_after(monkeypatch: pytest.MonkeyPatch, settings: ServingSettings) -> int:
    """After how many seconds without progress a model hangs."""
    config: Any = {
        "input": [{"name": "values", "data_type": "TYPE_INT64"}],
        "parameters": {name: {"string_value": text} for name, text in settings.parameters.items()},
    }
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    asked = Canary("m", 1, config)
    asked.is_overdue(1, NOWHERE)
    while not asked.is_overdue(1, NOWHERE):
        now += 1
    return int(now) - 1


def test_a_model_hangs_if_it_answers_neither_the_canary_nor_anybody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hangs_after(monkeypatch, ServingSettings()) == 25
    assert hangs_after(monkeypatch, ServingSettings(shard_timeout_ms=30_000)) == 25  # it has no hosts


def test_a_router_does_not_hang_because_it_waits_for_a_lost_host(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {"0": "127.0.0.1:8001"}
    assert hangs_after(monkeypatch, ServingSettings(hosts=hosts, shard_timeout_ms=30_000)) == 85
    assert hangs_after(monkeypatch, ServingSettings(hosts=hosts)) == 25
