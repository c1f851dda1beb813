"""A router's settings name the Services of its hosts, or there are no manifests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from export.kubernetes.addresses import check_addresses
from export.kubernetes.fleet import read_fleet
from serving.client.connection import Connection
from serving.errors import ConfigurationError
from serving.model.config_file import apply_settings, read_config, settings_of, write_config
from tests.export.kubernetes.conftest import OPTIONS


def change(model: Path, **settings: Any) -> None:
    config = read_config(model)
    apply_settings(config, replace(settings_of(config), **settings))
    write_config(model, config)


def check(model: Path, *, insecure: bool = False) -> None:
    check_addresses(read_fleet(model / "1", OPTIONS), None, insecure=insecure)


def test_the_printed_command_sets_the_expected_addresses(configured: Path) -> None:
    check(configured)
    addresses = settings_of(read_config(configured)).hosts
    assert addresses == {"0": "dns:///movies-v2-host-0:8001", "1": "dns:///movies-v2-host-1:8001"}
    for address in addresses.values():
        assert Connection(addresses=[address]).has_other_servers


@pytest.mark.parametrize(
    "address", ["movies-v2-host-0:8001", "dns:///movies-v2-host-0.prod.svc.cluster.local:8001"], ids=str
)
def test_other_forms_of_the_service_name_are_accepted(configured: Path, address: str) -> None:
    change(configured, hosts={"0": address, "1": "dns:///movies-v2-host-1:8001"})
    check(configured)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hosts": None}, "expected host 0 at dns:///movies-v2-host-0:8001, got None"),
        (
            {"hosts": {"0": "dns:///movies-v2-host-0:8001"}},
            "expected host 1 at dns:///movies-v2-host-1:8001, got None",
        ),
        ({"hosts": {"0": "movies-v2-host-1:8001", "1": "movies-v2-host-0:8001"}}, "expected host 0 at"),
        ({"hosts": {"0": "movies-v2-host-0:9001", "1": "movies-v2-host-1:8001"}}, "expected host 0 at"),
        (
            {"hosts": {"0": "movies-v2-host-0:8001", "1": "movies-v2-host-1:8001", "2": "a:1"}},
            "expected no address of host 2, which the plan does not have",
        ),
        ({"hosts_server_name": None}, "expected hosts_server_name movies-v2-hosts, got None"),
        ({"hosts_private_key": "/k"}, "expected hosts_private_key /hosts-tls/tls.key, got /k"),
    ],
    ids=str,
)
def test_contradicting_settings_are_refused_with_the_command_to_run(
    configured: Path, settings: dict[str, Any], said: str
) -> None:
    change(configured, **settings)
    with pytest.raises(ConfigurationError) as refused:
        check(configured)
    assert said in str(refused.value)
    assert f"Run this first: tbe-serve configure {configured} " in str(refused.value)


def test_without_tls_the_settings_name_no_certificates(configured: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected hosts_root_certificates None") as refused:
        check(configured, insecure=True)
    assert "--no-hosts-private-key" in str(refused.value)


def test_signed_settings_are_signed_again(configured: Path) -> None:
    (configured / "config.sig").write_bytes(b"")
    change(configured, hosts=None)
    with pytest.raises(ConfigurationError, match=r" --signing-key KEY\.pem$"):
        check(configured)


def test_a_model_without_hosts_needs_no_host_addresses(repository: Path) -> None:
    check(repository / "m")
