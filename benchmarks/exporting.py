"""Export of a table larger than a quarter of this machine's memory: its rate beside the quantize op's, its peak.

Run as a script (`python -m benchmarks.exporting CHECKPOINT REPOSITORY ROWS`) it exports in a process of its own, so
that the peak is the export's.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from benchmarks.measure import Result, ratio, ratio_of
from export import ExportConfig, export_model
from export.config import Progress

DIM = 64
BLOCK_ROWS = 4096  # 1 MiB: fits a core's cache
KEY = "embedding_bags.t.weight"
OP_BYTES = 2_000_000_000
REPEATS = 3


def run(folder: Path) -> list[Result]:
    """Write a checkpoint of random rows, and export it as int8, with the page cache as full as that left it.

    Each repeat compares an export with the operator right after it. Figures are of the median repeat.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = int(0.26 * memory) // (4 * DIM)
    folder.mkdir(parents=True)
    checkpoint = folder / "w.safetensors"
    # `make` limits processes to one thread, as servers are; an export has the machine to itself.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def start(*arguments: str) -> str:
        command = [sys.executable, "-m", "benchmarks.exporting", *arguments, str(rows)]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    start("--write", str(checkpoint))
    repeats = []
    for _ in range(REPEATS):
        repeats.append(json.loads(start(str(checkpoint), str(folder / "repository")).splitlines()[-1]))
        shutil.rmtree(folder / "repository")
    checkpoint.unlink()
    size = rows * DIM * 4
    repeats.sort(key=lambda repeat: -repeat["seconds"] * repeat["op_rate"])
    ratios = [size / repeat["seconds"] / repeat["op_rate"] for repeat in repeats]
    middle = repeats[REPEATS // 2]
    return [
        Result("export_bytes", size, unit="B"),
        Result("export_s", middle["seconds"]),
        Result("export_rate", size / middle["seconds"], unit="B/s"),
        Result("export_storing_rate", size / middle["storing_s"], unit="B/s"),
        Result("quantize_op_rate", middle["op_rate"], unit="B/s"),
        Result("export_peak_above_start", max(repeat["peak_bytes"] for repeat in repeats), unit="B"),
        ratio_of("export_over_quantize_op", ratios),
        ratio("export_storing_over_quantize_op", size / middle["storing_s"] / middle["op_rate"]),
        ratio("export_peak_over_table", max(repeat["peak_bytes"] for repeat in repeats) / size),
    ]


def _write(checkpoint: Path, rows: int) -> None:
    save_file({KEY: torch.empty(rows, DIM).normal_()}, checkpoint)
    with checkpoint.open("rb") as file:
        os.fsync(file.fileno())  # else the disk would still be at it during the export


def _export(checkpoint: Path, repository: Path, rows: int) -> None:
    with torch.device("meta"):
        table = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=DIM, feature_names=["x"])
        module = EmbeddingBagCollection(tables=[table])
    before = _peak_bytes()
    stored = start = time.perf_counter()

    def watch(progress: Progress) -> None:
        nonlocal stored
        if progress.step == "parity":
            stored = time.perf_counter()

    config = ExportConfig(trained_memory_bytes=0)  # the model itself is not run: it would be loaded
    export_model(module, repository, "m", config, checkpoint=checkpoint, progress=watch)
    seconds = time.perf_counter() - start
    figures = {"seconds": seconds, "storing_s": stored - start, "peak_bytes": _peak_bytes() - before}
    print(json.dumps(figures | {"op_rate": _op_rate()}))


def _op_rate() -> float:
    """Bytes of float rows a second, over and over the same block: what no export can beat."""
    block = torch.randn(BLOCK_ROWS, DIM)
    calls = OP_BYTES // block.nbytes
    start = time.perf_counter()
    for _ in range(calls):
        torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(block, 8)
    return calls * block.nbytes / (time.perf_counter() - start)


def _peak_bytes() -> int:
    """Of this program; what getrusage says would be its parent's, if that was larger."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        _write(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        _export(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
