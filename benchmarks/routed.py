"""Ranks on other hosts: what a router adds to the calls that it cannot do without.

Everything is on one machine: a tritonserver for each host, one for the router, and the caller share its cores. The
floor is what no router goes below here: the hop from the caller to a model that does nothing, and a fan-out of the
same bytes to as many models that do nothing and answer as many bytes.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from benchmarks.inprocess import lookup
from benchmarks.measure import Result, interleave, p50, ratio
from benchmarks.served import do_nothing_name, inputs_of, publish_do_nothing
from benchmarks.workload import NAME, WIDTH, Arrays, Workload, module
from examples.hosts.dlrm import IDS_PER_SAMPLE, ROWS
from export import ExportConfig, Sharding, export_model
from export.plan.traffic import host_traffic
from serving.bundle.hosts import HostBundle, IdDtype
from serving.bundle.opening import Bundle, open_bundle
from serving.client.connection import Connection
from serving.client.retries import Retries
from serving.engine import Engine
from serving.model.config_file import apply_settings, read_config, settings_of, write_config
from serving.ranks.fan_out import LoopThread, ask_all
from serving.ranks.host import Host
from serving.ranks.hosts import Hosts
from serving.ranks.partial import PartialRequest
from serving.ranks.routed import Routed
from serving.request import kjt
from serving.request.tensors import Tensors
from serving.server import Ports, Server, run_server

ROUNDS = {1: 400, 128: 120}
REQUESTS = 8
NOTHING = [do_nothing_name(samples) for samples in ROUNDS]
FREE = Ports(grpc=0, http=0, metrics=0)
# The five tables of 40 million rows; the other 21 are small, and a router holds them itself.
LARGE = [f"t{number}" for number, rows in enumerate(ROWS) if rows == max(ROWS)]
POOLING = {f"t{number}": float(ids) for number, ids in enumerate(IDS_PER_SAMPLE)}


@dataclass(frozen=True, slots=True)
class Case:
    """A way to place the tables: a type for all of them, or `mixed`, on a number of hosts."""

    kind: str
    hosts: int

    @property
    def name(self) -> str:
        """The router's model, and the end of the results' names."""
        return f"{self.kind}_{self.hosts}"

    @property
    def sharding(self) -> Sharding:
        """As `tbe-export` is told."""
        types = {"*": self.kind}
        if self.kind == "mixed":
            types = {"*": "data_parallel", **dict.fromkeys(LARGE, "table_wise")}
        return Sharding(
            ranks=self.hosts, types=types, pooling_factors=POOLING, hosts_as_models=True, ranks_per_host=1
        )


QUICK = (Case("table_wise", 2), Case("mixed", 4))
ALL = (
    *(Case("table_wise", hosts) for hosts in (1, 2, 4, 8)),
    *(Case("row_wise", hosts) for hosts in (2, 4, 8)),
    Case("mixed", 4),
)


def run(one_rank: Workload, folder: Path, cases: tuple[Case, ...] = ALL) -> Iterator[Result]:
    """One client, one request at a time."""
    one = Engine.open(one_rank.bundle)
    for case in cases:
        yield from _run_case(case, one, folder / case.name)


def _run_case(case: Case, one: Engine, folder: Path) -> Iterator[Result]:
    exported = open_bundle(export_model(module(), folder / "r", case.name, ExportConfig(sharding=case.sharding)))
    with ExitStack() as stack:
        servers = _start_hosts(stack, exported, folder)
        addresses = {host: server.grpc for host, server in servers.items()}
        repository = _prepare_router(exported, one, addresses)
        router = stack.enter_context(run_server(repository, FREE, models=[case.name, NAME, *NOTHING]))
        engine = stack.enter_context(Engine(exported, Hosts(addresses=addresses, timeout_s=20.0)))
        client = stack.enter_context(triton.InferenceServerClient(router.grpc))
        for samples, rounds in ROUNDS.items():
            requests = [Workload(exported.path).request(samples, seed) for seed in range(REQUESTS)]
            _check(client, case, engine, one, requests[0])
            with _candidates(case, engine, client, requests, samples, addresses) as candidates:
                times = {name: p50(seconds) for name, seconds in interleave(candidates, rounds).items()}
            yield from _results(case, samples, times)
        yield _processor_time(case, engine)
        yield _bytes(case, engine)


@contextmanager
def _candidates(
    case: Case, engine: Engine, client: Any, requests: list[Arrays], samples: int, addresses: Mapping[int, str]
) -> Iterator[dict[str, Callable[[], Any]]]:
    asked = cycle([_to_hosts(engine, request) for request in requests])
    routed, hop, local, whole = (cycle(requests) for _ in range(4))
    loop = LoopThread()
    nothing = loop.start(_hosts_that_do_nothing(engine, samples, addresses)).result()
    yield {
        "routed": lambda: _infer(client, case.name, next(routed)),
        "hop": lambda: _infer(client, do_nothing_name(samples), next(hop)),
        "fan_out": lambda: loop.start(ask_all(nothing, next(asked))).result(),
        "engine": lambda: lookup(engine, next(local)),
        "one_host": lambda: _infer(client, NAME, next(whole)),
    }
    for host in nothing.values():
        loop.start(host.close()).result()
    loop.close()


def _results(case: Case, samples: int, times: Mapping[str, float]) -> Iterator[Result]:
    where = f"_{case.name}"
    for name, seconds in times.items():
        yield Result(f"{name}{where}_p50_b{samples}_s", seconds)
    floor = times["hop"] + times["fan_out"]
    yield ratio(f"routed_over_floor{where}_p50_b{samples}", times["routed"] / floor)
    yield ratio(f"engine_over_fan_out{where}_p50_b{samples}", times["engine"] / times["fan_out"])
    yield ratio(f"routed_over_one_host{where}_p50_b{samples}", times["routed"] / times["one_host"])


def _processor_time(case: Case, engine: Engine) -> Result:
    """The caller's processor time for one sample, by host: everything but the hosts themselves."""
    requests = cycle([Workload(engine.bundle.path).request(1, seed) for seed in range(REQUESTS)])
    started = time.process_time()
    for _ in range(ROUNDS[1]):
        lookup(engine, next(requests))
    used = (time.process_time() - started) / ROUNDS[1]
    return Result(f"routed_cpu_per_host_{case.name}_b1_s", used / case.hosts)


def _bytes(case: Case, engine: Engine) -> Result:
    """What travelled for 128 samples ÷ what the plan says."""
    assert isinstance(engine.ranks, Routed)
    counts = engine.ranks.counts.values()
    before = sum(each.bytes_out + each.bytes_in for each in counts)
    for seed in range(REQUESTS):
        lookup(engine, Workload(engine.bundle.path).request(128, seed))
    moved = (sum(each.bytes_out + each.bytes_in for each in counts) - before) / REQUESTS
    traffic = host_traffic(engine.bundle.manifest, case.sharding, 128).values()
    said = sum(sum(each.to_host.values()) + sum(each.to_router.values()) for each in traffic)
    return ratio(f"routed_bytes_over_plan_{case.name}_b128", moved / said)


def _start_hosts(stack: ExitStack, engine_bundle: Bundle, folder: Path) -> dict[int, Server]:
    """A server for each host, with its model and models that do nothing."""
    servers = {}
    for host in engine_bundle.manifest.hosts:
        repository = folder / f"host-{host.host}"
        repository.mkdir()
        shutil.move(engine_bundle.path.parent.parent / host.model, repository / host.model)
        part = open_bundle(repository / host.model / str(host.version)).manifest
        for samples in ROUNDS:
            width = sum(table.dim for table in part.feature_tables)
            publish_do_nothing(repository, samples, width, like=host.model)
        servers[host.host] = stack.enter_context(run_server(repository, FREE, models=[host.model, *NOTHING]))
    return servers


def _prepare_router(router: Bundle, one: Engine, addresses: Mapping[int, str]) -> Path:
    """The router's repository: it knows its hosts, and has beside it all tables on one rank, and nothing at all."""
    model = router.path.parent
    config = read_config(model)
    hosts = {str(host): address for host, address in addresses.items()}
    apply_settings(config, replace(settings_of(config), hosts=hosts, shard_timeout_ms=20_000))
    write_config(model, config)
    shutil.copytree(one.bundle.path.parent, model.parent / NAME)
    for samples in ROUNDS:
        publish_do_nothing(model.parent, samples, WIDTH, like=NAME)
    return model.parent


def _to_hosts(engine: Engine, request: Arrays) -> Mapping[int, PartialRequest]:
    """What a router's engine asks its hosts for a request."""
    assert isinstance(engine.ranks, Routed)
    checked = kjt.check([kjt.accept(engine.schema, Tensors(None, request.values, request.lengths))])
    return engine.ranks.split(kjt.merge(engine.schema, checked)).to_send


async def _hosts_that_do_nothing(engine: Engine, samples: int, addresses: Mapping[int, str]) -> dict[int, Host]:
    """For each host a model beside its own that answers as many bytes, by rank."""
    ranks = engine.bundle.manifest.plan.ranks
    return {
        number: Host(
            HostBundle(host=rank.host, model=do_nothing_name(samples), version=1, manifest=engine.bundle.digest),
            IdDtype.INT32,
            False,
            Connection(addresses=[addresses[rank.host]], timeout_s=20.0, retries=Retries(attempts=1)),
        )
        for number, rank in enumerate(ranks)
        if rank.weights_file is None
    }


def _check(client: Any, case: Case, engine: Engine, one: Engine, request: Arrays) -> None:
    """Every candidate that answers answers right."""
    expected = lookup(one, request)
    for found in (_infer(client, case.name, request)[0], lookup(engine, request), _infer(client, NAME, request)[0]):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def _infer(client: Any, model: str, request: Arrays) -> Any:
    return client.infer(model, inputs_of(request)).as_numpy("embeddings")
