"""Sequences, a row for each id: what our backend adds to Triton, against one that returns as many bytes."""

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import tritonclient.grpc as triton
from torchrec import EmbeddingCollection, EmbeddingConfig

from benchmarks.measure import Result, interleave, p50, ratio
from benchmarks.model_memory import in_memory
from benchmarks.perf_analyzer import PerfAnalyzer, write_requests
from benchmarks.served import do_nothing_name, inputs_of, publish_do_nothing
from benchmarks.workload import Arrays
from export import ExportConfig, export_model
from serving.bundle.tensor_names import SEQUENCES
from serving.engine import Engine
from serving.model.settings import ServingSettings
from serving.requests.types import Tensors
from serving.server import Ports, Server, run_server

NAME = "sequences"
# What a user did last, in four ways: pages seen, bought, searched, left.
FEATURES, IDS, ROWS, DIM = 4, 50, 100_000, 64
REQUESTS = 16
ROUNDS = {1: 1000, 16: 600, 128: 150}
CLIENTS, SECONDS, TURNS = 32, 1.0, 3


def run(folder: Path) -> Iterator[Result]:
    """One client, one request at a time, both models in turn; then many clients with one sample each."""
    folder.mkdir()
    torch.set_num_threads(1)
    repository = folder / "repository"
    config = ExportConfig(serving=ServingSettings(max_busy_ms=10_000))
    engine = in_memory(export_model(module(), repository, NAME, config))
    for samples in ROUNDS:
        publish_do_nothing(repository, samples, (1, samples * FEATURES * IDS * DIM), like=NAME, output=SEQUENCES)
    models = [NAME, *map(do_nothing_name, ROUNDS)]
    with (
        run_server(repository, Ports(grpc=0, http=0, operations=0), models=models) as server,
        triton.InferenceServerClient(server.grpc) as client,
    ):
        for samples, rounds in ROUNDS.items():
            requests = [request(samples, seed) for seed in range(REQUESTS)]
            candidates = _candidates(client, engine, requests, samples)
            times = {name: p50(seconds) for name, seconds in interleave(candidates, rounds).items()}
            yield from (Result(f"sequences_{name}_p50_b{samples}_s", seconds) for name, seconds in times.items())
            yield ratio(f"sequences_over_donothing_p50_b{samples}", times["served"] / times["donothing"])
            added = (times["served"] - times["donothing"]) / times["inprocess"]
            yield ratio(f"sequences_minus_donothing_over_inprocess_p50_b{samples}", added)
        yield from _many(server, folder)


def module() -> EmbeddingCollection:
    """A table for each feature; random rows, the same ones every time."""
    torch.manual_seed(0)
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=f"t{n}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{n}"])
            for n in range(FEATURES)
        ]
    )


def request(samples: int, seed: int) -> Arrays:
    """Uniform ids: the hardest on caches."""
    lengths = np.full(FEATURES * samples, IDS, np.int32)
    return Arrays(np.random.default_rng(seed).integers(0, ROWS, int(lengths.sum())), lengths)


def _candidates(client: Any, engine: Engine, requests: list[Arrays], samples: int) -> dict[str, Callable[[], Any]]:
    inputs = [inputs_of(request) for request in requests]
    tensors = [Tensors(None, request.values, request.lengths, outputs=(SEQUENCES,)) for request in requests]
    nothing = do_nothing_name(samples)
    answer = client.infer(NAME, inputs[0]).as_numpy(SEQUENCES)
    np.testing.assert_array_equal(answer.ravel(), engine.outputs(tensors[0])[SEQUENCES].ravel())
    assert client.infer(nothing, inputs[0]).as_numpy(SEQUENCES).nbytes == answer.nbytes
    ours, nothing_inputs, local = cycle(inputs), cycle(inputs), cycle(tensors)
    return {
        "served": lambda: client.infer(NAME, next(ours)).as_numpy(SEQUENCES),
        "donothing": lambda: client.infer(nothing, next(nothing_inputs)).as_numpy(SEQUENCES),
        "inprocess": lambda: engine.outputs(next(local)),
    }


def _many(server: Server, folder: Path) -> Iterator[Result]:
    """The models in turn, and the median of their rates."""
    write_requests(folder / "b1.json", [request(1, seed) for seed in range(REQUESTS)])
    load = PerfAnalyzer.fetch(folder / "perf_analyzer")
    rates_by_model: dict[str, list[float]] = {NAME: [], do_nothing_name(1): []}
    for _ in range(TURNS):
        for model, rates in rates_by_model.items():
            rates.append(load.run(server.grpc, model, folder / "b1.json", CLIENTS, SECONDS).answers_per_s)
    served, nothing = map(median, rates_by_model.values())
    yield Result(f"sequences_served_c{CLIENTS}_b1", served, unit="/s")
    yield Result(f"sequences_donothing_c{CLIENTS}_b1", nothing, unit="/s")
    yield ratio(f"sequences_over_donothing_rps_c{CLIENTS}_b1", served / nothing)
