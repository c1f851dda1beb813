"""Several instances of a model on some of the cores: what many clients get of them, and what a lone one waits."""

import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Result, ratio_of
from benchmarks.perf_analyzer import Measured, PerfAnalyzer, write_requests
from benchmarks.throughput import publish_as
from benchmarks.workload import NAME, Workload
from serving.server import Ports, run_server

CORES = (2, 4, 8, 16)
INSTANCES = (1, 2, 4)
# Samples and clients. Of a lone client p50 counts, of many the answers a second.
LOADS = ((1, 32), (128, 32), (1, 1))
REQUESTS = 32
SECONDS = 1.0
ROUNDS = 3


def run(workload: Workload, folder: Path) -> Iterator[Result]:
    """Models that differ in their instances alone, all up at once and asked in turn, for each number of cores."""
    folder.mkdir()
    repository = workload.bundle.parent.parent
    for samples in {samples for samples, _ in LOADS}:
        write_requests(folder / f"b{samples}.json", [workload.request(samples, seed) for seed in range(REQUESTS)])
    load = PerfAnalyzer.fetch(folder / "perf_analyzer")
    models = {count: f"instances_{count}" for count in INSTANCES}
    for count, name in models.items():
        publish_as(repository, NAME, name, instances=count)
    every = sorted(os.sched_getaffinity(0))
    try:
        for cores in (count for count in CORES if count <= len(every)):
            os.sched_setaffinity(0, every[:cores])  # of all that is started from here, too
            there = {count: name for count, name in models.items() if count <= cores}
            with run_server(repository, Ports(grpc=0, http=0, operations=0), models=[*there.values()]) as server:
                for samples, clients in LOADS:
                    measured: dict[int, list[Measured]] = {count: [] for count in there}
                    for _ in range(ROUNDS):
                        for count, name in there.items():
                            requests = folder / f"b{samples}.json"
                            measured[count].append(load.run(server.grpc, name, requests, clients, SECONDS))
                    yield from _ratios(measured, f"on_{cores}_cores", samples, clients)
    finally:
        os.sched_setaffinity(0, every)


def _ratios(measured: dict[int, list[Measured]], where: str, samples: int, clients: int) -> Iterator[Result]:
    """Each number of instances ÷ one, of each round."""
    for count, repeats in measured.items():
        if count == 1:
            continue
        both = zip(repeats, measured[1], strict=True)
        name = f"instances_{count}_over_1_{where}"
        if clients == 1:
            yield ratio_of(f"{name}_p50_c1_b{samples}", (more.p50_s / one.p50_s for more, one in both))
        else:
            yield ratio_of(
                f"{name}_rps_c{clients}_b{samples}", (more.answers_per_s / one.answers_per_s for more, one in both)
            )
