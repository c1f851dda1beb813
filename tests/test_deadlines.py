"""No test lets a default deadline decide."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from export import ExportConfig, Sharding
from serving.__main__ import app
from serving.client import AsyncLookupClient, LookupClient
from serving.client.connection import Connection
from serving.client.server_info import query_servers
from serving.engine import Engine
from serving.model.settings import ServingSettings
from serving.router.hosts_config import hosts_of
from tests.support.deadlines import CALLING, PATIENT_S
from tests.support.hosts import MODEL, export_hosts
from tests.support.models import SUM, collection
from tests.support.servers import running, tbe_serve

TESTS = Path(__file__).parent
NOWHERE = "127.0.0.1:1"
LETS = "a test lets a default deadline decide: say how long"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = ExportConfig(sharding=Sharding(ranks=1, types={"*": "table_wise"}))
    return export_hosts(tmp_path_factory.mktemp("hosts"), collection(SUM), config)


async def by_asyncio() -> Any:
    return await AsyncLookupClient(NOWHERE, "m").info()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda _: LookupClient(NOWHERE, "m").info(), id="LookupClient"),
        pytest.param(lambda _: asyncio.run(by_asyncio()), id="AsyncLookupClient"),
        pytest.param(lambda _: query_servers(Connection(addresses=[NOWHERE])), id="Connection"),
        pytest.param(lambda router: Engine.open(router, {0: NOWHERE}), id="Engine"),
        pytest.param(
            lambda router: Engine.open(router, hosts_of(ServingSettings(hosts={"0": NOWHERE}))), id="settings"
        ),
    ],
)
def test_a_call_with_a_default_deadline_fails(router: Path, call: Callable[[Path], Any]) -> None:
    with pytest.raises(AssertionError, match=LETS):
        call(router)


def test_a_router_with_the_default_deadline_is_not_served(router: Path) -> None:
    assert tbe_serve("configure", str(router.parent), "--host", f"0={NOWHERE}").returncode == 0
    with pytest.raises(AssertionError, match=f"{MODEL}/config.pbtxt: {LETS}"), running(router.parents[1]):
        pass


def test_commands_with_a_short_deadline_are_given_another() -> None:
    defaults = {
        name: param.default
        for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
        for param in command.params
        if param.name == "timeout_s"
    }
    assert {name for name, default in defaults.items() if default < PATIENT_S} == set(CALLING)


def test_no_test_has_less_time_than_all_have() -> None:
    """pytest's timeout is for what hangs."""
    marks = [
        match for path in TESTS.rglob("*.py") for match in re.findall(r"mark\.timeout\((.*?)\)", path.read_text())
    ]
    assert all(int(mark) > 600 for mark in marks), marks
