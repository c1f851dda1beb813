"""A Parquet file of DLRM_DCN's rows scored by `tbe-serve score-files`, against the engine in a loop and the model."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torchrec import KeyedJaggedTensor
from torchrec.models.dlrm import DLRM_DCN

from benchmarks.measure import Result, ratio_of
from benchmarks.scores_model import DENSE, WIDTH, dlrm_dcn
from benchmarks.workload import Arrays, Workload, module
from export import ExportConfig, export_model
from serving.batch.run import score_files
from serving.batch.sources import BundleSource
from serving.engine import Engine

# Rows that the loops score, and how many times the file has them: starting processes is not measured.
ROWS, BATCH, COPIES = 65_536, 4096, 8
ROUNDS = 5
# Aims, which the page names: against the engine in a loop, and against the model.
OVER_ENGINE, OVER_EAGER = 0.8, 3.0


def run(workload: Workload, folder: Path) -> Iterator[Result]:
    """Rows a second on all cores once the bundle is loaded, and how many times what the two loops score.

    `score-files` has a process for each core, and the loops have torch's threads on all cores.
    """
    torch.set_num_threads(1)
    model = dlrm_dcn(module()).eval()
    bundle = export_model(model, folder / "repository", "dcn", ExportConfig(scores=True))
    batches = [workload.request(BATCH, seed) for seed in range(ROWS // BATCH)]
    dense = np.random.default_rng(0).random((len(batches), BATCH, WIDTH), np.float32)
    with Engine.open(bundle) as engine:
        keys = [feature.key for feature in engine.bundle.manifest.features]
        tables = [_table(keys, request, numbers) for request, numbers in zip(batches, dense, strict=True)]
        day, scores = folder / "day.parquet", folder / "scores"
        parquet.write_table(pa.concat_tables(tables * COPIES), day, row_group_size=ROWS // 2)
        rates: Mapping[str, Callable[[], float]] = {
            "files": lambda: _rate_of_files(bundle, day, scores),
            "engine": lambda: _rate(lambda: [engine.score(table) for table in tables]),
            "eager": lambda: _rate(lambda: _eager(model, keys, batches, dense)),
        }
        expected = np.concatenate([engine.score(table)["scores"] for table in tables]).ravel()
        rates["files"]()
        written = parquet.read_table(scores)["scores"].to_numpy()
        np.testing.assert_allclose(written, np.tile(expected, COPIES), atol=1e-5)
        # The tables of the model are not quantized.
        np.testing.assert_allclose(_eager(model, keys, batches, dense), expected, atol=5e-2)
        torch.set_num_threads(os.cpu_count() or 1)
        rounds = [{name: rate() for name, rate in rates.items()} for _ in range(ROUNDS)]
        torch.set_num_threads(1)
    yield Result("batch_rows_per_s", float(np.median([rate["files"] for rate in rounds])), unit="/s")
    yield ratio_of("batch_over_engine", [rate["files"] / rate["engine"] for rate in rounds])
    yield ratio_of("batch_over_eager", [rate["files"] / rate["eager"] for rate in rounds])


def _table(keys: list[str], request: Arrays, dense: Any) -> Any:
    lengths = request.lengths.reshape(len(keys), BATCH)
    values = np.split(request.values, np.cumsum(lengths.sum(axis=1))[:-1])
    columns: dict[str, Any] = {
        key: pa.ListArray.from_arrays(np.cumsum([0, *bags], dtype=np.int32), ids)
        for key, bags, ids in zip(keys, lengths, values, strict=True)
    }
    return pa.table(columns | {DENSE: pa.FixedSizeListArray.from_arrays(dense.ravel(), WIDTH)})


def _rate(score: Callable[[], Any]) -> float:
    """Rows a second of a loop over all rows."""
    start = time.perf_counter()
    score()
    return ROWS / (time.perf_counter() - start)


def _rate_of_files(bundle: Path, day: Path, scores: Path) -> float:
    """Rows a second of what the command does, from when the first rows are scored until the scores are there."""
    times: list[tuple[int, float]] = []

    def progress(done: int, _: int) -> None:
        times.append((done, time.perf_counter()))

    shutil.rmtree(scores, ignore_errors=True)
    workers = os.cpu_count() or 1
    summary = score_files(BundleSource(bundle), [str(day)], scores, workers=workers, progress=progress)
    end = time.perf_counter()
    first_rows, first = next((done, when) for done, when in times if done)
    return (summary.rows - first_rows) / (end - first)


def _eager(model: DLRM_DCN, keys: list[str], batches: list[Arrays], dense: Any) -> Any:
    """The model's own forward, as one would write the loop."""
    scores = []
    with torch.inference_mode():
        for request, numbers in zip(batches, dense, strict=True):
            kjt = KeyedJaggedTensor(keys, torch.from_numpy(request.values), lengths=torch.from_numpy(request.lengths))
            scores.append(model(torch.from_numpy(numbers), kjt).numpy())
    return np.concatenate(scores).ravel()
