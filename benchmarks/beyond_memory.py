"""A bundle larger than its memory: answers a second, and what they read from the disk, by how the file is mapped.

The bundle has twice the bytes that its control group allows. `ours` is what `Engine.open` does, which is to map
single pages (MADV_RANDOM) and to ask for all rows of a request at once; `one_by_one` is the same without asking;
`ordinary` is a mapping without advice; `huge` asks for pages of 2 MiB.

Run as a script (`python -m benchmarks.beyond_memory BUNDLE ADVICE IDS`) it measures one of them, in a process of its
own that joined the group.
"""

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from benchmarks.measure import Result, ratio_of
from benchmarks.workload import NAME
from examples.hosts.server import memory_limit
from export import ExportConfig, WeightDtype, export_model
from export.trained.generated_checkpoint import generated_checkpoint
from export.trained.tables import collect_tables
from serving.bench.requests import Distribution, random_requests
from serving.engine import Engine

LIMIT_BYTES = 1_500_000_000
ROWS, DIM, TABLES = 5_600_000, 128, 8  # INT4: 68 bytes a row, 3 GB in all
SAMPLES = 16
FACTOR = 10  # ids in a bag
ADVICE = {"ours": None, "one_by_one": mmap.MADV_RANDOM, "ordinary": 0, "huge": mmap.MADV_HUGEPAGE}
IDS = ("uniform", "zipf:1.05")
WARM_UP_S, SECONDS = 3.0, 4.0
REPEATS = 2


def run(folder: Path) -> Iterator[Result]:
    """All advices in turn, several times."""
    with memory_limit(f"tbe-bench-{os.getpid()}", LIMIT_BYTES) as group:
        if group is None:
            yield Result("beyond_memory_absent", 1, unit="", note="no control group can be made here")
            return
        bundle = _export(folder / "repository")
        yield Result("beyond_memory_bundle", TABLES * ROWS * 68, unit="B")
        yield Result("beyond_memory_limit", LIMIT_BYTES, unit="B")
        yield Result("beyond_memory_readahead", _readahead_bytes(bundle), unit="B")
        for ids in IDS:
            repeats = [{name: _measured(group, bundle, name, ids) for name in ADVICE} for _ in range(REPEATS)]
            what = ids.partition(":")[0]
            for name in ADVICE:
                rates = sorted(repeat[name]["answers_per_s"] for repeat in repeats)
                yield Result(f"beyond_memory_{name}_{what}_rps", rates[REPEATS // 2], unit="/s")
                bytes_read = sorted(repeat[name]["bytes_an_answer"] for repeat in repeats)
                yield Result(f"beyond_memory_{name}_{what}_bytes_an_answer", bytes_read[REPEATS // 2], unit="B")
            for name in ("one_by_one", "ordinary", "huge"):
                over = (repeat["ours"]["answers_per_s"] / repeat[name]["answers_per_s"] for repeat in repeats)
                yield ratio_of(f"beyond_memory_ours_over_{name}_{what}_rps", over)
        shutil.rmtree(folder)


def _export(repository: Path) -> Path:
    with torch.device("meta"):
        module = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t{number}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{number}"]
                )
                for number in range(TABLES)
            ]
        )
    tables = collect_tables(module).tables
    config = ExportConfig(dtype={"*": WeightDtype.INT4})
    return export_model(module, repository, NAME, config, checkpoint=generated_checkpoint(tables))


def _measured(group: Path, bundle: Path, name: str, ids: str) -> dict[str, float]:
    with (bundle / "weights.0.bin").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    joins = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    script = (sys.executable, "-m", "benchmarks.beyond_memory", str(bundle), name, ids)
    done = subprocess.run([*joins, *script], capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _measure(bundle: Path, name: str, ids: str) -> None:
    torch.set_num_threads(1)
    engine = Engine.open(bundle)
    assert not engine.table_files.fits
    advice = ADVICE[name]
    (rows,) = engine.table_files.tensors
    if advice is not None:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        assert madvise(rows.data_ptr(), rows.numel(), advice) == 0
        engine.table_files.ahead = None
    factors = {feature.name: float(FACTOR) for feature in engine.bundle.manifest.features}
    # More ids than memory holds: drawn anew for each request, from a few seeds.
    requests = cycle(
        [
            request
            for seed in range(40)
            for request in random_requests(engine.bundle.manifest, SAMPLES, Distribution.parse(ids), factors, seed)
        ]
    )
    for seconds in (WARM_UP_S, SECONDS):
        answers, start, before = 0, time.perf_counter(), _read_bytes()
        while time.perf_counter() - start < seconds:
            engine.outputs(next(requests))
            answers += 1
        took = time.perf_counter() - start
    figures = {"answers_per_s": answers / took, "bytes_an_answer": (_read_bytes() - before) / answers}
    print(json.dumps(figures))


def _readahead_bytes(path: Path) -> int:
    """What Linux reads ahead of a file, at most."""
    device = path.stat().st_dev
    folder = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}")  # sysfs-class-bdi
    return int((folder / "read_ahead_kb").read_text()) << 10


def _read_bytes() -> int:
    """What this process has caused to be read from disks; proc_pid_io(5)."""
    said = Path("/proc/self/io").read_text()
    return int(said.partition("\nread_bytes: ")[2].split()[0])


if __name__ == "__main__":
    _measure(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
