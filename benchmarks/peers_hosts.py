"""A router beside other ways to have tables on several hosts: rows from Redis, and sums from Ray's actors."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import cycle
from json import dumps
from pathlib import Path
from typing import Any

from benchmarks import peer_servers, peers_served
from benchmarks.fleet import make_patient
from benchmarks.measure import Result, interleave, p50, ratio
from benchmarks.peer_workload import MODEL, PeerWorkload, dlrm
from benchmarks.peers_served import TOLERANCE
from benchmarks.routed import ROUNDS, Case
from benchmarks.workload import ROW_CAP
from serving.bundle.load import Bundle, open_bundle
from serving.engine import Engine
from serving.router.hosts_config import HostsConfig
from serving.server import run_local_hosts

CASE = Case("table_wise", 4)
# Results and protocols are called so, and the page calls them so.
PEERS = {"redis_hosts": "redis", "ray_ranks": "ray"}
LOADS = ((1, 1), (128, 1))
TURNS = 3
# Few enough for their rows to be put into Redis in seconds.
REQUESTS = {1: 128, 128: 8}


def run(folder: Path) -> Iterator[Result]:
    """DLRM-v2's tables on four hosts, table-wise; one client, one request at a time."""
    workload = dlrm(ROW_CAP, "dlrm_hosts", REQUESTS)
    router = open_bundle(workload.export(folder / "r" / "repository", sharding=CASE.sharding))
    workload.write(folder / "rows", ["fp32", "int8"])
    (folder / "rows" / "hosts.json").write_text(dumps(features_by_host(router)))
    with ExitStack() as stack:
        make_patient(router)
        fleet = stack.enter_context(run_local_hosts(router.path.parent.parent))
        ours = {"protocol": "ours", "address": fleet.router.grpc, "tolerance": TOLERANCE["int8"]}
        with ExitStack() as started:
            yield from run_beside(workload, folder, ours, "redis_hosts", partial(_start_redis, started, folder))
        # Apart: Ray is busy when idle. Its actors are the load generator's.
        yield from run_beside(workload, folder, ours, "ray_ranks", lambda: "")
        with Engine(router, HostsConfig(addresses=fleet.addresses, timeout_s=20.0)) as engine:
            yield from _in_process(workload, engine)
    shutil.rmtree(folder)


def features_by_host(router: Bundle) -> list[list[int]]:
    """The numbers of the features whose tables each host holds whole."""
    manifest = router.manifest
    host_of = {shard.table: manifest.plan.ranks[shard.rank].host for shard in manifest.plan.shards}
    features = [(number, host_of[feature.table]) for number, feature in enumerate(manifest.features)]
    return [[number for number, host_number in features if host_number == host.host] for host in manifest.hosts]


def run_beside(
    workload: PeerWorkload, folder: Path, ours: dict[str, Any], name: str, start: Callable[[], str]
) -> Iterator[Result]:
    """Figures of a peer, and of ours that were taken in turn with it; or why it is absent.

    Args:
        start: starts it; its address.
    """
    try:
        peer = {"protocol": name, "address": start(), "tolerance": TOLERANCE["fp32" if "redis" in name else "int8"]}
        lines = peers_served.drive(folder, {MODEL: ours, name: peer}, TURNS, LOADS)
    except (OSError, subprocess.CalledProcessError) as error:
        yield Result(f"{name}_absent", 1, unit="", note=str(error))
        return
    absent = {line["candidate"]: line["absent"] for line in lines if "absent" in line}
    if MODEL in absent:
        raise RuntimeError(f"{workload.name}: our own server: {absent[MODEL]}")
    if name in absent:
        yield Result(f"{name}_absent", 1, unit="", note=absent[name])
    medians = {(line["candidate"], line["samples"]): line["p50_s"] for line in lines if "absent" not in line}
    for samples, _ in LOADS:
        yield Result(f"routed_beside_{name}_p50_b{samples}_s", medians[MODEL, samples])
        if name not in absent:
            yield Result(f"{name}_p50_b{samples}_s", medians[name, samples])
            yield ratio(f"{name}_over_routed_p50_b{samples}", medians[name, samples] / medians[MODEL, samples])


def _start_redis(stack: ExitStack, folder: Path) -> str:
    """One for each host, with its rows; their addresses."""
    redis = replace(peer_servers.PEERS["redis_fp32"], protocol="redis_hosts")
    addresses = []
    for host in range(CASE.hosts):
        log = folder / f"redis-{host}.log"
        addresses.append(stack.enter_context(peer_servers.running(redis, folder / "rows", log)))
        peer_servers.fill_redis(folder / "rows", int(addresses[-1].rpartition(":")[2]), str(host))
    return ",".join(addresses)


def _in_process(workload: PeerWorkload, engine: Engine) -> Iterator[Result]:
    for samples, rounds in ROUNDS.items():
        requests = cycle(workload.tensors(samples))
        times = interleave({"engine": lambda requests=requests: engine.outputs(next(requests))}, rounds)  # type: ignore[misc]
        yield Result(f"hosts_engine_p50_b{samples}_s", p50(times["engine"]))
