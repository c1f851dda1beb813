"""The headline: every row of MLPerf's DLRM-v2, exported to INT4 and served on this machine.

204,184,588 rows of dim 128 are 97.4 GiB of FP32, which fit neither memory nor disk here: rows are worked out as they
are read (`export.trained.checkpoint`), and what is written is the bundle.

Run as a script (`python -m benchmarks.headline REPOSITORY`) it exports, so that the peak is the export's.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.inprocess import bare_operator, bare_tbe, indices_and_offsets
from benchmarks.measure import Result, interleave, p50, ratio, ratio_of
from benchmarks.model_memory import private_bytes, settle
from benchmarks.pages import forget, read_in_small_pages
from benchmarks.served import do_nothing_name, publish_do_nothing
from benchmarks.workload import NAME, whole
from examples.hosts.dlrm import IDS_PER_SAMPLE
from export import ExportConfig, WeightDtype, export_model
from export.trained.generated_checkpoint import generated_checkpoint
from export.trained.tables import collect_tables
from serving.bench.generator import Traffic, generate
from serving.bench.requests import Distribution, prepare, random_requests
from serving.bundle.load import Bundle, open_bundle
from serving.client import LookupClient
from serving.engine import Engine
from serving.model.settings import ServingSettings
from serving.server import Ports, run_server

DIM = 128
SAMPLES = (1, 128)
CLIENTS = (1, 32)
NEEDED_BYTES = 15_000_000_000
# Calls in process, by samples; and how often the file is read in small pages, and in huge ones.
ROUNDS = {1: 1000, 16: 400, 128: 200}
REPEATS = 3


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
    export = json.loads(done.stdout.splitlines()[-1])
    yield Result("headline_rows", export["rows"], unit="")
    yield Result("headline_float", export["float_bytes"], unit="B")
    yield Result("headline_bundle", export["bundle_bytes"], unit="B")
    yield Result("headline_export_s", export["seconds"])
    yield Result("headline_export_rate", export["float_bytes"] / export["seconds"], unit="B/s")
    yield ratio("headline_bundle_over_float", export["bundle_bytes"] / export["float_bytes"])


def _in_process(bundle: Bundle) -> Iterator[Result]:
    """Beside the bare operator, and beside reading as many rows of as many bytes from anywhere in the same file.

    The operator alone runs over the file in small pages, too, as ordinary programs write and read it. Memory cannot
    hold both, so they take turns.
    """
    torch.set_num_threads(1)
    start = time.perf_counter()
    opened = Engine.open(bundle.path)
    yield Result("headline_open_s", time.perf_counter() - start)
    opened.close()
    small, huge, share = [], [], 0.0
    for _ in range(REPEATS):
        read_in_small_pages(bundle.path / "weights.0.bin")
        small.append(_timed(Engine(bundle), ("operator",)))
        forget(bundle.path / "weights.0.bin")
        engine = Engine(bundle)
        engine.table_files.verify()
        share = engine.table_files.used().huge / engine.table_files.used().mapped
        huge.append(_timed(engine, ("inprocess", "operator", "rows")))
        del engine
    yield ratio("headline_huge_share", share)
    row_bytes = bundle.manifest.tables[0].row_bytes
    for samples in ROUNDS:
        for name in ("inprocess", "operator", "rows"):
            seconds = [figures[name, samples] for figures in huge]
            yield Result(f"headline_{name}_p50_b{samples}_s", median(seconds))
        yield Result(f"headline_small_operator_p50_b{samples}_s", median(run["operator", samples] for run in small))
        bandwidth = sum(IDS_PER_SAMPLE) * samples * row_bytes / median(figures["rows", samples] for figures in huge)
        yield Result(f"headline_row_bandwidth_b{samples}", bandwidth, unit="B/s")
        pairs = [*zip(small, huge, strict=True)]
        yield ratio_of(
            f"headline_inprocess_over_operator_b{samples}",
            (small_run["inprocess", samples] / huge_run["operator", samples] for huge_run, small_run in pairs),
        )
        for limit in ("operator", "rows"):
            yield ratio_of(
                f"headline_inprocess_over_{limit}_huge_b{samples}",
                (figures["inprocess", samples] / figures[limit, samples] for figures in huge),
            )


def _timed(engine: Engine, names: Sequence[str]) -> dict[tuple[str, int], float]:
    """Medians of some candidates, by their names and samples, in seconds."""
    manifest = engine.bundle.manifest
    operator = bare_operator(bare_tbe(engine))
    (weights,) = engine.table_files.tensors
    row_bytes = manifest.tables[0].row_bytes
    rows = weights[: weights.numel() // row_bytes * row_bytes].view(-1, row_bytes)
    factors = {feature.name: ids for feature, ids in zip(manifest.features, IDS_PER_SAMPLE, strict=True)}
    medians: dict[tuple[str, int], float] = {}
    for samples, rounds in ROUNDS.items():
        requests = random_requests(manifest, samples, Distribution(), factors)
        prepared = [indices_and_offsets(request) for request in requests]
        random = torch.Generator().manual_seed(0)
        anywhere = [torch.randint(0, len(rows), (request.values.size,), generator=random) for request in requests]
        endless, alone, places = cycle(requests), cycle(prepared), cycle(anywhere)
        candidates = {
            "inprocess": lambda endless=endless: engine.outputs(next(endless)),
            "operator": lambda alone=alone: operator(*next(alone)),
            "rows": lambda places=places: rows.index_select(0, next(places)),
        }
        times = interleave({name: candidates[name] for name in names}, rounds)
        medians |= {(name, samples): p50(seconds) for name, seconds in times.items()}
    return medians


def _served(repository: Path, bundle: Bundle) -> Iterator[Result]:
    factors = {feature.name: ids for feature, ids in zip(bundle.manifest.features, IDS_PER_SAMPLE, strict=True)}
    for samples in SAMPLES:
        publish_do_nothing(repository, samples, (1, samples, DIM * len(IDS_PER_SAMPLE)))
    models = [NAME, *map(do_nothing_name, SAMPLES)]
    start = time.perf_counter()
    with run_server(repository, Ports(grpc=0, http=0, operations=0), models=models) as server:
        yield Result("headline_ready_s", time.perf_counter() - start)
        with LookupClient(server.grpc, NAME, 20) as client:
            info = client.info()
        settle(server)
        for ids in ("uniform", "zipf:1.05"):
            for samples in SAMPLES:
                tensors = random_requests(bundle.manifest, samples, Distribution.parse(ids), factors)
                for clients in CLIENTS:
                    load = Traffic(clients=clients, rate=0, seconds=1.5, repeats=2, warm_up_s=0.5, check=0.01)
                    times = {}
                    do_nothing = [(do_nothing_name(samples), None)] if ids == "uniform" else []
                    for model, checked in ((NAME, bundle), *do_nothing):
                        runs = generate(server.grpc, prepare(model, tensors, info), load, 10, checked)
                        assert not any(repeat.wrong or repeat.errors for repeat in runs), runs[0].wrong
                        latencies = np.concatenate([repeat.latencies_s for repeat in runs])
                        who, what = "served" if checked else "donothing", ids.partition(":")[0]
                        where = f"headline_{who}_{what}_c{clients}_b{samples}"
                        times[model] = p50(latencies)
                        yield Result(f"{where}_p50_s", times[model])
                        yield Result(f"{where}_p99_s", float(np.percentile(latencies, 99)))
                        yield Result(f"{where}_rps", len(latencies) / sum(run.seconds for run in runs), unit="/s")
                    if clients == 1 and ids == "uniform":
                        over = times[NAME] / times[do_nothing_name(samples)]
                        yield ratio(f"headline_served_over_donothing_p50_b{samples}", over)
        yield Result("headline_private", private_bytes(server), unit="B")


def _export(repository: Path) -> None:
    with torch.device("meta"):
        module = whole()
    tables = collect_tables(module).tables
    # Served at once: comparing 15 GB with their digests takes as long as reading them.
    serving = ServingSettings(verify_weights=False)
    config = ExportConfig(dtype={"*": WeightDtype.INT4}, serving=serving)
    start = time.perf_counter()
    path = export_model(module, repository, NAME, config, checkpoint=generated_checkpoint(tables))
    figures = {
        "seconds": time.perf_counter() - start,
        "rows": sum(table.rows for table in tables),
        "float_bytes": sum(4 * table.rows * table.dim for table in tables),
        "bundle_bytes": sum(file.stat().st_size for file in path.iterdir()),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    _export(Path(sys.argv[1]))
