"""The formats of a dense part: TorchScript, an exported program, and native code of AOTInductor.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.compilers [--aoti] [pooled] [sequences] [layers]

For each model: how long a process takes until it has scored once, and calls of several numbers of samples. All
formats compute the same graph and take turns. `--aoti` needs a C++ compiler.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM

from benchmarks.measure import Result, interleave, p50, ratio_of
from benchmarks.sequences_workload import SequencesWorkload
from export import DenseCompiler, ExportConfig, export_model
from serving.bundle.load import open_bundle
from serving.lookup.dense_program import DenseProgram
from serving.lookup.program import load_fbgemm
from serving.requests.jagged_inputs import zero_jagged
from serving.requests.schema import scoring_schema

SIZES = (1, 16, 128, 500)
ROUNDS, REPEATS, LOADS = 30, 5, 1
AOTI = "--aoti"
CONFIG = ExportConfig(scores=True, compile=DenseCompiler.AOTI if AOTI in sys.argv else None)
# Ids in each bag of a sequence.
IDS = 25
TABLES, ROWS, DIM, WIDTH = 26, 100, 64, 13


def main() -> None:
    """Print how long each format takes, and the time of each divided by that of TorchScript."""
    torch.set_num_threads(1)
    load_fbgemm()
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name in sys.argv[1:] if name != AOTI]
        for name in names or MODELS:
            bundle = MODELS[name](Path(folder) / name)
            for result in (*_cold(name, bundle), *_warm(name, bundle)):
                print(f"{result.name}: {result.shown}", flush=True)


def _dlrm(repository: Path, tables: int, dense_layers: list[int], over_layers: list[int]) -> Path:
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{n}"])
        for n in range(tables)
    ]
    model: nn.Module = DLRM(EmbeddingBagCollection(tables=configs), WIDTH, [*dense_layers, DIM], [*over_layers, 1])
    return export_model(model.eval(), repository, "m", CONFIG)


def _sequences(repository: Path) -> Path:
    workload = SequencesWorkload.make({128: 2}, ROWS)
    return export_model(workload.model, repository, "m", CONFIG, example=workload.example())


MODELS: Mapping[str, Callable[[Path], Path]] = {
    "pooled": lambda repository: _dlrm(repository, TABLES, [512, 256], [512, 512, 256]),
    "sequences": _sequences,
    "layers": lambda repository: _dlrm(repository, 4, [1024, 1024], [2048, 2048, 1024]),
}


def _programs(bundle: Path) -> dict[str, DenseProgram]:
    opened = open_bundle(bundle)
    part = opened.manifest.dense_part
    assert part is not None
    schema = scoring_schema(opened.manifest, part)
    return {file.format.value.lower(): DenseProgram(opened, schema, file) for file in part.files_by_speed}


def _cold(name: str, bundle: Path) -> list[Result]:
    """Seconds of the processor until a process that has torch has loaded a format, and scored once."""
    part = open_bundle(bundle).manifest.dense_part
    assert part is not None
    seconds: dict[str, list[float]] = {}
    for _ in range(LOADS):
        for file in part.files_by_speed:
            command = [sys.executable, "-c", _LOAD, str(bundle), file.name, file.format.value]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            seconds.setdefault(file.format.value.lower(), []).append(json.loads(printed))
    return [Result(f"{name}_{format_}_load_s", median(times)) for format_, times in seconds.items()]


_LOAD = """
import sys, time
from pathlib import Path
from benchmarks.compilers import load
print(load(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
"""


def load(bundle: Path, name: str, format_: str) -> float:
    """Seconds of the processor until one file of a bundle has scored once, in this process."""
    torch.set_num_threads(1)
    load_fbgemm()
    opened = open_bundle(bundle)
    part = opened.manifest.dense_part
    assert part is not None
    (file,) = (file for file in part.files_by_speed if (file.name, file.format.value) == (name, format_))
    schema = scoring_schema(opened.manifest, part)
    started = time.process_time()
    DenseProgram(opened, schema, file)
    return time.process_time() - started


def _warm(name: str, bundle: Path) -> list[Result]:
    """Calls of each format, and their time divided by that of TorchScript."""
    programs = _programs(bundle)
    results: list[Result] = []
    calls: dict[str, Callable[..., Any]] = {format_: program._run for format_, program in programs.items()}
    for samples in SIZES:
        embeddings, inputs = _inputs(bundle, samples)
        expected = [*calls["torchscript"](embeddings, inputs).values()]
        for call in calls.values():
            for numbers, expected_numbers in zip(call(embeddings, inputs).values(), expected, strict=True):
                np.testing.assert_allclose(numbers, expected_numbers, rtol=0, atol=1e-4)
        candidates = {format_: partial(call, embeddings, inputs) for format_, call in calls.items()}
        times = [interleave(candidates, ROUNDS, warm_up=3) for _ in range(REPEATS)]
        middle = [{format_: p50(seconds) for format_, seconds in repeat.items()} for repeat in times]
        results += [
            Result(f"{name}_{format_}_b{samples}_s", median(repeat[format_] for repeat in middle))
            for format_ in calls
        ]
        results += [
            ratio_of(
                f"{name}_{format_}_over_torchscript_b{samples}",
                (float(np.median(repeat[format_] / repeat["torchscript"])) for repeat in times),
            )
            for format_ in calls
            if format_ != "torchscript"
        ]
    return results


def _inputs(bundle: Path, samples: int) -> tuple[Any, list[Any]]:
    """Random embeddings and dense inputs, and bags of `IDS` ids."""
    manifest = open_bundle(bundle).manifest
    part = manifest.dense_part
    assert part is not None
    random = np.random.default_rng(0)
    width = sum(table.dim for table in manifest.feature_tables if not table.is_sequence)
    dense = [
        random.random((samples, *dense_input.shape)).astype(dense_input.dtype.numpy) for dense_input in part.by_sample
    ]
    embeddings = random.standard_normal((samples, width)).astype(manifest.output_dtype.numpy)
    return embeddings, [*dense, *zero_jagged(manifest, part, samples, IDS)]


if __name__ == "__main__":
    main()
