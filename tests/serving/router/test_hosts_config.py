"""Where hosts are is refused by name where it is given, if it has another type."""

from typing import Any

import pytest

from serving.errors import ConfigurationError
from serving.router.hosts_config import HostsConfig, OnShardFailure
from serving.terminal.options import named


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"addresses": {0: 5}}, "addresses 0: expected ", id="number"),
        pytest.param({"addresses": {0: None}}, "addresses 0: expected ", id="none"),
        pytest.param({"addresses": {True: "a:1"}}, "addresses True: expected int", id="bool"),
        pytest.param({"addresses": {"0": "a:1"}}, "addresses '0': expected int", id="text for a number"),
        pytest.param({"addresses": ["a:1"]}, "addresses: expected Mapping", id="list"),
        pytest.param({"addresses": "a:1"}, "addresses: expected Mapping", id="text"),
        pytest.param(
            {"addresses": {0: "a:1"}, "on_shard_failure": [1]},
            "on_shard_failure: expected Mapping",
            id="list of tables",
        ),
        pytest.param(
            {"addresses": {0: "a:1"}, "on_shard_failure": OnShardFailure.ZERO},
            "on_shard_failure: expected Mapping",
            id="for all",
        ),
        pytest.param(
            {"addresses": {0: "a:1"}, "on_shard_failure": {"*": "zero"}},
            "on_shard_failure '\\*': expected OnShardFailure",
            id="word",
        ),
    ],
)
def test_hosts_of_another_type_are_refused_by_name(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HostsConfig(**arguments)


def test_a_host_is_named_once() -> None:
    assert named("--host", ["0=a:1", "1=b:1"]) == {"0": "a:1", "1": "b:1"}
    with pytest.raises(ConfigurationError, match="--host: expected '0' once, got it twice"):
        named("--host", ["0=a:1", "0=b:1"])
