"""Does the time until a model is ready depend on the size of its tables, and what does it take to verify them?"""

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from benchmarks.measure import Result, ratio
from export import ExportConfig, WeightDtype, export_model
from serving.model.config_file import apply_settings, read_config, settings_of, write_config
from serving.server import Ports, run_server

DIM = 64
SIZES_BYTES = {"2mb": 2_000_000, "2gb": 2_000_000_000}
REPEATS = 4


def run(folder: Path) -> list[Result]:
    """Start a server on one model of 2 MB and on one of 2 GB, in turn, with the weights out of the page cache.

    Without comparing the weights with their digests, and, of the larger, with.
    """
    bundles = {name: _export(folder / name / "repository", size) for name, size in SIZES_BYTES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in (*bundles, "2gb_verified")}
    for _ in range(REPEATS):
        for name, bundle in bundles.items():
            seconds[name].append(_seconds_until_ready(bundle, verify=False))
        seconds["2gb_verified"].append(_seconds_until_ready(bundles["2gb"], verify=True))
    best = {name: float(np.min(times)) for name, times in seconds.items()}
    return [
        *(Result(f"ready_{name}_s", value) for name, value in best.items()),
        Result("ready_2gb_minus_2mb_s", best["2gb"] - best["2mb"]),
        ratio("ready_2gb_over_2mb", best["2gb"] / best["2mb"]),
        ratio("ready_2gb_verified_over_2gb", best["2gb_verified"] / best["2gb"]),
        Result("verified", SIZES_BYTES["2gb"] / (best["2gb_verified"] - best["2gb"]), unit="B/s"),
    ]


def _export(repository: Path, size_bytes: int) -> Path:
    table = EmbeddingBagConfig(
        name="t", num_embeddings=size_bytes // (4 * DIM), embedding_dim=DIM, feature_names=["x"]
    )
    torch.manual_seed(0)
    module = EmbeddingBagCollection(tables=[table])
    return export_model(module, repository, "m", ExportConfig(dtype={"t": WeightDtype.FP32}))


def _seconds_until_ready(bundle: Path, *, verify: bool) -> float:
    config = read_config(bundle.parent)
    apply_settings(config, replace(settings_of(config), verify_weights=verify))
    write_config(bundle.parent, config)
    _evict(bundle / "weights.0.bin")
    start = time.perf_counter()
    with run_server(
        bundle.parent.parent, Ports(grpc=0, http=0, operations=0), log=bundle.parent.parent.parent / "log"
    ):
        return time.perf_counter() - start


def _evict(path: Path) -> None:
    """Ask the kernel to drop the file's pages."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
