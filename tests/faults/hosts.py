"""A router and hosts on machines of their own, and what networks do to them. Needs root.

    nsenter --net=/run/netns/MACHINE python -m tests.faults.hosts FOLDER BRIDGE MACHINE...

runs on the router's machine, and prints a line of figures for each fault.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from examples.hosts.network import Lan, Machine, lan
from export import ExportConfig, Sharding
from serving.bundle.opening import open_bundle
from serving.client import LookupClient, Retries
from serving.engine import Engine
from serving.errors import ServingError
from tests.support.host_faults import load, same, serve_all_versions
from tests.support.hosts import MODEL, configure, export_hosts, in_one_process, only
from tests.support.models import Spec, collection, random_bags
from tests.support.quick_reload import quick_reload
from tests.support.servers import Running, metric, running

REPLICAS = 2
TIMEOUT_S = 0.3
# A fault is kept up for so long; the first second of it may be needed to notice it.
FAULT_S, NOTICED_S = 6.0, 1.0
PATIENCE_S = 90.0
CLIENTS = 4
IN_A_ROW = 100
# What a host with its replicas may take, in bytes.
HOST_BYTES = 2 << 30
PORTS = ("--grpc-port", "8001", "--metrics-port", "8002", "--insecure")


def specs(hosts: int) -> tuple[Spec, ...]:
    """Tables on one host each, tables over all hosts, and one on the router."""
    whole = tuple(Spec(f"t{number}", 1000 + number, 16, "SUM", (f"x{number}",)) for number in range(hosts))
    cut = (Spec("cut", 997, 8, "MEAN", ("c",)), Spec("near", 20, 8, "SUM", ("n",)))
    return whole + cut


def config(hosts: int) -> ExportConfig:
    types = {"*": "table_wise", "cut": "row_wise", "near": "data_parallel"}
    return ExportConfig(sharding=Sharding(ranks=hosts, ranks_per_host=1, types=types))


@dataclass
class Seen:
    """What callers met, each with the moment when it came and the time that it took, in seconds."""

    right: list[float] = field(default_factory=list)
    wrong: list[float] = field(default_factory=list)
    failed: list[tuple[float, float, str]] = field(default_factory=list)
    took: list[float] = field(default_factory=list)

    def failed_between(self, begin: float, end: float) -> int:
        return sum(begin <= at < end for at, _, _ in self.failed)


@contextmanager
def asking(address: str, requests: Sequence[tuple[Any, Sequence[Any]]]) -> Iterator[Seen]:
    """Callers that ask all the time. A request comes with the answers that are right."""
    seen, ended = Seen(), threading.Event()

    def ask() -> None:
        with LookupClient(address, MODEL, 10, retries=Retries(attempts=1)) as client:
            while not ended.is_set():
                for request, answers in requests:
                    started = time.monotonic()
                    try:
                        found = client.lookup(request)
                    except ServingError as error:
                        now = time.monotonic()
                        seen.failed.append((now, now - started, str(error)))
                    else:
                        now = time.monotonic()
                        is_right = any(same(found, answer) for answer in answers)
                        (seen.right if is_right else seen.wrong).append(now)
                        seen.took.append(now - started)

    threads = [threading.Thread(target=ask) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        ended.set()
        for thread in threads:
            thread.join()


class Fleet:
    """A router on this machine, and each replica of each host on another."""

    def __init__(self, stack: ExitStack, folder: Path, network: Lan) -> None:
        self.lan, self.here, self.folder = network, network.machines[0], folder
        self.hosts = (len(network.machines) - 1) // REPLICAS
        self.machines = {
            (host, replica): network.machines[1 + host * REPLICAS + replica]
            for host in range(self.hosts)
            for replica in range(REPLICAS)
        }
        self.bundles, self.engines = zip(*(self._export(seed) for seed in (1, 2)), strict=True)
        other = folder / "other"
        other.mkdir()
        export_hosts(other, collection(specs(self.hosts), seed=3), config(self.hosts))
        self.servers: dict[tuple[int, int], ExitStack] = {}
        self.running: dict[tuple[int, int], Running] = {}
        stack.callback(self._stop_all)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self.start, self.machines))
        own = only(folder / "r", [MODEL], folder / "router")
        addresses = {
            host: [f"{self.machines[host, replica].address}:8001" for replica in range(REPLICAS)]
            for host in range(self.hosts)
        }
        milliseconds = str(int(1000 * TIMEOUT_S))
        configure(own / MODEL, addresses, "--shard-timeout-ms", milliseconds, "--instances", "2", "--version", "1")
        self.router = stack.enter_context(running(own))

    def _export(self, seed: int) -> tuple[Path, Engine]:
        module = collection(specs(self.hosts), seed=seed)
        bundle = export_hosts(self.folder, module, config(self.hosts))
        alone = self.folder / f"one-{seed}"
        alone.mkdir()
        return bundle, Engine.open(in_one_process(alone, module, config(self.hosts), bundle))

    def start(self, at: tuple[int, int], repository: Path | None = None, versions: Sequence[int] = (1, 2)) -> None:
        """Serve a host's model on a machine; every version of it that is named."""
        host, replica = at
        model = f"{MODEL}-host-{host}"
        own = self.folder / f"{host}.{replica}"
        shutil.rmtree(own, ignore_errors=True)
        only(repository or self.folder / "r", [model], own)
        for version in {1, 2} - {*versions}:
            shutil.rmtree(own / model / str(version), ignore_errors=True)
        serve_all_versions(own / model)
        machine, stack = self.machines[at], ExitStack()
        self.running[at] = stack.enter_context(running(own, "--host", machine.address, *PORTS, within=machine.within))
        self.servers[at] = stack

    def stop(self, at: tuple[int, int]) -> None:
        """As `kubectl delete pod` does."""
        self.servers.pop(at).close()

    def _stop_all(self) -> None:
        for at in [*self.servers]:
            self.stop(at)

    def requests(self, *versions: int, without: int | None = None, only_host: int | None = None) -> list[Any]:
        """Requests with their right answers; that need no host `without`, or need `only_host`."""
        names = [name for spec in specs(self.hosts) for name in spec.features]
        if without is not None:
            plan = open_bundle(self.bundles[0]).manifest.plan
            lost = {name for name, shards in plan.shards_by_table.items()
                    if any(plan.ranks[each.rank].host == without for each in shards)}  # fmt: skip
            names = [name for spec in specs(self.hosts) if spec.name not in lost for name in spec.features]
        if only_host is not None:
            names = ["c"]
        found = []
        for seed in range(8):
            request = random_bags(np.random.default_rng(seed), specs(self.hosts), 1 + 4 * seed, names)
            request[names[0]][0] = [0, 900] if names[0] != "n" else [0]
            if "c" in request:
                request["c"][0] = list(range(0, 997, 100))
            found.append((request, [self.engines[version - 1].lookup(request) for version in versions]))
        return found

    def asked(self, at: tuple[int, int]) -> float:
        """How many requests a replica has answered since it was started."""
        with np.errstate():
            return metric(self.running[at], "nv_inference_request_success")

    def until_asked(self, at: tuple[int, int]) -> float:
        """Until a replica is asked again; how long it took, in seconds."""
        started = time.monotonic()
        while True:
            try:
                before = self.asked(at)
                if self.asked(at) > before:
                    return time.monotonic() - started
            except OSError:
                pass
            if time.monotonic() > started + PATIENCE_S:
                raise SystemExit(f"replica {at} is not asked again within {PATIENCE_S:g} s")
            time.sleep(0.1)


Fault = Callable[[Fleet, tuple[int, int]], AbstractContextManager[None]]


@contextmanager
def killed(fleet: Fleet, at: tuple[int, int]) -> Iterator[None]:
    """tritonserver is killed. `tbe-serve run` starts it anew."""
    triton_of(fleet.running[at]).kill()
    yield


@contextmanager
def stopped(fleet: Fleet, at: tuple[int, int]) -> Iterator[None]:
    """SIGSTOP."""
    server = triton_of(fleet.running[at])
    server.suspend()
    try:
        yield
    finally:
        server.resume()


@contextmanager
def restarted(fleet: Fleet, at: tuple[int, int]) -> Iterator[None]:
    """As `kubectl delete pod` does."""
    fleet.stop(at)
    fleet.start(at)
    yield


def filtered(*rules: str) -> Fault:
    return lambda fleet, at: fleet.machines[at].filtered(*rules)


def triton_of(server: Running) -> psutil.Process:
    """The server that `tbe-serve run` started."""
    return server.triton


DROP_IN, DROP_OUT = "INPUT -i eth0 -j DROP", "OUTPUT -o eth0 -j DROP"
LOSS = "-m statistic --mode random --probability 0.3 -j DROP"
ONE_REPLICA: Mapping[str, Fault] = {
    "killed": killed,
    "stopped (SIGSTOP)": stopped,
    "cut off both ways": filtered(DROP_IN, DROP_OUT),
    "cut off inwards": filtered(DROP_IN),
    "cut off outwards": filtered(DROP_OUT),
    "rejecting (TCP reset)": filtered("INPUT -i eth0 -p tcp -j REJECT --reject-with tcp-reset"),
    "losing 30 % of its packets": filtered(f"INPUT -i eth0 {LOSS}", f"OUTPUT -o eth0 {LOSS}"),
    "restarted": restarted,
}


def one_replica(fleet: Fleet, what: str, fault: Fault) -> str:
    """A fault of one of two replicas, under load."""
    at = (0, 1)
    with asking(fleet.router.grpc, fleet.requests(1)) as seen:
        fleet.until_asked(at)
        begin = time.monotonic()
        with fault(fleet, at):
            time.sleep(max(0.0, FAULT_S - (time.monotonic() - begin)))
            end = time.monotonic()
        back_s = fleet.until_asked(at)
    late = seen.failed_between(begin + NOTICED_S, float("inf"))
    return (
        f"one of two replicas {what}: {len(seen.right):,} answers, {len(seen.wrong)} wrong, {len(seen.failed)} failed, "
        f"{late} of them after {NOTICED_S:g} s; asked again {back_s:.1f} s after the {end - begin:.0f} s"
    )


def host_lost(fleet: Fleet, what: str, *rules: str) -> str:
    """All replicas of a host are lost."""
    lost = 0
    needing, other = fleet.requests(1, only_host=lost), fleet.requests(1, without=lost)
    with ExitStack() as stack:
        needy = stack.enter_context(asking(fleet.router.grpc, needing))
        with ExitStack() as faults:
            for replica in range(REPLICAS):
                faults.enter_context(fleet.machines[lost, replica].filtered(*rules))
            cut = time.monotonic()
            with asking(fleet.router.grpc, other) as kept:
                time.sleep(FAULT_S)
            healed = time.monotonic()
        time.sleep(FAULT_S)
        if not any(at > healed for at in needy.right):
            raise SystemExit("the host is not back")
    back_s = max(0.0, max(at for at, _, _ in needy.failed) - healed)
    errors = [(took_s, said) for at, took_s, said in needy.failed if at > cut]
    untyped = sum(f"host {lost} ({MODEL}-host-{lost}" not in said for _, said in errors)
    longest = np.percentile([took_s for took_s, _ in errors], [50, 99, 100]) * 1000
    return (
        f"all replicas of a host {what}: {len(errors)} refused, {untyped} of them without its name, "
        f"after {longest[0]:.0f} ms (p50), {longest[1]:.0f} ms (p99), {longest[2]:.0f} ms at most "
        f"(shard-timeout-ms {1000 * TIMEOUT_S:.0f}, {CLIENTS * 2} callers on two instances); "
        f"without it {len(kept.right):,} right, {len(kept.wrong) + len(kept.failed)} not; "
        f"{len(needy.wrong)} wrong; no refusal {back_s:.1f} s after it returned"
    )


def alone_in_time(fleet: Fleet) -> str:
    """How long a typed error takes, one caller at a time."""
    (request, _), *_ = fleet.requests(1, only_host=0)
    took = []
    with ExitStack() as stack:
        for replica in range(REPLICAS):
            stack.enter_context(fleet.machines[0, replica].filtered(DROP_IN, DROP_OUT))
        client = stack.enter_context(LookupClient(fleet.router.grpc, MODEL, 10, retries=Retries(attempts=1)))
        client.info()
        for _ in range(30):
            started = time.monotonic()
            try:
                client.lookup(request)
            except ServingError:
                took.append(time.monotonic() - started)
    most = max(took)
    until_back(fleet)
    return (
        f"one caller of a host that fell silent: a typed error after {1000 * most:.0f} ms at most, "
        f"{most / TIMEOUT_S:.2f} of shard-timeout-ms, {1000 * np.median(took):.0f} ms once it was noticed"
    )


def until_back(fleet: Fleet) -> None:
    """Until every instance of the router reaches every host: IN_A_ROW lookups succeed."""
    end = time.monotonic() + PATIENCE_S
    (request, _), *_ = fleet.requests(1)
    in_a_row = 0
    with LookupClient(fleet.router.grpc, MODEL, 10, retries=Retries(attempts=1)) as client:
        while in_a_row < IN_A_ROW:
            try:
                client.lookup(request)
                in_a_row += 1
            except ServingError:
                if time.monotonic() > end:
                    raise
                in_a_row = 0
                time.sleep(0.05)


def slow_link(fleet: Fleet, what: str, slowed: AbstractContextManager[None]) -> str:
    """Callers whose packets all go over a slow link."""
    until_back(fleet)
    with slowed, asking(fleet.router.grpc, fleet.requests(1)) as seen:
        time.sleep(FAULT_S)
    return (
        f"{what}: {len(seen.right):,} answers, {len(seen.wrong)} wrong, {len(seen.failed)} failed, "
        f"p50 {1000 * np.median(seen.took):.1f} ms"
    )


def other_bundle(fleet: Fleet) -> str:
    """A replica comes back with another export of the same version, then without the version."""
    at = (0, 1)
    with asking(fleet.router.grpc, fleet.requests(1)) as seen:
        for repository, versions in ((fleet.folder / "other" / "r", (1,)), (None, (2,)), (None, (1, 2))):
            fleet.stop(at)
            fleet.start(at, repository, versions)
            time.sleep(2)
        fleet.until_asked(at)
    return (
        f"a replica restarted with another bundle, then without the version, then right: {len(seen.right):,} answers, "
        f"{len(seen.wrong)} wrong, {len(seen.failed)} failed"
    )


def half_rolled(fleet: Fleet) -> str:
    """One replica of each host lacks the new version, and the router switches to and fro."""
    for host in range(fleet.hosts):
        fleet.stop((host, 1))
        fleet.start((host, 1), versions=(1,))
    switches = 0
    with asking(fleet.router.grpc, fleet.requests(1, 2)) as seen:
        for version in (2, 1) * 3:
            done = load(fleet.router, MODEL, version)
            if done.returncode:
                raise SystemExit(done.stderr)
            switches += 1
    return (
        f"{switches} switches of a router half of whose replicas lack a version: {len(seen.right):,} answers, "
        f"{len(seen.wrong)} of neither version or of both, {len(seen.failed)} failed"
    )


def router_killed(fleet: Fleet) -> str:
    """The router's tritonserver is killed while a host is lost."""
    with ExitStack() as stack:
        for replica in range(REPLICAS):
            stack.enter_context(fleet.machines[0, replica].filtered(DROP_IN, DROP_OUT))
        seen = stack.enter_context(asking(fleet.router.grpc, fleet.requests(1, without=0)))
        while not seen.right:
            time.sleep(0.01)
        killed_at = time.monotonic()
        fleet.router.triton.kill()
        time.sleep(0.5)
        before = len(seen.right)
        while len(seen.right) <= before:
            if time.monotonic() > killed_at + PATIENCE_S:
                raise SystemExit("the router does not serve again")
            time.sleep(0.01)
        back_s = time.monotonic() - killed_at
    until_back(fleet)
    return f"the router killed while a host is lost: it answered again after {back_s:.1f} s, {len(seen.wrong)} wrong"


def all_faults(fleet: Fleet) -> Iterator[str]:
    """A line of figures for each fault."""
    yield slow_link(fleet, f"{fleet.hosts} hosts, {REPLICAS} replicas each, no fault", nullcontext())
    for what, fault in ONE_REPLICA.items():
        yield one_replica(fleet, what, fault)
    yield alone_in_time(fleet)
    yield host_lost(fleet, "silent", DROP_IN, DROP_OUT)
    yield host_lost(fleet, "rejecting", "INPUT -i eth0 -p tcp -j REJECT --reject-with tcp-reset")
    yield slow_link(fleet, "1 Gb/s between router and hosts", fleet.here.limited("1gbit"))
    yield slow_link(fleet, "2 ms delay between router and hosts", fleet.lan.delayed(fleet.here, 0.002))
    yield other_bundle(fleet)
    yield router_killed(fleet)
    yield half_rolled(fleet)


def lines() -> Iterator[str]:
    """The figures, from a process on the router's machine; why there are none, without root."""
    if os.geteuid() != 0:
        yield "hosts on machines of their own: skipped, which needs root"
        return
    hosts = 4 if psutil.virtual_memory().available > 6 * HOST_BYTES else 2
    with lan(1 + hosts * REPLICAS) as network:
        names = [f"{each.name}={each.address}" for each in network.machines]
        command = [*network.machines[0].within, sys.executable, "-m", "tests.faults.hosts", network.bridge, *names]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield line.rstrip()
            finally:
                process.terminate()
        assert process.returncode == 0, f"hosts: exited with {process.returncode}"


def main(bridge: str, *machines: str) -> None:
    import tempfile

    network = Lan(bridge, [Machine(*each.split("=")) for each in machines])
    with tempfile.TemporaryDirectory(prefix="tbe-hosts-") as name, ExitStack() as stack, quick_reload():
        fleet = Fleet(stack, Path(name), network)
        for line in all_faults(fleet):
            print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
