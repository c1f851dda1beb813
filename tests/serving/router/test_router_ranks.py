"""Ranks on other hosts answer what the same plan answers in one process, bit for bit. Real servers, real gRPC."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from export import ExportConfig, IdPolicy, OutputDtype, Sharding, WeightDtype
from serving.bundle.load import open_bundle
from serving.bundle.manifest import PROGRAM
from serving.bundle.plan import ShardingType, path_of
from serving.client import LookupClient
from serving.engine import Engine
from serving.errors import ConfigurationError, HostUnavailable, InvalidRequest
from serving.lookup.program import ProgramForm
from serving.router.hosts_config import HostsConfig
from serving.router.replicas import replicas_of
from tests.support.fake_hosts import fake_hosts
from tests.support.hosts import MODEL, configure, export_hosts, in_one_process, only, patient
from tests.support.long_cases import one_in
from tests.support.models import Spec, collection, random_bags
from tests.support.no_torchscript import NoTorchScript, remove_torchscript
from tests.support.servers import at_once, metric, running, scrape, tbe_serve

# Every sharding type, pooling and dtype; rows that no number of hosts divides. A model cannot have all of them: the
# planner of a test would take minutes.
EVERY = list(product(ShardingType, ("SUM", "MEAN"), WeightDtype))
SPECS = tuple(
    Spec(f"{kind.value}_{pooling}_{dtype.value}", 97 + number, 8 * (1 + number % 5), pooling, (f"x{number}",))
    for number, (kind, pooling, dtype) in enumerate(EVERY)
)
SHARED = Spec("shared", 53, 16, "MEAN", ("first", "second"))


def config_of(output_dtype: OutputDtype = OutputDtype.FP32) -> ExportConfig:
    return ExportConfig(
        dtype={spec.name: dtype for spec, (_, _, dtype) in zip(SPECS, EVERY, strict=True)},
        id_policy={"*": IdPolicy.ZERO, "*_SUM_*": IdPolicy.MODULO},
        output_dtype=output_dtype,
        sharding=Sharding(
            ranks=8,
            ranks_per_host=2,
            types={spec.name: kind.value for spec, (kind, _, _) in zip(SPECS, EVERY, strict=True)}
            | {"shared": "row_wise"},
        ),
    )


@dataclass(frozen=True)
class Served:
    """A router with its hosts, and the same plan in one process."""

    bundle: Path
    addresses: dict[int, str]
    router: str
    metrics: Any
    one: Engine
    weighted: bool


@pytest.fixture(scope="module", params=one_in(2, [True, False]), ids=["weighted", "unweighted"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("hosts")
    weighted = bool(request.param)
    module = collection((*SPECS, SHARED), weighted=weighted)
    config = config_of(OutputDtype.FP16 if weighted else OutputDtype.FP32)
    router = export_hosts(folder, module, config)
    one = Engine.open(in_one_process(folder, module, config, router))
    hosts = open_bundle(router).manifest.hosts
    assert [host.host for host in hosts] == [0, 1, 2, 3]
    # One server has all hosts, as far as answers go: each is a model of its own.
    with running(only(folder / "r", [host.model for host in hosts], folder / "hosts")) as server:
        addresses = {host.host: server.grpc for host in hosts}
        router_repository = only(folder / "r", [MODEL], folder / "router")
        configure(router_repository / MODEL, {host: [address] for host, address in addresses.items()})
        with running(router_repository) as routing:
            yield Served(router, addresses, routing.grpc, routing, one, weighted)


def requests(served: Served, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Of all features and of some, in any order; with ids outside, empty bags, and without samples."""
    random = np.random.default_rng(seed)
    names = [feature for spec in (*SPECS, SHARED) for feature in spec.features]
    shuffled = random.permutation(names).tolist()
    for features, samples, longest in (
        (None, 3, 6),
        (shuffled, 1, 3),
        (shuffled[:7], 40, 20),
        (["x0"], 1, 1),
        (["second", "first"], 2, 50),
        (None, 2, 0),
        (shuffled[:3], 0, 5),
    ):
        bags = random_bags(random, (*SPECS, SHARED), samples, features, longest)
        first = next(iter(bags.values()))
        if first and first[0]:
            first[0][0] = 2**40  # outside: policy zero or modulo
        yield {name: _arrays(random, bag, served.weighted) for name, bag in bags.items()}


def _arrays(random: np.random.Generator, bags: list[list[int]], weighted: bool) -> tuple[Any, ...]:
    values = np.array([id_ for bag in bags for id_ in bag], np.int64)
    lengths = np.array([len(bag) for bag in bags], np.int32)
    return (values, lengths, random.normal(size=values.size).astype("f4")) if weighted else (values, lengths)


def one(id_: int, weighted: bool) -> Any:
    """A bag of one id."""
    return _arrays(np.random.default_rng(0), [[id_]], weighted)


def assert_same(answer: Any, expected: Any) -> None:
    assert list(answer) == list(expected)
    for name, rows in expected.items():
        bits = np.uint32 if rows.dtype == np.float32 else np.uint16
        np.testing.assert_array_equal(answer[name].view(bits), rows.view(bits), err_msg=name)


def test_a_router_answers_as_one_process_bit_for_bit(served: Served) -> None:
    with LookupClient(served.router, MODEL, 60) as client:
        for request in requests(served):
            assert_same(client.lookup(request), served.one.lookup(request))


def test_an_engine_that_calls_hosts_answers_like_one_process(served: Served) -> None:
    with Engine.open(served.bundle, patient(served.addresses)) as engine:
        for seed in range(3):
            for request in requests(served, seed):
                assert_same(engine.lookup(request), served.one.lookup(request))


def test_concurrent_requests_are_merged_into_one_call_per_host(served: Served) -> None:
    many = [request for seed in range(8) for request in requests(served, seed)]
    before = metric(served.metrics, "tbe_calls_total"), metric(served.metrics, "tbe_host_call_seconds_count")
    with LookupClient(served.router, MODEL, 120) as client:
        answers = at_once([partial(client.lookup, request) for request in many])
    for request, answer in zip(many, answers, strict=True):
        assert_same(answer, served.one.lookup(request))
    calls = metric(served.metrics, "tbe_calls_total") - before[0]
    to_hosts = metric(served.metrics, "tbe_host_call_seconds_count") - before[1]
    assert calls < len(many)
    assert to_hosts <= 4 * calls


def test_requests_that_need_no_host_call_none(served: Served) -> None:
    (table,) = (spec for spec in SPECS if spec.name == "data_parallel_SUM_FP32")
    before = metric(served.metrics, "tbe_host_call_seconds_count")
    row = _arrays(np.random.default_rng(0), [[1, 2]], served.weighted)
    empty = _arrays(np.random.default_rng(0), [[]], served.weighted)
    with LookupClient(served.router, MODEL, 20) as client:
        client.lookup({table.features[0]: row})
        client.lookup({spec.features[0]: empty for spec in SPECS})
    assert metric(served.metrics, "tbe_host_call_seconds_count") == before


@pytest.mark.long
def test_bytes_are_those_of_local_rows_and_sums(served: Served) -> None:
    """INT32 rows and lengths out, FP32 weights where there are any, and FP32 sums in."""
    (spec,) = (candidate for candidate in SPECS if candidate.name == "table_wise_SUM_FP32")
    manifest = open_bundle(served.bundle).manifest
    (shard,) = manifest.plan.shards_by_table[spec.name]
    host = str(manifest.plan.ranks[shard.rank].host)
    counted = []
    for samples in (100, 200):
        before = _bytes(served, host)
        with LookupClient(served.router, MODEL, 20) as client:
            client.lookup({spec.features[0]: _arrays(np.random.default_rng(0), [[1]] * samples, served.weighted)})
        counted.append(_bytes(served, host) - before)
    out, into = counted[1] - counted[0]
    assert out == pytest.approx(100 * (12 if served.weighted else 8), abs=8)  # and the sizes themselves
    assert into == 100 * 4 * spec.dim


def _bytes(served: Served, host: str) -> Any:
    """Bytes to and from a host so far."""
    return np.array(
        [metric(served.metrics, "tbe_host_bytes_total", host=host, direction=way) for way in ("out", "in")]
    )


def test_a_host_s_bundle_is_served_like_any_other(served: Served) -> None:
    manifest = open_bundle(served.bundle).manifest
    with LookupClient(served.addresses[2], manifest.hosts[2].model, 20) as client:
        info = client.info()
        assert info.ids_dtype == np.int32
        name = next(iter(info.keys))
        weighted = name in info.weighted
        assert client.lookup({name: one(0, weighted)})[name].shape == (1, info.dims[name])
        with pytest.raises(InvalidRequest, match=r"expected an id in \[0, "):
            client.lookup({name: one(10_000, weighted)})
        with pytest.raises(InvalidRequest, match=r"values: expected ids of int32"):
            client.lookup({name: one(2**40, weighted)})


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ({}, r"got none for 0"),
        ({0: "127.0.0.1:1", 1: "127.0.0.1:1", 2: "127.0.0.1:1"}, r"hosts 0 \(movies-host-0\), .* got none for 3"),
        (dict.fromkeys(range(5), "127.0.0.1:1"), r"got some for 4"),
        (dict.fromkeys(range(4), "nowhere"), r"nowhere: expected host:port"),
    ],
)
def test_addresses_that_do_not_fit_are_refused_by_name(served: Served, hosts: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Engine.open(served.bundle, hosts)


def test_hosts_of_a_bundle_without_hosts_are_refused(served: Served) -> None:
    with pytest.raises(ConfigurationError, match="expected no hosts: all its ranks are in the bundle"):
        Engine.open(served.one.bundle.path, {0: "127.0.0.1:1"})


def test_all_unreachable_hosts_are_named(served: Served) -> None:
    with pytest.raises(HostUnavailable) as refused:
        Engine.open(served.bundle, HostsConfig(addresses=dict.fromkeys(range(4), "127.0.0.1:1"), timeout_s=0.1))
    for number in range(4):
        assert f"host {number} (movies-host-{number} version 1 at 127.0.0.1:1): " in str(refused.value)


def test_each_replica_is_reported_separately(served: Served) -> None:
    manifest = open_bundle(served.bundle).manifest
    addresses = {host: [address, "127.0.0.1:1"] for host, address in served.addresses.items()}
    addresses[3] = ["localhost:1"]
    hosts = asyncio.run(replicas_of(manifest, HostsConfig(addresses=addresses, timeout_s=20)))
    assert [(host.host, host.model, host.version) for host in hosts] == [
        (n, f"{MODEL}-host-{n}", 1) for n in range(4)
    ]
    for replica_host in hosts[:3]:
        up, down = replica_host.replicas
        assert (up.address, up.problem, down.address) == (served.addresses[replica_host.host], None, "127.0.0.1:1")
        assert down.problem is not None
        assert "Connection refused" in down.problem
    assert {replica.address for replica in hosts[3].replicas} <= {"127.0.0.1:1", "[::1]:1"}
    assert hosts[3].up == 0


def test_a_replica_of_another_export_is_not_up(served: Served) -> None:
    manifest = open_bundle(served.bundle).manifest
    other = [msgspec.structs.replace(host, manifest="0" * 64) for host in manifest.hosts[:1]]
    re_exported = [msgspec.structs.replace(host, version=2) for host in manifest.hosts[1:2]]
    changed = msgspec.structs.replace(manifest, hosts=(*other, *re_exported, *manifest.hosts[2:]))
    hosts = asyncio.run(replicas_of(changed, HostsConfig(addresses=served.addresses, timeout_s=20)))
    assert [host.up for host in hosts] == [0, 0, 1, 1]
    problems = [host.replicas[0].problem or "" for host in hosts]
    assert "expected the bundle with SHA-256 0000" in problems[0]
    assert f"{MODEL}-host-1" in problems[1]


def test_a_router_shows_its_hosts(served: Served) -> None:
    page = scrape(served.metrics)
    deadline = time.monotonic() + 60
    while "tbe_host_replicas_up{" not in page and time.monotonic() < deadline:
        page = scrape(served.metrics)
    for host in range(4):
        assert metric(served.metrics, "tbe_host_replicas", host=str(host)) == 1
        assert metric(served.metrics, "tbe_host_replicas_up", host=str(host)) == 1
    done = tbe_serve("status", served.router, "--json")
    assert done.returncode == 0, done.stderr
    (model,) = json.loads(done.stdout)["models"]
    (version,) = model["versions"]
    assert [(host["host"], host["model"], host["version"]) for host in version["hosts"]] == [
        (number, f"{MODEL}-host-{number}", 1) for number in range(4)
    ]
    assert all(
        host["replicas"] == [{"address": served.addresses[host["host"]], "problem": None}]
        for host in version["hosts"]
    )
    assert f"{MODEL}-host-3" in tbe_serve("status", served.router).stdout


@pytest.mark.parametrize("how", one_in(2, NoTorchScript))
def test_a_router_and_its_hosts_answer_the_same_bits_without_torchscript(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: NoTorchScript
) -> None:
    specs = (Spec("cut", 97, 16, "MEAN", ("a", "b")), Spec("whole", 31, 8, "SUM", ("c",)))
    config = ExportConfig(sharding=Sharding(ranks=3, ranks_per_host=1, types={"cut": "row_wise"}))
    scripted = export_hosts(tmp_path / "with", collection(specs), config)
    one = Engine.open(in_one_process(tmp_path, collection(specs), config, scripted))
    remove_torchscript(monkeypatch, how)
    plain = export_hosts(tmp_path / "without", collection(specs), config)
    bundles = [plain, *(path_of(plain, host) for host in open_bundle(plain).manifest.hosts)]
    assert [bundle for bundle in bundles if (bundle / PROGRAM).exists()] == []
    for router in (scripted, plain):
        with fake_hosts(router) as hosts:
            engine = Engine.open(router, patient({number: host.address for number, host in hosts.items()}))
            assert engine.lookup_program.form is ProgramForm.PLAIN
            for samples, features in ((3, None), (1, ["b"]), (5, ["c", "a"])):
                bags = random_bags(np.random.default_rng(samples), specs, samples, features)
                assert_same(engine.lookup(bags), one.lookup(bags))
            engine.close()
