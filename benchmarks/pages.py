"""Huge pages: FBGEMM's operator and our lookup over one file in pages of 2 MiB, and over a copy of it in small ones.

26 tables of INT4 and dim 128, rows capped so that both files fit memory, with the ids of DLRM-v2, uniform. The copy
is read as ordinary programs write and read files: its pages are of 4 KiB.
"""

import mmap
import os
import shutil
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch

from benchmarks import switching
from benchmarks.inprocess import bare_operator, bare_tbe, indices_and_offsets
from benchmarks.measure import Result, interleave, p50, ratio, ratio_of
from benchmarks.model_memory import in_memory
from benchmarks.workload import NAME
from examples.hosts.dlrm import IDS_PER_SAMPLE, dlrm_tables
from export import ExportConfig, WeightDtype, export_model
from export.trained.generated_checkpoint import generated_checkpoint
from export.trained.tables import collect_tables
from serving.bench.requests import Distribution, random_requests
from serving.bundle.load import open_bundle
from serving.engine import Engine
from serving.tables.memory_budget import memory_limit

DIM = 128
# Of the rows of DLRM-v2's largest tables; with it both files are 12 GB.
ROW_CAP = 14_000_000
NEEDED_BYTES = 15_000_000_000
ROUNDS = {1: 1000, 16: 400, 128: 150}
# Medians of so many repeats: the spread is that of their ratios.
REPEATS = 5


def run(folder: Path) -> Iterator[Result]:
    """The same requests to both files, call by call."""
    if memory_limit() < NEEDED_BYTES * 1.2 or shutil.disk_usage(folder.parent).free < NEEDED_BYTES:
        note = f"{NEEDED_BYTES:,} bytes of memory and of disk are needed"
        yield Result("pages_absent", 1, unit="", note=note)
        return
    repository = folder / "repository"
    with torch.device("meta"):
        module = dlrm_tables(ROW_CAP, DIM, None)
    config = ExportConfig(dtype={"*": WeightDtype.INT4})
    tables = collect_tables(module).tables
    huge = export_model(module, repository, NAME, config, checkpoint=generated_checkpoint(tables))
    small = repository / NAME / "2"
    shutil.copytree(huge, small)
    read_in_small_pages(small / "weights.0.bin")
    torch.set_num_threads(1)
    engines = {"huge": in_memory(huge), "small": Engine(open_bundle(small))}
    used = {name: engine.table_files.used() for name, engine in engines.items()}
    yield Result("pages_file", used["huge"].mapped, unit="B")
    yield ratio("huge_share", used["huge"].huge / used["huge"].mapped)
    yield ratio("small_share", used["small"].huge / used["small"].mapped)
    yield from _compared(engines)
    manifest = engines["huge"].bundle.manifest
    engines.clear()
    forget(small / "weights.0.bin")
    yield from switching.run(repository, manifest)
    shutil.rmtree(folder)


def _compared(engines: dict[str, Engine]) -> Iterator[Result]:
    manifest = engines["huge"].bundle.manifest
    operators = {name: bare_operator(bare_tbe(engine)) for name, engine in engines.items()}
    factors = {feature.name: ids for feature, ids in zip(manifest.features, IDS_PER_SAMPLE, strict=True)}
    for samples, rounds in ROUNDS.items():
        requests = random_requests(manifest, samples, Distribution(), factors)
        prepared = [indices_and_offsets(request) for request in requests]
        candidates = {}
        for name, engine in engines.items():
            endless, alone = cycle(requests), cycle(prepared)
            candidates[f"{name}_inprocess"] = lambda engine=engine, endless=endless: engine.outputs(next(endless))
            operator = operators[name]
            candidates[f"{name}_operator"] = lambda operator=operator, alone=alone: operator(*next(alone))
        repeats = [
            {name: p50(seconds) for name, seconds in interleave(candidates, rounds).items()} for _ in range(REPEATS)
        ]
        for name in candidates:
            yield Result(f"{name}_p50_b{samples}_s", sorted(repeat[name] for repeat in repeats)[REPEATS // 2])
        for what in ("operator", "inprocess"):
            name = f"huge_over_small_pages_b{samples}" + ("_inprocess" if what == "inprocess" else "")
            yield ratio_of(name, (repeat[f"huge_{what}"] / repeat[f"small_{what}"] for repeat in repeats))


def forget(path: Path) -> None:
    """Leave a file that nobody uses out of the page cache."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_in_small_pages(path: Path) -> None:
    """Read a file that nobody uses into the page cache, in pages of 4 KiB."""
    forget(path)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        buffer = mmap.mmap(-1, 16 << 20)
        while file.readinto(buffer):
            pass
