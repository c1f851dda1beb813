"""Servers that have the hosts of a plan, a relay before each that fails as told, and a router."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from export import ExportConfig, Sharding
from serving.client import LookupClient, Retries
from serving.engine import Engine
from serving.errors import ServerUnavailable, ServingError
from serving.model.config_file import read_config, write_config
from serving.router.hosts_config import HostsConfig, OnShardFailure
from tests.support.hosts import MODEL, configure, export_hosts, in_one_process, only
from tests.support.models import Spec, collection, random_bags, table_of
from tests.support.relay import Relay
from tests.support.servers import Running, replace_model_py, running, tbe_serve

# `near` is on the router. Tables of one word are on one host, `cut` and `shade` on both.
SPECS = (
    Spec("near", 20, 8, "SUM", ("n",)),
    Spec("left", 101, 16, "SUM", ("l",)),
    Spec("right", 103, 16, "MEAN", ("r",)),
    Spec("cut", 97, 8, "MEAN", ("c",)),
    Spec("blank", 99, 12, "SUM", ("b",)),
    Spec("shade", 95, 8, "MEAN", ("s",)),
)
CONFIG = ExportConfig(
    sharding=Sharding(
        ranks=2,
        ranks_per_host=1,
        types={"*": "table_wise", "near": "data_parallel", "cut": "row_wise", "shade": "row_wise"},
    )
)
# Tables that have zeros where a host is lost. `blank` is on one host, `shade` is a mean over both.
ZEROED = ("blank", "shade")
# A call takes milliseconds: this leaves time to a machine that is busy with other things.
TIMEOUT_S = 2.0
PATIENCE_S = 120.0
# A router that reaches every host at two servers.
PAIRS = "pairs"
EVERY = [spec.features[0] for spec in SPECS]
Ask = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Version:
    """A version of the router's model, and the same plan in one process."""

    bundle: Path
    one: Engine


def export_version(folder: Path, seed: int) -> Version:
    """Both, with rows of their own; the router's in `folder`/r."""
    module = collection(SPECS, seed=seed)
    bundle = export_hosts(folder, module, CONFIG)
    alone = folder / f"one-{seed}"
    alone.mkdir()
    return Version(bundle, Engine.open(in_one_process(alone, module, CONFIG, bundle)))


@dataclass(frozen=True)
class Faulty:
    """What fails, and what it should answer.

    Attributes:
        router: serves `movies`, which has a server for each host, and PAIRS.
        servers: of the hosts. `a` has every version of both. `b` has version 1 of both. `c` has no version 1 of one
            host, and another bundle as version 1 of the other.
        repositories: of the servers.
        relays: before each server. `movies` reaches the host `lost` through `b` alone, and the other through `a`.
        versions: by number.
        lost: the number of a host, the one with `blank`.
    """

    router: Running
    servers: Mapping[str, Running]
    repositories: Mapping[str, Path]
    relays: Mapping[str, Relay]
    versions: Mapping[int, Version]
    lost: int

    @property
    def addresses(self) -> dict[int, list[str]]:
        """As `movies` has them."""
        return {host: [self.relays["b" if host == self.lost else "a"].address] for host in (0, 1)}

    def addresses_of(self, *relays: str) -> dict[int, list[str]]:
        """Both hosts at the same servers."""
        return {host: [self.relays[relay].address for relay in relays] for host in (0, 1)}

    def tables_of(self, host: int) -> set[str]:
        """The tables that have rows on a host."""
        return {name for name, hosts in open_plan(self.versions[1]).items() if host in hosts}

    @property
    def unaffected(self) -> list[str]:
        """The features that need nothing of the host `lost`."""
        return [spec.features[0] for spec in SPECS if spec.name not in self.tables_of(self.lost)]

    @property
    def refused(self) -> list[str]:
        """The features that cannot be answered without the host `lost`."""
        return [spec.features[0] for spec in SPECS if spec.name in self.tables_of(self.lost) - {*ZEROED}]


def open_plan(version: Version) -> dict[str, set[int]]:
    """The hosts of each table."""
    plan = version.one.bundle.manifest.plan
    return {name: {plan.ranks[shard.rank].host for shard in shards} for name, shards in plan.shards_by_table.items()}


# A version that waits for its hosts for 8 s while it is loaded, not for 30 s.
IMPATIENT = """
from serving.backend import TritonPythonModel, triton
triton._HOSTS_PATIENCE_S = 8.0
"""


@contextmanager
def faulty(folder: Path) -> Iterator[Faulty]:
    """Export two versions, and serve them."""
    versions = {number: export_version(folder, number) for number in (1, 2)}
    other = folder / "other"
    other.mkdir()
    export_hosts(other, collection(SPECS, seed=3), CONFIG)
    hosts = [f"{MODEL}-host-{number}" for number in (0, 1)]
    everything = [only(folder / "r", hosts, folder / name) for name in ("a", "b", "c")]
    for model in everything[0].iterdir():
        serve_all_versions(model)
    for model in everything[1].iterdir():
        shutil.rmtree(model / "2")
    shutil.rmtree(everything[2] / hosts[0])
    shutil.copytree(other / "r" / hosts[0], everything[2] / hosts[0])
    shutil.rmtree(everything[2] / hosts[1] / "1")
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(everything)) as pool:
            started = pool.map(lambda path: stack.enter_context(running(path)), everything)
            servers = {path.name: server for path, server in zip(everything, started, strict=True)}
        relays = {name: stack.enter_context(Relay(server.grpc)) for name, server in servers.items()}
        (lost,) = open_plan(versions[1])["blank"]
        addresses = {name: relay.address for name, relay in relays.items()}
        settings = ["--version", "1", "--shard-timeout-ms", str(int(1000 * TIMEOUT_S))]
        settings += [part for table in ZEROED for part in ("--on-shard-failure", f"{table}=zero")]
        routers = folder / "router"
        _add_router(
            routers,
            versions[1].bundle,
            MODEL,
            {lost: [addresses["b"]], 1 - lost: [addresses["a"]]},
            *settings,
            "--instances",
            "2",
        )
        _add_router(
            routers, versions[1].bundle, PAIRS, {host: [addresses["a"], addresses["b"]] for host in (0, 1)}, *settings
        )
        for version in (1, 2):
            replace_model_py(routers / PAIRS / str(version), IMPATIENT)
        router = stack.enter_context(running(routers))
        yield Faulty(router, servers, {path.name: path for path in everything}, relays, versions, lost)


def refused(served: Faulty) -> AbstractContextManager[None]:
    """Connections are reset, and nobody listens."""
    return served.relays["b"].refused()


def silent(served: Faulty) -> AbstractContextManager[None]:
    """Nothing passes, and nobody is told."""
    return served.relays["b"].silent()


@contextmanager
def stopped(served: Faulty) -> Iterator[None]:
    """SIGSTOP. The kernel goes on taking bytes."""
    server = served.servers["b"].triton
    server.suspend()
    try:
        yield
    finally:
        server.resume()


def serve_all_versions(model: Path) -> None:
    """Have a server load all versions of a model, side by side."""
    config = read_config(model)
    config.version_policy.all.SetInParent()
    write_config(model, config)


def _add_router(repository: Path, router: Path, name: str, addresses: dict[int, list[str]], *settings: str) -> None:
    """The model of a router under a name of its own, with all its versions."""
    shutil.copytree(router.parent, repository / name)
    config = read_config(repository / name)
    config.name = name
    write_config(repository / name, config)
    configure(repository / name, addresses, *settings)


@contextmanager
def by_router(address: str, model: str = MODEL) -> Iterator[Ask]:
    """Ask a router, once each."""
    with LookupClient(address, model, 20, retries=Retries(attempts=1)) as client:
        yield client.lookup


@contextmanager
def by_engine(bundle: Path, addresses: Mapping[int, Sequence[str]]) -> Iterator[Ask]:
    """Ask the hosts from this process."""
    with Engine.open(bundle, hosts(addresses)) as engine:
        yield engine.lookup


def hosts(addresses: Mapping[int, Sequence[str]]) -> HostsConfig:
    """As the router's settings say."""
    return HostsConfig(
        addresses=addresses, timeout_s=TIMEOUT_S, on_shard_failure=dict.fromkeys(ZEROED, OnShardFailure.ZERO)
    )


def same(answer: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether answers agree, bit for bit."""
    return list(answer) == list(expected) and all(
        np.array_equal(answer[name].view(np.uint32), rows.view(np.uint32)) for name, rows in expected.items()
    )


def bags(features: Sequence[str], seed: int, samples: int = 3) -> dict[str, Any]:
    """A request that needs every host of the tables that it asks for."""
    values_by_feature = random_bags(np.random.default_rng(seed), SPECS, samples, features)
    tables = table_of(SPECS)
    for name, value in values_by_feature.items():
        value[0] = [0, tables[name].rows - 1]
    return values_by_feature


def refusal(ask: Ask, features: Mapping[str, Any]) -> ServingError:
    """The error that a request gets."""
    try:
        answer = ask(features)
    except ServingError as error:
        return error
    raise AssertionError(f"answered: {answer}")


def outcome(ask: Ask, features: Mapping[str, Any]) -> Any:
    """The answer to a request, or the ServerUnavailable that it gets."""
    try:
        return ask(features)
    except ServerUnavailable as error:
        return error


def until_right_in_a_row(ask: Ask, request: Mapping[str, Any], expected: Mapping[str, Any], times: int) -> int:
    """How many requests fail until so many in a row are answered, and right."""
    deadline = time.monotonic() + PATIENCE_S
    failed = in_a_row = 0
    while in_a_row < times:
        assert time.monotonic() < deadline, f"{failed} requests failed within {PATIENCE_S:g} s, the last ones too"
        try:
            assert same(ask(request), expected)
            in_a_row += 1
        except ServingError:
            failed, in_a_row = failed + 1, 0
    return failed


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.1)


def load(server: Running, model: str, version: int) -> Any:
    """`tbe-serve load` on a server."""
    return tbe_serve("load", model, "--version", str(version), "--url", server.grpc)
