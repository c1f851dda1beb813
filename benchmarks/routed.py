"""Ranks on other hosts: what a router adds to the calls that it cannot do without.

Everything is on one machine: a tritonserver for each host, one for the router, and the caller share its cores. The
floor is what no router goes below here: the hop from the caller to a model that does nothing, and a fan-out of the
same bytes to as many models that do nothing and answer as many bytes.

What a router would take with hosts on machines of their own is worked out from its parts: see `apart`.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton

from benchmarks.fan_out import Asked, FanOut, asked_of
from benchmarks.fleet import FREE, make_patient, memory_bytes, start_hosts
from benchmarks.inprocess import lookup
from benchmarks.measure import Result, interleave, p50, ratio
from benchmarks.model_memory import in_memory
from benchmarks.served import do_nothing_name, inputs_of, publish_do_nothing
from benchmarks.workload import NAME, WIDTH, Arrays, Workload, module
from examples.hosts.dlrm import IDS_PER_SAMPLE, ROWS
from export import ExportConfig, Sharding, export_model
from export.plan.traffic import host_traffic
from serving.bundle.load import Bundle, open_bundle
from serving.engine import Engine
from serving.router.hosts_config import HostsConfig
from serving.router.router_ranks import RouterRanks
from serving.server import run_server

ROUNDS = {1: 400, 128: 120}
REQUESTS = 8
NOTHING = [do_nothing_name(samples) for samples in ROUNDS]
# Fewer calls than these have no p99.
ENOUGH_FOR_P99 = 400
# Seconds of each call, by candidate.
Times = Mapping[str, npt.NDArray[np.float64]]
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
    one = in_memory(one_rank.bundle)
    for case in cases:
        yield from _run_case(case, one, folder / case.name)


def _run_case(case: Case, one: Engine, folder: Path) -> Iterator[Result]:
    exported = open_bundle(export_model(module(), folder / "r", case.name, ExportConfig(sharding=case.sharding)))
    with ExitStack() as stack:
        addresses = start_hosts(stack, exported, folder, ROUNDS)
        repository = _prepare_router(exported, one, addresses)
        router = stack.enter_context(run_server(repository, FREE, models=[case.name, NAME, *NOTHING]))
        engine = stack.enter_context(Engine(exported, HostsConfig(addresses=addresses, timeout_s=20.0)))
        client = stack.enter_context(triton.InferenceServerClient(router.grpc))
        hosts = stack.enter_context(FanOut(engine, addresses))
        for samples, rounds in ROUNDS.items():
            requests = [Workload(exported.path).request(samples, seed) for seed in range(REQUESTS)]
            _check(client, case, engine, one, requests[0])
            with FanOut(engine, addresses, do_nothing_name(samples)) as nothing:
                times = interleave(
                    _candidates(case, engine, client, requests, nothing) | _alone(engine, requests, hosts), rounds
                )
            yield from results(case, samples, times)
            yield from apart(case, samples, times, _processor_time(engine, hosts, requests, rounds))
        yield from _bytes(case, engine)
        yield Result(f"router_pss_{case.name}_bytes", memory_bytes(router, case.name), unit="B")


def _candidates(
    case: Case, engine: Engine, client: Any, requests: list[Arrays], nothing: FanOut
) -> dict[str, Callable[[], Any]]:
    endless = cycle([asked_of(engine, request) for request in requests])
    routed, hop, local, whole = (cycle(requests) for _ in range(4))
    samples = requests[0].lengths.size // len(ROWS)
    return {
        "routed": lambda: _infer(client, case.name, next(routed)),
        "hop": lambda: _infer(client, do_nothing_name(samples), next(hop)),
        "fan_out": lambda: nothing(next(endless)),
        "engine": lambda: lookup(engine, next(local)),
        "one_host": lambda: _infer(client, NAME, next(whole)),
    }


def _alone(engine: Engine, requests: list[Arrays], hosts: FanOut) -> dict[str, Callable[[], Any]]:
    """Each host by itself, while the others have nothing to do."""
    requests_by_rank = [asked_of(engine, request) for request in requests]
    return {f"alone_{rank}": partial(_ask_one, hosts, rank, cycle(requests_by_rank)) for rank in hosts.ranks}


def _ask_one(hosts: FanOut, rank: int, requests_by_rank: "cycle[Asked]") -> None:
    hosts({rank: next(requests_by_rank)[rank]})


def results(case: Case, samples: int, times: Times) -> Iterator[Result]:
    """Medians of all candidates, and their ratios."""
    where = f"_{case.name}"
    median = {name: p50(seconds) for name, seconds in times.items() if not name.startswith("alone_")}
    for name, seconds in median.items():
        yield Result(f"{name}{where}_p50_b{samples}_s", seconds)
    floor = median["hop"] + median["fan_out"]
    yield ratio(f"routed_over_floor{where}_p50_b{samples}", median["routed"] / floor)
    yield ratio(f"engine_over_fan_out{where}_p50_b{samples}", median["engine"] / median["fan_out"])
    yield ratio(f"routed_over_one_host{where}_p50_b{samples}", median["routed"] / median["one_host"])


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Of an engine with hosts, for one request, in seconds.

    Attributes:
        checks_split_merge: checks, split, own rank, merge.
        calls: encoding, sending and reading calls.
    """

    checks_split_merge: float
    calls: float


def _processor_time(engine: Engine, hosts: FanOut, requests: list[Arrays], rounds: int) -> ProcessorTime:
    """Without the hosts, which are other processes."""
    whole, calls = cycle(requests), cycle([asked_of(engine, request) for request in requests])
    together = _used(lambda: lookup(engine, next(whole)), rounds)
    calls_s = _used(lambda: hosts(next(calls)), rounds)
    return ProcessorTime(together - calls_s, calls_s)


def _used(call: Callable[[], Any], rounds: int) -> float:
    started = time.process_time()
    for _ in range(rounds):
        call()
    return (time.process_time() - started) / rounds


def apart(case: Case, samples: int, times: Times, processor: ProcessorTime) -> Iterator[Result]:
    """What a routed request would take were every server on a machine of its own, joined by a network without delay.

    The hop + the router's own work + the slowest host when each is asked alone + what the calls to the other hosts
    take of the router's processor: one thread sends and reads them all, and a call alone has its own share in it.
    """
    slowest = np.max([seconds for name, seconds in times.items() if name.startswith("alone_")], axis=0)
    other_calls = processor.calls * (case.hosts - 1) / case.hosts
    where = f"_{case.name}_b{samples}"
    yield Result(f"routed_cpu_per_host{where}_s", (processor.checks_split_merge + processor.calls) / case.hosts)
    yield Result(f"own_work{where}_s", processor.checks_split_merge)
    yield Result(f"other_calls{where}_s", other_calls)
    yield Result(f"slowest_alone_{case.name}_p50_b{samples}_s", p50(slowest))
    apart = p50(times["hop"]) + processor.checks_split_merge + p50(slowest) + other_calls
    yield Result(f"apart_{case.name}_p50_b{samples}_s", apart)
    if slowest.size >= ENOUGH_FOR_P99:
        together = {"routed": times["routed"], "hop": times["hop"], "slowest_alone": slowest}
        together["apart"] = times["hop"] + processor.checks_split_merge + slowest + other_calls
        for name, seconds in together.items():
            yield Result(f"{name}_{case.name}_p99_b{samples}_s", float(np.percentile(seconds, 99)))


def _bytes(case: Case, engine: Engine) -> Iterator[Result]:
    """What travelled for 128 samples, both ways; and the same ÷ what the plan says."""
    assert isinstance(engine.ranks, RouterRanks)
    counts = engine.ranks.counts.values()
    before = sum(count.bytes_out + count.bytes_in for count in counts)
    for seed in range(REQUESTS):
        lookup(engine, Workload(engine.bundle.path).request(128, seed))
    moved = (sum(count.bytes_out + count.bytes_in for count in counts) - before) / REQUESTS
    traffic = host_traffic(engine.bundle.manifest, case.sharding, 128).values()
    planned = sum(sum(host.to_host.values()) + sum(host.to_router.values()) for host in traffic)
    yield Result(f"routed_bytes_{case.name}_b128", moved, unit="B")
    yield ratio(f"routed_bytes_over_plan_{case.name}_b128", moved / planned)


def _prepare_router(router: Bundle, one: Engine, addresses: Mapping[int, str]) -> Path:
    """The router's repository: it knows its hosts, and has beside it all tables on one rank, and nothing at all."""
    make_patient(router, {str(host): address for host, address in addresses.items()})
    repository = router.path.parent.parent
    shutil.copytree(one.bundle.path.parent, repository / NAME)
    for samples in ROUNDS:
        publish_do_nothing(repository, samples, (1, samples, WIDTH), like=NAME)
    return repository


def _check(client: Any, case: Case, engine: Engine, one: Engine, request: Arrays) -> None:
    """Every candidate that answers answers right."""
    expected = lookup(one, request)
    for answer in (_infer(client, case.name, request)[0], lookup(engine, request), _infer(client, NAME, request)[0]):
        np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-5)


def _infer(client: Any, model: str, request: Arrays) -> Any:
    return client.infer(model, inputs_of(request)).as_numpy("embeddings")
