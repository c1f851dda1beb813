"""What settings say of hosts is how they are asked: mutual TLS and metadata, with real servers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from export import ExportConfig, Sharding
from serving.bundle.load import open_bundle
from serving.client import LookupClient, Tls
from serving.engine import Engine
from serving.errors import HostUnavailable
from serving.router.hosts_config import HostsConfig
from tests.support.certificates import write_certificates
from tests.support.hosts import MODEL, configure, export_hosts, in_one_process, only
from tests.support.models import SUM, collection
from tests.support.servers import running

CONFIG = ExportConfig(sharding=Sharding(ranks=2, ranks_per_host=1, types={"a": "row_wise", "b": "data_parallel"}))
SECRET = "a-secret-of-the-hosts"
METADATA = {"triton-grpc-protocol-hosts-key": SECRET}
ASKED = {"x": [[0, 49], [], [25]], "z": [[1], [2], []]}


@dataclass(frozen=True)
class Closed:
    """Hosts that take calls from whoever has a certificate and knows a secret.

    Attributes:
        bundle: the router's.
        address: of both hosts.
        pems: root.pem, and those of a router.
        one: the same plan in one process.
    """

    bundle: Path
    address: str
    pems: Path
    one: Engine

    @property
    def hosts(self) -> HostsConfig:
        tls = Tls(
            root_certificates=self.pems / "root.pem",
            certificate_chain=self.pems / "router.pem",
            private_key=self.pems / "router.key",
        )
        return HostsConfig(addresses=dict.fromkeys((0, 1), self.address), timeout_s=20, tls=tls, metadata=METADATA)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    folder = tmp_path_factory.mktemp("closed")
    pems = write_certificates(tmp_path_factory.mktemp("pems"), host="127.0.0.1", router="router.test")
    bundle = export_hosts(folder, collection(SUM), CONFIG)
    one = Engine.open(in_one_process(folder, collection(SUM), CONFIG, bundle))
    models = [host.model for host in open_bundle(bundle).manifest.hosts]
    tls = ("--tls-cert", str(pems / "host.pem"), "--tls-key", str(pems / "host.key"))
    with running(
        only(folder / "r", models, folder / "hosts"),
        *(*tls, "--tls-client-ca", str(pems / "root.pem")),
        *("--", f"--grpc-restricted-protocol=inference:hosts-key={SECRET}"),
    ) as server:
        yield Closed(bundle, server.grpc, pems, one)


@pytest.mark.promise("With mutual TLS only routers reach hosts")
def test_a_router_reaches_hosts_with_certificates_and_metadata(closed: Closed, tmp_path: Path) -> None:
    router_repository = only(closed.bundle.parents[1], [MODEL], tmp_path / "router")
    metadata = tmp_path / "metadata.json"
    metadata.write_text(json.dumps(METADATA))
    configure(
        router_repository / MODEL,
        {host: [closed.address] for host in (0, 1)},
        *("--hosts-root-certificates", str(closed.pems / "root.pem")),
        *("--hosts-certificate-chain", str(closed.pems / "router.pem")),
        *("--hosts-private-key", str(closed.pems / "router.key")),
        *("--hosts-metadata", str(metadata)),
    )
    with running(router_repository) as router, LookupClient(router.grpc, MODEL, 30) as client:
        answer = client.lookup(ASKED)
    for name, rows in closed.one.lookup(ASKED).items():
        np.testing.assert_array_equal(answer[name], rows)


@pytest.mark.promise("With mutual TLS only routers reach hosts")
@pytest.mark.parametrize("lacking", ["certificate", "root", "tls", "metadata"])
def test_hosts_refuse_clients_that_lack_any_credential(closed: Closed, lacking: str) -> None:
    tls = closed.hosts.tls
    assert tls is not None
    without = {
        "certificate": replace(closed.hosts, tls=replace(tls, certificate_chain=None, private_key=None)),
        "root": replace(closed.hosts, tls=replace(tls, root_certificates=None)),
        "tls": replace(closed.hosts, tls=None),
        "metadata": replace(closed.hosts, metadata={}),
    }
    with pytest.raises(HostUnavailable) as refused:
        Engine.open(closed.bundle, replace(without[lacking], timeout_s=1))
    for number in (0, 1):
        assert f"host {number} ({MODEL}-host-{number} version 1 at {closed.address}): " in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.promise("A router skips a host that serves another bundle under the same name and version")
def test_a_host_with_another_bundle_is_not_asked(closed: Closed, tmp_path: Path) -> None:
    """The same plan, model and version, with other rows."""
    other = export_hosts(tmp_path, collection(SUM, seed=1), CONFIG)
    with pytest.raises(HostUnavailable, match=r"host 0 .*: expected the bundle with SHA-256 \w{64} of its manifest"):
        Engine.open(other, closed.hosts)
