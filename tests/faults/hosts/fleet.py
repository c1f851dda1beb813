"""A router on this machine, and two replicas of each host on machines of their own."""

import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from examples.hosts.network import Lan
from export import ExportConfig, Sharding
from export.publish.published import release
from serving.bundle.load import open_bundle
from serving.engine import Engine
from tests.support.host_faults import serve_all_versions
from tests.support.hosts import MODEL, configure, export_hosts, in_one_process, only
from tests.support.models import Spec, collection, random_bags
from tests.support.servers import Running, metric, running

REPLICAS = 2
TIMEOUT_S = 0.3
PATIENCE_S = 90.0
PORTS = ("--grpc-port", "8001", "--operations-port", "8002", "--insecure")

# A replica: the number of its host, and which one it is.
At = tuple[int, int]
# A request, and the right answer of each version.
Asked = tuple[Any, dict[int, Any]]


def specs(hosts: int) -> tuple[Spec, ...]:
    """Tables on one host each, tables over all hosts, and one on the router."""
    whole = tuple(Spec(f"t{number}", 1000 + number, 16, "SUM", (f"x{number}",)) for number in range(hosts))
    cut = (Spec("cut", 997, 8, "MEAN", ("c",)), Spec("near", 20, 8, "SUM", ("n",)))
    return whole + cut


def config(hosts: int) -> ExportConfig:
    types = {"*": "table_wise", "cut": "row_wise", "near": "data_parallel"}
    return ExportConfig(sharding=Sharding(ranks=hosts, ranks_per_host=1, types=types))


class Fleet:
    """A router on this machine, and each replica of each host on another. All have versions 1 and 2."""

    def __init__(self, stack: ExitStack, folder: Path, network: Lan) -> None:
        self.lan, self.router_machine, self.folder = network, network.machines[0], folder
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
        self.servers: dict[At, ExitStack] = {}
        self.running: dict[At, Running] = {}
        stack.callback(self._stop_all)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self.start, self.machines))
        router_repository = only(folder / "r", [MODEL], folder / "router")
        addresses = {
            host: [f"{self.machines[host, replica].address}:8001" for replica in range(REPLICAS)]
            for host in range(self.hosts)
        }
        milliseconds = str(int(1000 * TIMEOUT_S))
        configure(
            router_repository / MODEL,
            addresses,
            "--shard-timeout-ms",
            milliseconds,
            "--instances",
            "2",
            "--version",
            "1",
        )
        self.router = stack.enter_context(running(router_repository))

    def _export(self, seed: int) -> tuple[Path, Engine]:
        module = collection(specs(self.hosts), seed=seed)
        bundle = export_hosts(self.folder, module, config(self.hosts))
        alone = self.folder / f"one-{seed}"
        alone.mkdir()
        return bundle, Engine.open(in_one_process(alone, module, config(self.hosts), bundle))

    def model_of(self, replica_id: At) -> Path:
        """The folder of the host's model in a replica's own repository."""
        host, replica = replica_id
        return self.folder / f"{host}.{replica}" / f"{MODEL}-host-{host}"

    def start(self, replica_id: At, repository: Path | None = None, versions: Sequence[int] = (1, 2)) -> None:
        """Serve a host's model on a machine; every version of it that is named."""
        model = self._copy(replica_id, repository or self.folder / "r")
        for version in {1, 2} - {*versions}:
            shutil.rmtree(model / str(version), ignore_errors=True)
        serve_all_versions(model)
        self._run(replica_id)

    def start_following(self, replica_id: At, *options: str) -> None:
        """Serve a host's model on a machine as its release says, which is version 1 for now."""
        release(self._copy(replica_id, self.folder / "r"), [1])
        self._run(replica_id, "--follow", *options)

    def _copy(self, replica_id: At, repository: Path) -> Path:
        """A repository of its own for a replica; the model in it."""
        model = self.model_of(replica_id)
        shutil.rmtree(model.parent, ignore_errors=True)
        only(repository, [model.name], model.parent)
        return model

    def _run(self, replica_id: At, *options: str) -> None:
        machine, stack, own_repository = self.machines[replica_id], ExitStack(), self.model_of(replica_id).parent
        self.running[replica_id] = stack.enter_context(
            running(
                own_repository,
                *("--host", machine.address, "--operations-host", machine.address),
                *PORTS,
                *options,
                within=machine.within,
            )
        )
        self.servers[replica_id] = stack

    def stop(self, replica_id: At) -> None:
        """As `kubectl delete pod` does."""
        self.servers.pop(replica_id).close()

    def _stop_all(self) -> None:
        for server in [*self.servers]:
            self.stop(server)

    def requests(self, *versions: int, without: int | None = None, only_host: int | None = None) -> list[Asked]:
        """Requests with their right answers; that need no host `without`, or need `only_host`."""
        names = [name for spec in specs(self.hosts) for name in spec.features]
        if without is not None:
            plan = open_bundle(self.bundles[0]).manifest.plan
            lost = {name for name, shards in plan.shards_by_table.items()
                    if any(plan.ranks[shard.rank].host == without for shard in shards)}  # fmt: skip
            names = [name for spec in specs(self.hosts) if spec.name not in lost for name in spec.features]
        if only_host is not None:
            names = ["c"]
        with_answers = []
        for seed in range(8):
            request = random_bags(np.random.default_rng(seed), specs(self.hosts), 1 + 4 * seed, names)
            request[names[0]][0] = [0, 900] if names[0] != "n" else [0]
            if "c" in request:
                request["c"][0] = list(range(0, 997, 100))
            with_answers.append(
                (request, {version: self.engines[version - 1].lookup(request) for version in versions})
            )
        return with_answers

    def request_count(self, replica_id: At) -> float:
        """How many requests a replica has answered since it was started."""
        return metric(self.running[replica_id], "nv_inference_request_success")

    def until_asked(self, replica_id: At) -> float:
        """Until a replica is asked again; how long it took, in seconds."""
        started = time.monotonic()
        while True:
            try:
                before = self.request_count(replica_id)
                if self.request_count(replica_id) > before:
                    return time.monotonic() - started
            except OSError:
                pass
            if time.monotonic() > started + PATIENCE_S:
                raise SystemExit(f"replica {replica_id} is not asked again within {PATIENCE_S:g} s")
            time.sleep(0.1)
