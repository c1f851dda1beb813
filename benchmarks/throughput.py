"""Many clients at once: our model, one that does nothing but return as many bytes, and ours without merging."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from benchmarks.measure import Result, interleave, p50, ratio, ratio_of
from benchmarks.perf_analyzer import Measured, PerfAnalyzer, write_requests
from benchmarks.served import do_nothing_name, publish_do_nothing
from benchmarks.workload import NAME, WIDTH, Workload
from serving.bench.generator import Traffic, generate
from serving.bench.requests import prepare
from serving.bundle.load import open_bundle
from serving.client import LookupClient
from serving.errors import ServingError
from serving.requests.encoding import Features
from serving.requests.types import Tensors
from serving.server import Ports, Server, Supervisor, run_server
from serving.server.child_process import GLIBC, malloc_environment

SAMPLES = (1, 16, 128)
CLIENTS = (1, 8, 32, 128)
# Ours, answered one request at a time; ours and do-nothing, by two instances.
SINGLE = "single"
TWO, TWO_NOTHING = "two", "donothing_two"
REQUESTS = 64
SECONDS = 1.5
ROUNDS = 5
# Requests a second, of one sample, at random moments.
RATES = (250, 500, 1000)


def run(workload: Workload, folder: Path) -> list[Result]:
    """Closed loops by perf_analyzer, open ones by our own generator; then a client's import, and a recovery."""
    folder.mkdir()
    repository = workload.bundle.parent.parent
    for samples in SAMPLES:
        publish_do_nothing(repository, samples, (1, samples, WIDTH))
        write_requests(folder / f"b{samples}.json", [workload.request(samples, seed) for seed in range(REQUESTS)])
    publish_as(repository, NAME, SINGLE, max_batch_size=1)
    publish_as(repository, NAME, TWO, instances=2)
    publish_as(repository, do_nothing_name(1), TWO_NOTHING, instances=2)
    load = PerfAnalyzer.fetch(folder / "perf_analyzer")
    models = [NAME, SINGLE, TWO, TWO_NOTHING, *map(do_nothing_name, SAMPLES)]
    with run_server(repository, Ports(grpc=0, http=0, operations=0), models=models) as server:
        results = [*_closed(load, server, folder), *_ratios(load, server, folder), *_open(server, workload)]
    return [*results, *_malloc(load, repository, folder), *_client_import(), *_recovery(repository)]


def _closed(load: PerfAnalyzer, server: Server, folder: Path) -> Iterator[Result]:
    """Throughput and latency for every number of clients and samples, and what an id costs."""
    for samples in SAMPLES:
        rates = {}
        for clients in CLIENTS:
            measured = load.run(server.grpc, NAME, folder / f"b{samples}.json", clients, SECONDS)
            rates[clients] = measured.answers_per_s
            yield Result(f"served_c{clients}_b{samples}", measured.answers_per_s, unit="/s")
            yield Result(f"served_c{clients}_b{samples}_p50_s", measured.p50_s)
            yield Result(f"served_c{clients}_b{samples}_p99_s", measured.p99_s)
        for clients in (8, 32):
            yield ratio(f"cost_per_id_c{clients}_over_c1_b{samples}", rates[1] / rates[clients])


def _ratios(load: PerfAnalyzer, server: Server, folder: Path) -> Iterator[Result]:
    """32 clients with one sample each; the models in turn, and the median of their rates."""
    nothing = do_nothing_name(1)
    by_model: dict[str, list[Measured]] = {model: [] for model in (NAME, nothing, SINGLE, TWO, TWO_NOTHING)}
    for _ in range(ROUNDS):
        for model, repeats in by_model.items():
            repeats.append(load.run(server.grpc, model, folder / "b1.json", 32, SECONDS))
    rates = {model: [repeat.answers_per_s for repeat in repeats] for model, repeats in by_model.items()}
    shown = {nothing: "donothing", TWO_NOTHING: "donothing_two_instances", TWO: "two_instances", SINGLE: SINGLE}
    for model, name in shown.items():
        yield Result(f"{name}_c32_b1", median(rates[model]), unit="/s")
    for name, ours, peer in (
        ("served_over_donothing_rps_c32_b1", NAME, nothing),
        ("served_over_donothing_rps_c32_b1_two_instances", TWO, TWO_NOTHING),
        ("two_instances_over_one_rps_c32_b1", TWO, NAME),
        ("merged_over_single_rps_c32_b1", NAME, SINGLE),
    ):
        yield ratio_of(name, (one / other for one, other in zip(rates[ours], rates[peer], strict=True)))


def _malloc(load: PerfAnalyzer, repository: Path, folder: Path) -> Iterator[Result]:
    """A server with tcmalloc, where this machine has it, and one with glibc's malloc, in turn."""
    if malloc_environment() == GLIBC:
        return
    with run_server(repository, Ports(grpc=0, http=0, operations=0), models=[NAME]) as with_tcmalloc:
        os.environ.update(GLIBC, LD_PRELOAD="")
        try:
            with run_server(repository, Ports(grpc=0, http=0, operations=0), models=[NAME]) as with_glibc:
                for clients, samples in ((1, 1), (32, 1), (1, 128)):
                    rates = [
                        [load.run(server_.grpc, NAME, folder / f"b{samples}.json", clients, SECONDS).answers_per_s
                         for server_ in (with_tcmalloc, with_glibc)]
                        for _ in range(ROUNDS)
                    ]  # fmt: skip
                    yield ratio_of(
                        f"tcmalloc_over_glibc_rps_c{clients}_b{samples}", (ours / its for ours, its in rates)
                    )
        finally:
            for name in (*GLIBC, "LD_PRELOAD"):
                del os.environ[name]


def _open(server: Server, workload: Workload) -> Iterator[Result]:
    bundle = open_bundle(workload.bundle)
    with LookupClient(server.grpc, NAME, 20) as client:
        workload_requests = [workload.request(1, seed) for seed in range(REQUESTS)]
        requests = prepare(
            NAME,
            [Tensors(None, request.values, request.lengths) for request in workload_requests],
            client.info(),
        )
    for rate in RATES:
        load = Traffic(clients=0, rate=rate, seconds=5, repeats=1, warm_up_s=1, check=0.01)
        runs = generate(server.grpc, requests, load, timeout_s=5, bundle=bundle)
        assert not runs[0].wrong, runs[0].wrong
        for percent in (50, 99):
            seconds = float(np.percentile(runs[0].latencies_s, percent))
            yield Result(f"open_loop_{rate}_per_s_b1_p{percent}_s", seconds)


def _client_import() -> Iterator[Result]:
    """A new Python that imports the client, against one that does not."""

    def start(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], check=True)

    times = interleave({"with": lambda: start("import serving.client"), "without": lambda: start("")}, 9, warm_up=2)
    yield Result("client_import_s", p50(times["with"]) - p50(times["without"]))


def _recovery(repository: Path) -> Iterator[Result]:
    """From the death of a model's process to its next answer, under `tbe-serve run`'s supervisor."""
    import threading

    with (
        run_server(repository, Ports(grpc=0, http=0, operations=0), models=[NAME]) as server,
        LookupClient(server.grpc, NAME, 10) as client,
    ):
        features: Features = {"f0": [[1]]}
        client.lookup(features)
        supervisor = Supervisor(server, True)
        watching = threading.Thread(target=supervisor.wait)
        watching.start()
        times = []
        for _ in range(3):
            time.sleep(1)
            for child in psutil.Process(server.process.pid).children():
                if child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
            started = time.monotonic()
            time.sleep(0.1)
            while True:
                try:
                    client.lookup(features)
                    break
                except ServingError:
                    time.sleep(0.02)
            times.append(time.monotonic() - started)
        supervisor.stop(15)
        watching.join()
    yield Result("recovery_s", median(times))


def publish_as(
    repository: Path, model: str, name: str, *, max_batch_size: int | None = None, instances: int = 1
) -> None:
    """A model once more, but for its name, how many requests Triton hands over together, and its instances."""
    shutil.copytree(repository / model, repository / name)
    file = repository / name / "config.pbtxt"
    config = text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())
    config.name = name
    config.instance_group[0].count = instances
    if max_batch_size is not None:
        config.max_batch_size = max_batch_size
    file.write_text(text_format.MessageToString(config))
