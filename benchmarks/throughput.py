"""Many clients at once: our model, one that does nothing but return as many bytes, and ours without merging."""

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

from benchmarks.measure import Result, interleave, p50, ratio
from benchmarks.perf_analyzer import Measured, PerfAnalyzer, write_requests
from benchmarks.served import do_nothing_name, publish_do_nothing
from benchmarks.workload import NAME, WIDTH, Workload
from serving.bench.generator import Traffic, generate
from serving.bench.requests import prepare
from serving.bundle.opening import open_bundle
from serving.client import LookupClient
from serving.errors import ServingError
from serving.request.encoding import Features
from serving.request.tensors import Tensors
from serving.server import Ports, Server, Supervisor, run_server

SAMPLES = (1, 16, 128)
CLIENTS = (1, 8, 32, 128)
# Answered one request at a time.
SINGLE = "single"
REQUESTS = 64
SECONDS = 1.5
ROUNDS = 5
# Requests a second, of one sample, at random moments.
RATES = (250, 500, 1000)


def run(workload: Workload, folder: Path) -> list[Result]:
    """Closed loops by perf_analyzer, open ones by our own generator; then a client's import, and a recovery."""
    folder.mkdir()
    repository = workload.bundle.parent.parent
    _publish_single(repository)
    for samples in SAMPLES:
        publish_do_nothing(repository, samples, (1, samples, WIDTH))
        write_requests(folder / f"b{samples}.json", [workload.request(samples, seed) for seed in range(REQUESTS)])
    load = PerfAnalyzer.fetch(folder / "perf_analyzer")
    models = [NAME, SINGLE, *map(do_nothing_name, SAMPLES)]
    with run_server(repository, Ports(grpc=0, http=0, metrics=0), models=models) as server:
        results = [*_closed(load, server, folder), *_ratios(load, server, folder), *_open(server, workload)]
    return [*results, *_client_import(), *_recovery(repository)]


def _closed(load: PerfAnalyzer, server: Server, folder: Path) -> Iterator[Result]:
    """Throughput and latency for every number of clients and samples, and what an id costs."""
    for samples in SAMPLES:
        rates = {}
        for clients in CLIENTS:
            seen = load.run(server.grpc, NAME, folder / f"b{samples}.json", clients, SECONDS)
            rates[clients] = seen.answers_per_s
            yield Result(f"served_c{clients}_b{samples}", seen.answers_per_s, unit="/s")
            yield Result(f"served_c{clients}_b{samples}_p50_s", seen.p50_s)
            yield Result(f"served_c{clients}_b{samples}_p99_s", seen.p99_s)
        for clients in (8, 32):
            yield ratio(f"cost_per_id_c{clients}_over_c1_b{samples}", rates[1] / rates[clients])


def _ratios(load: PerfAnalyzer, server: Server, folder: Path) -> Iterator[Result]:
    """32 clients with one sample each; the models in turn, and the median of their rates."""
    seen: dict[str, list[Measured]] = {NAME: [], do_nothing_name(1): [], SINGLE: []}
    for _ in range(ROUNDS):
        for model, found in seen.items():
            found.append(load.run(server.grpc, model, folder / "b1.json", 32, SECONDS))
    served, nothing, single = (median(each.answers_per_s for each in found) for found in seen.values())
    yield Result("donothing_c32_b1", nothing, unit="/s")
    yield Result("single_c32_b1", single, unit="/s")
    yield ratio("served_over_donothing_rps_c32_b1", served / nothing)
    yield ratio("merged_over_single_rps_c32_b1", served / single)


def _open(server: Server, workload: Workload) -> Iterator[Result]:
    bundle = open_bundle(workload.bundle)
    with LookupClient(server.grpc, NAME) as client:
        asked = [workload.request(1, seed) for seed in range(REQUESTS)]
        requests = prepare(NAME, [Tensors(None, each.values, each.lengths) for each in asked], client.info())
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
        run_server(repository, Ports(grpc=0, http=0, metrics=0), models=[NAME]) as server,
        LookupClient(server.grpc, NAME, 10) as client,
    ):
        features: Features = {"f0": [[1]]}
        client.lookup(features)
        supervisor = Supervisor(server, True, lambda _: None)
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


def _publish_single(repository: Path) -> None:
    """Our model, but for its name and that Triton hands it one request at a time."""
    model = repository / SINGLE
    shutil.copytree(repository / NAME, model)
    config = text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    config.name = SINGLE
    config.max_batch_size = 1
    (model / "config.pbtxt").write_text(text_format.MessageToString(config))
