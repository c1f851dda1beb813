"""A Parquet file of DLRM_DCN's rows scored by `tbe-serve score-files`, against the engine in a loop and the model."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torchrec import KeyedJaggedTensor
from torchrec.models.dlrm import DLRM_DCN

from benchmarks.measure import Result, interleave, p50, ratio_of
from benchmarks.scores_model import DENSE, WIDTH, dlrm_dcn
from benchmarks.workload import Arrays, Workload, module
from export import ExportConfig, export_model
from serving.batch.batch_scores import BatchScores
from serving.batch.columns import BatchColumns
from serving.batch.folder_output import FolderOutput
from serving.batch.inputs import find_inputs, parts_of
from serving.batch.journal import Journal
from serving.batch.part_scores import Job, score_part
from serving.batch.sources import BundleSource
from serving.engine import Engine

ROWS, BATCH = 16_384, 4096
ROUNDS = 7
# Aims, which the page names: against the engine in a loop, and against the model.
OVER_ENGINE, OVER_EAGER = 0.8, 3.0


def run(workload: Workload, folder: Path) -> Iterator[Result]:
    """Rows a second on one core, once the bundle is loaded; and how many times what the others score."""
    torch.set_num_threads(1)
    model = dlrm_dcn(module()).eval()
    bundle = export_model(model, folder / "repository", "dcn", ExportConfig(scores=True))
    keys = [feature.key for feature in Engine.open(bundle).bundle.manifest.features]
    batches = [workload.request(BATCH, seed) for seed in range(ROWS // BATCH)]
    dense = np.random.default_rng(0).random((len(batches), BATCH, WIDTH), np.float32)
    tables = [_table(keys, request, numbers) for request, numbers in zip(batches, dense, strict=True)]
    day = folder / "day.parquet"
    parquet.write_table(pa.concat_tables(tables), day)
    scores = folder / "scores"
    with Engine.open(bundle) as engine, one_core():
        candidates: Mapping[str, Callable[[], Any]] = {
            "files": lambda: _score_file(engine, bundle, day, scores),
            "engine": lambda: [engine.score(table) for table in tables],
            "eager": lambda: _eager(model, keys, batches, dense),
        }
        expected = np.concatenate([answer["scores"] for answer in candidates["engine"]()]).ravel()
        candidates["files"]()
        written = parquet.read_table(scores)["scores"].to_numpy()
        np.testing.assert_allclose(written, expected, atol=1e-5)
        np.testing.assert_allclose(candidates["eager"](), expected, atol=5e-2)  # its tables are not quantized
        times = interleave(candidates, ROUNDS, warm_up=0)
    yield Result("batch_rows_per_s", ROWS / p50(times["files"]), unit="/s")
    yield ratio_of("batch_over_engine", times["engine"] / times["files"])
    yield ratio_of("batch_over_eager", times["eager"] / times["files"])


@contextmanager
def one_core() -> Iterator[None]:
    """Keep the threads of this process on one core, those of pyarrow among them."""
    cores = os.sched_getaffinity(0)
    try:
        _keep_on({min(cores)})
        yield
    finally:
        _keep_on(cores)


def _keep_on(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def _table(keys: list[str], request: Arrays, dense: Any) -> Any:
    lengths = request.lengths.reshape(len(keys), BATCH)
    values = np.split(request.values, np.cumsum(lengths.sum(axis=1))[:-1])
    columns: dict[str, Any] = {
        key: pa.ListArray.from_arrays(np.cumsum([0, *bags], dtype=np.int32), ids)
        for key, bags, ids in zip(keys, lengths, values, strict=True)
    }
    return pa.table(columns | {DENSE: pa.FixedSizeListArray.from_arrays(dense.ravel(), WIDTH)})


def _score_file(engine: Engine, bundle: Path, day: Path, scores: Path) -> None:
    """What the command does with a file once the bundle is loaded."""
    source = BundleSource(bundle)
    files = find_inputs([str(day)])
    journal = Journal(scores_of={}, inputs=tuple(files), options={})
    output, parts = FolderOutput(scores), parts_of(files)
    job = Job(BatchScores(source, BatchColumns(source.inputs(), {}, ()), "refuse"), False, journal.metadata, output)
    with output.locked():
        output.prepare(journal, parts, skips_bad_rows=False, restart=True)
        for part in parts:
            score_part(engine, job, part, lambda _: None)
        output.publish(journal, parts)


def _eager(model: DLRM_DCN, keys: list[str], batches: list[Arrays], dense: Any) -> Any:
    """The model's own forward, as one would write the loop."""
    scores = []
    with torch.inference_mode():
        for request, numbers in zip(batches, dense, strict=True):
            kjt = KeyedJaggedTensor(keys, torch.from_numpy(request.values), lengths=torch.from_numpy(request.lengths))
            scores.append(model(torch.from_numpy(numbers), kjt).numpy())
    return np.concatenate(scores).ravel()
