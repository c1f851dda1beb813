"""Hosts behind mutual TLS, sums in FP16, and metadata from a file that changes. Real servers."""

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from export import OutputDtype
from serving.bundle.load import open_bundle
from serving.client import LookupClient, Tls
from serving.client.metadata import MetadataFile
from serving.engine import Engine
from serving.errors import ConfigurationError, HostUnavailable, ServingError
from serving.router.hosts_config import HostsConfig
from tests.export.test_hosts import CONFIG, mixed
from tests.support.certificates import write_certificates
from tests.support.hosts import MODEL, configure, export_hosts, in_one_process, only
from tests.support.models import MIXED, random_bags
from tests.support.server_waits import wait_until
from tests.support.servers import Running, running, tritonservers_of


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_certificates(tmp_path_factory.mktemp("pems"), server="localhost", client="router")


@pytest.fixture
def hosts(pems: Path, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A router's bundle with sums in FP16, and the address of its hosts, which want certificates."""
    router = export_hosts(tmp_path, mixed(), replace(CONFIG, sums_dtype=OutputDtype.FP16))
    models = [host.model for host in open_bundle(router).manifest.hosts]
    tls = ("--tls-cert", str(pems / "server.pem"), "--tls-key", str(pems / "server.key"))
    with running(
        only(router.parent.parent, models, tmp_path / "hosts"), *tls, "--tls-client-ca", str(pems / "root.pem")
    ) as server:
        yield router, server.grpc.replace("127.0.0.1", "localhost")


@pytest.mark.long
def test_a_router_presents_its_certificate_and_adds_sums_in_fp16(
    hosts: tuple[Path, str], pems: Path, tmp_path: Path
) -> None:
    bundle, address = hosts
    bags = random_bags(np.random.default_rng(0), MIXED, 20)
    expected = Engine.open(in_one_process(tmp_path, mixed(), CONFIG, bundle)).lookup(bags)
    addresses = {host: [address] for host in range(3)}
    tls = Tls(
        root_certificates=pems / "root.pem",
        certificate_chain=pems / "client.pem",
        private_key=pems / "client.key",
    )
    router_repository = only(bundle.parent.parent, [MODEL], tmp_path / "router")
    named = {
        "--hosts-root-certificates": tls.root_certificates,
        "--hosts-certificate-chain": tls.certificate_chain,
        "--hosts-private-key": tls.private_key,
    }
    options = [part for option, path in named.items() for part in (option, str(path))]
    configure(router_repository / MODEL, addresses, "--shard-timeout-ms", "10000", *options)
    with running(router_repository) as router, LookupClient(router.grpc, MODEL, 60) as client:
        routed = client.lookup(bags)
    with Engine.open(bundle, HostsConfig(addresses=addresses, timeout_s=10, tls=tls)) as engine:
        alone = engine.lookup(bags)
    for name, rows in expected.items():
        np.testing.assert_allclose(routed[name], rows, rtol=2e-3, atol=2e-2)
        np.testing.assert_array_equal(routed[name], alone[name])
    assert any((routed[name] != rows).any() for name, rows in expected.items()), "FP16 moves some sum"
    for strangers in (None, Tls(root_certificates=pems / "root.pem")):
        with pytest.raises(HostUnavailable):
            Engine.open(bundle, HostsConfig(addresses=addresses, timeout_s=5, tls=strangers))


@pytest.mark.long
def test_a_root_certificate_is_replaced_without_a_failed_call(tmp_path: Path) -> None:
    """As docs/kubernetes.md says: both are trusted, then certificates are of the new one, then that alone is trusted."""
    old, new = (write_certificates(tmp_path / name, server="localhost", client="router") for name in ("old", "new"))
    shared = Path(shutil.copytree(old, tmp_path / "shared"))
    both = (old / "root.pem").read_bytes() + (new / "root.pem").read_bytes()
    (tmp_path / "both.pem").write_bytes(both)
    tls = ("--tls-cert", str(shared / "server.pem"), "--tls-key", str(shared / "server.key"))
    age = ("--", "--grpc-max-connection-age=1500")
    bundle = export_hosts(tmp_path, mixed(), CONFIG)
    models = [host.model for host in open_bundle(bundle).manifest.hosts]
    repository = bundle.parent.parent
    failed: list[Exception] = []
    ended = threading.Event()
    with (
        running(
            only(repository, models, tmp_path / "hosts"), *tls, "--tls-client-ca", str(shared / "root.pem"), *age
        ) as hosts,
        ThreadPoolExecutor(1) as pool,
    ):
        router_repository = only(repository, [MODEL], tmp_path / "router")
        named = ("--hosts-root-certificates", "root.pem", "--hosts-certificate-chain", "client.pem", "--hosts-private-key", "client.key")  # fmt: skip
        options = [option if option.startswith("--") else str(shared / option) for option in named]
        address = hosts.grpc.replace("127.0.0.1", "localhost")
        configure(
            router_repository / MODEL, {host: [address] for host in range(3)}, "--shard-timeout-ms", "10000", *options
        )
        with running(router_repository, *tls, *age) as router:
            url = router.grpc.replace("127.0.0.1", "localhost")

            def ask() -> int:
                answered = 0
                with LookupClient(url, MODEL, 60, tls=Tls(root_certificates=tmp_path / "both.pem")) as client:
                    expected = client.lookup(bags)
                    while not ended.wait(0.02):  # the servers have the same cores
                        try:
                            answer = client.lookup(bags)
                            assert all((answer[name] == expected[name]).all() for name in expected)
                            answered += 1
                        except (ServingError, AssertionError) as error:
                            failed.append(error)
                return answered

            bags = random_bags(np.random.default_rng(0), MIXED, 20)
            asking = pool.submit(ask)
            try:
                for step in ("both", "certificates", "new alone"):
                    before = {server.triton.pid for server in (hosts, router)}
                    if step == "certificates":
                        for name in ("server.pem", "server.key", "client.pem", "client.key"):
                            shutil.copyfile(new / name, shared / name)
                    else:
                        (shared / "root.pem").write_bytes(both if step == "both" else (new / "root.pem").read_bytes())
                    for server in (hosts, router):
                        wait_until(partial(_is_another, server, before), f"{step}: {server.grpc} has not gone over")
            finally:
                ended.set()
            assert asking.result() > 100
            strangers = Tls(
                root_certificates=new / "root.pem",
                certificate_chain=old / "client.pem",
                private_key=old / "client.key",
            )
            with pytest.raises(ServingError), LookupClient(address, models[0], 5, tls=strangers) as client:
                client.lookup({})
    assert failed == []


def _is_another(server: Running, before: set[int]) -> bool:
    """Whether a process of tritonserver that was not there `before` is the only one."""
    pids = [process.pid for process in tritonservers_of(server.process)]
    return len(pids) == 1 and pids[0] not in before


def test_metadata_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "token.json"
    path.write_text('{"authorization": "Bearer 1"}')
    metadata = MetadataFile(path)
    assert metadata() == {"authorization": "Bearer 1"}
    new = tmp_path / "new.json"
    new.write_text('{"authorization": "Bearer 2"}')
    os.replace(new, path)
    assert metadata() == {"authorization": "Bearer 2"}
    for wrong in ("half of", '{"authorization": "é"}'):
        path.write_text(wrong)
        assert metadata() == {"authorization": "Bearer 2"}, "what cannot be used leaves what it was"
    path.unlink()
    assert metadata() == {"authorization": "Bearer 2"}


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a b": "c"}', '{"a": "é"}'])
def test_metadata_that_cannot_be_sent_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(ConfigurationError):
        MetadataFile(tmp_path / "m.json")
