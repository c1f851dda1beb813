"""The headline: every row of MLPerf's DLRM-v2, exported to INT4 and served on this machine.

204,184,588 rows of dim 128 are 97.4 GiB of FP32, which fit neither memory nor disk here: rows are worked out as they
are read (`export.trained.generated`), and what is written is the bundle.

Run as a script (`python -m benchmarks.headline REPOSITORY`) it exports, so that the peak is the export's.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import psutil
import torch

from benchmarks.inprocess import bare_operator, bare_tbe, indices_and_offsets
from benchmarks.measure import Result, interleave, p50, ratio
from benchmarks.served import do_nothing_name, publish_do_nothing
from benchmarks.workload import NAME, whole
from examples.hosts.dlrm import IDS_PER_SAMPLE
from export import ExportConfig, WeightDtype, export_model
from export.trained.generated import generated_checkpoint
from export.trained.tables import collect_tables
from serving.bench.generator import Traffic, generate
from serving.bench.ids import Distribution, random_requests
from serving.bench.requests import prepare
from serving.bundle.opening import Bundle, open_bundle
from serving.client import LookupClient
from serving.engine import Engine
from serving.model.settings import ServingSettings
from serving.ranks.weights import map_weights
from serving.server import Ports, run_server

DIM = 128
SAMPLES = (1, 128)
CLIENTS = (1, 32)
NEEDED_BYTES = 15_000_000_000


def run(folder: Path) -> Iterator[Result]:
    """Export, open, look up in process beside the limits, and serve; every answer that is checked is right."""
    folder.mkdir(parents=True)
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        note = f"{free:,} bytes of disk are free, {NEEDED_BYTES:,} are needed"
        yield Result("headline_absent", 1, unit="", note=note)
        return
    yield from _exported(folder / "repository")
    bundle = open_bundle(folder / "repository" / NAME / "1")
    yield from _in_process(bundle)
    yield from _served(folder / "repository", bundle)
    shutil.rmtree(folder)


def _exported(repository: Path) -> Iterator[Result]:
    # `make` limits processes to one thread, as servers are; an export has the machine to itself.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.headline", str(repository)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    yield Result("headline_rows", found["rows"], unit="")
    yield Result("headline_float", found["float_bytes"], unit="B")
    yield Result("headline_bundle", found["bundle_bytes"], unit="B")
    yield Result("headline_export_s", found["seconds"])
    yield Result("headline_export_rate", found["float_bytes"] / found["seconds"], unit="B/s")
    yield ratio("headline_bundle_over_float", found["bundle_bytes"] / found["float_bytes"])


def _in_process(bundle: Bundle) -> Iterator[Result]:
    """Beside the bare operator, and beside reading as many rows of as many bytes from anywhere in the same file."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    engine = Engine.open(bundle.path)
    yield Result("headline_open_s", time.perf_counter() - start)
    _read_once(bundle)
    operator = bare_operator(bare_tbe(engine))
    (weights,) = map_weights(bundle.path, bundle.manifest.plan)
    row_bytes = bundle.manifest.tables[0].row_bytes
    rows = weights[: weights.numel() // row_bytes * row_bytes].view(-1, row_bytes)
    factors = {feature.name: ids for feature, ids in zip(bundle.manifest.features, IDS_PER_SAMPLE, strict=True)}
    for samples, rounds in ((1, 1000), (128, 200)):
        requests = random_requests(bundle.manifest, samples, Distribution(), factors)
        prepared = [indices_and_offsets(each) for each in requests]
        random = torch.Generator().manual_seed(0)
        anywhere = [torch.randint(0, len(rows), (each.values.size,), generator=random) for each in requests]
        asked, alone, places = cycle(requests), cycle(prepared), cycle(anywhere)
        candidates = {
            "inprocess": lambda asked=asked: engine.answer(next(asked)),
            "operator": lambda alone=alone: operator(*next(alone)),
            "rows": lambda places=places: rows.index_select(0, next(places)),
        }
        times = {name: p50(seconds) for name, seconds in interleave(candidates, rounds).items()}
        for name, seconds in times.items():
            yield Result(f"headline_{name}_p50_b{samples}_s", seconds)
        ids = requests[0].values.size
        yield Result(f"headline_row_bandwidth_b{samples}", ids * row_bytes / times["rows"], unit="B/s")
        for limit in ("operator", "rows"):
            yield ratio(f"headline_inprocess_over_{limit}_b{samples}", times["inprocess"] / times[limit])


def _served(repository: Path, bundle: Bundle) -> Iterator[Result]:
    factors = {feature.name: ids for feature, ids in zip(bundle.manifest.features, IDS_PER_SAMPLE, strict=True)}
    for samples in SAMPLES:
        publish_do_nothing(repository, samples, (1, samples, DIM * len(IDS_PER_SAMPLE)))
    models = [NAME, *map(do_nothing_name, SAMPLES)]
    start = time.perf_counter()
    with run_server(repository, Ports(grpc=0, http=0, metrics=0), models=models) as server:
        yield Result("headline_ready_s", time.perf_counter() - start)
        with LookupClient(server.grpc, NAME) as client:
            info = client.info()
        for ids in ("uniform", "zipf:1.05"):
            for samples in SAMPLES:
                tensors = random_requests(bundle.manifest, samples, Distribution.parse(ids), factors)
                for clients in CLIENTS:
                    load = Traffic(clients=clients, rate=0, seconds=1.5, repeats=2, warm_up_s=0.5, check=0.01)
                    times = {}
                    beside = [(do_nothing_name(samples), None)] if ids == "uniform" else []
                    for model, checked in ((NAME, bundle), *beside):
                        runs = generate(server.grpc, prepare(model, tensors, info), load, 10, checked)
                        assert not any(each.wrong or each.errors for each in runs), runs[0].wrong
                        latencies = np.concatenate([each.latencies_s for each in runs])
                        who, what = "served" if checked else "donothing", ids.partition(":")[0]
                        where = f"headline_{who}_{what}_c{clients}_b{samples}"
                        times[model] = p50(latencies)
                        yield Result(f"{where}_p50_s", times[model])
                        yield Result(f"{where}_p99_s", float(np.percentile(latencies, 99)))
                        yield Result(f"{where}_rps", len(latencies) / sum(each.seconds for each in runs), unit="/s")
                    if clients == 1 and ids == "uniform":
                        over = times[NAME] / times[do_nothing_name(samples)]
                        yield ratio(f"headline_served_over_donothing_p50_b{samples}", over)
        processes = psutil.Process(server.process.pid).children(recursive=True)
        private = sum(each.memory_info().rss - each.memory_info().shared for each in processes)
        yield Result("headline_private", private, unit="B")


def _read_once(bundle: Bundle) -> None:
    """Into the page cache, as far as it fits: what is measured is memory, not the disk."""
    for name in bundle.manifest.weights_files:
        with (bundle.path / name).open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def _export(repository: Path) -> None:
    with torch.device("meta"):
        module = whole()
    tables = collect_tables(module).tables
    # Served at once: comparing 15 GB with their digests takes as long as reading them.
    serving = ServingSettings(verify_weights=False)
    config = ExportConfig(dtype={"*": WeightDtype.INT4}, serving=serving)
    start = time.perf_counter()
    path = export_model(module, repository, NAME, config, checkpoint=generated_checkpoint(tables))
    found = {
        "seconds": time.perf_counter() - start,
        "rows": sum(table.rows for table in tables),
        "float_bytes": sum(4 * table.rows * table.dim for table in tables),
        "bundle_bytes": sum(file.stat().st_size for file in path.iterdir()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    _export(Path(sys.argv[1]))
