"""Whole models: DLRM_DCN's scores, against its lookup and the same dense part in the caller's process."""

from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tritonclient.grpc as triton

from benchmarks import stages
from benchmarks.inprocess import PAUSE_S
from benchmarks.measure import Result, interleave, p50, ratio
from benchmarks.model_memory import in_memory
from benchmarks.scores_model import DENSE, WIDTH, dlrm_dcn
from benchmarks.served import inputs_of
from benchmarks.workload import Arrays, Workload, module
from export import ExportConfig, export_model
from serving.bundle.scores import DenseDtype
from serving.engine import Engine
from serving.lookup.dense_program import DenseProgram
from serving.model.settings import ServingSettings
from serving.requests.schema import ScoringSchema, schema_of
from serving.requests.types import Tensors
from serving.server import Ports, run_server

NAME, NARROW = "dcn", {"bf16": DenseDtype.BF16, "int8": DenseDtype.INT8}
REQUESTS = 16
ROUNDS = {1: 600, 128: 300}
COLD_ROUNDS = 100


def run(workload: Workload, folder: Path) -> list[Result]:
    """One client, one request at a time, all candidates in turn; with 1 and 128 samples.

    `lookup_and_dense` is what a caller does without scores: it looks embeddings up, and has the same compiled dense
    part in its own process, on as many threads as the server has for it, one.
    """
    torch.set_num_threads(1)
    repository, whole = folder / "repository", dlrm_dcn(module())
    for name, dtype in {
        NAME: DenseDtype.FP32,
        **{f"{NAME}_{name}": dtype for name, dtype in NARROW.items()},
    }.items():
        config = ExportConfig(scores=True, dense_dtype=dtype, serving=ServingSettings(max_busy_ms=10_000))
        export_model(whole, repository, name, config)
    engines = {
        name: in_memory(repository / name / "1") for name in (NAME, *(f"{NAME}_{suffix}" for suffix in NARROW))
    }
    results = []
    ports = Ports(grpc=0, http=0, operations=0)
    with run_server(repository, ports) as server, triton.InferenceServerClient(server.grpc) as client:
        for samples, rounds in ROUNDS.items():
            candidates = _candidates(client, engines, workload, samples)
            times = {name: p50(seconds) for name, seconds in interleave(candidates, rounds).items()}
            results += [Result(f"scores_{name}_p50_b{samples}_s", seconds) for name, seconds in times.items()]
            if samples == 1:
                for what, candidate in (("lookup", "lookup"), ("scores", "served")):
                    results += stages.run(server, NAME, what, candidates[candidate])
            cold = interleave(candidates, COLD_ROUNDS, pause_s=PAUSE_S)
            results += [
                Result(f"scores_{name}_cold_p50_b{samples}_s", p50(seconds)) for name, seconds in cold.items()
            ]
            results.append(ratio(f"scores_over_lookup_p50_b{samples}", times["served"] / times["lookup_and_dense"]))
            results.append(ratio(f"scores_over_inprocess_p50_b{samples}", times["served"] / times["inprocess"]))
            results += [
                ratio(f"scores_{name}_over_fp32_p50_b{samples}", times[f"inprocess_{name}"] / times["inprocess"])
                for name in NARROW
            ]
    return results


def _candidates(
    client: Any, engines: Mapping[str, Engine], workload: Workload, samples: int
) -> dict[str, Callable[[], Any]]:
    random = np.random.default_rng(0)
    requests = [workload.request(samples, seed) for seed in range(REQUESTS)]
    dense = [random.random((samples, WIDTH), np.float32) for _ in requests]
    ids = [inputs_of(request) for request in requests]
    whole = [[*id_, _input(numbers)] for id_, numbers in zip(ids, dense, strict=True)]
    served, looked_up, by_hand = cycle(whole), cycle(ids), cycle(list(zip(ids, dense, strict=True)))
    local = {name: cycle(list(zip(requests, dense, strict=True))) for name in engines}
    bundle = engines[NAME].bundle
    schema = schema_of(bundle.manifest, None)
    assert isinstance(schema, ScoringSchema)
    program = DenseProgram(bundle, schema)
    scores, embeddings = [triton.InferRequestedOutput("scores")], [triton.InferRequestedOutput("embeddings")]

    def lookup_and_dense() -> Any:
        inputs, numbers = next(by_hand)
        looked_up = client.infer(NAME, inputs, outputs=embeddings).as_numpy("embeddings")[0]
        return program.score(looked_up, [[numbers]], [samples])[0]["scores"]

    candidates: dict[str, Callable[[], Any]] = {
        "served": lambda: client.infer(NAME, next(served), outputs=scores).as_numpy("scores"),
        "lookup": lambda: client.infer(NAME, next(looked_up), outputs=embeddings).as_numpy("embeddings"),
        "lookup_and_dense": lookup_and_dense,
        "inprocess": lambda: score(engines[NAME], *next(local[NAME])),
    }
    for name in NARROW:
        key = f"{NAME}_{name}"
        candidates[f"inprocess_{name}"] = lambda key=key: score(engines[key], *next(local[key]))  # type: ignore[misc]
    first = client.infer(NAME, whole[0], outputs=scores).as_numpy("scores")[0]
    np.testing.assert_allclose(first, score(engines[NAME], requests[0], dense[0]), rtol=1e-5, atol=1e-6)
    return candidates


def score(engine: Engine, request: Arrays, dense: Any) -> Any:
    """What the backend does for one request, without Triton."""
    tensors = Tensors(None, request.values, request.lengths, outputs=("scores",), dense={DENSE: dense})
    return engine.outputs(tensors)["scores"]


def _input(numbers: Any) -> Any:
    tensor = triton.InferInput(DENSE, [1, *numbers.shape], "FP32")
    tensor.set_data_from_numpy(numbers[np.newaxis])
    return tensor
