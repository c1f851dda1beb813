"""What our own code adds to FBGEMM: the engine against the bare TBE module, on the same mapped bytes."""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

from benchmarks.measure import Result, interleave, p50, ratio
from benchmarks.model_memory import in_memory
from benchmarks.workload import Arrays, Workload
from serving.bundle.tensor_names import EMBEDDINGS
from serving.engine import Engine
from serving.requests.types import Embeddings, Tensors
from serving.tables.table_files import TableFiles

Lookup = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

REQUESTS = 16
ROUNDS = {1: 2000, 128: 400}
# What a caller waits for who asks from time to time: silence before each call.
COLD_ROUNDS, PAUSE_S = 400, 0.005


def run(workload: Workload) -> list[Result]:
    """Check and lookup of a request in arrays ÷ the TBE call alone, for 1 and 128 samples; and cold, for 1."""
    torch.set_num_threads(1)
    engine = in_memory(workload.bundle)
    tbe = bare_tbe(engine)
    operator = bare_operator(tbe)
    results = []
    for samples, rounds in ROUNDS.items():
        requests = [workload.request(samples, seed) for seed in range(REQUESTS)]
        prepared = [indices_and_offsets(request) for request in requests]
        for request, (indices, offsets) in zip(requests, prepared, strict=True):
            for candidate in (tbe, operator):
                np.testing.assert_array_equal(lookup(engine, request), candidate(indices, offsets).numpy())
        candidates = _candidates(engine, tbe.forward, operator, requests, prepared)
        times = {name: p50(seconds) for name, seconds in interleave(candidates, rounds).items()}
        results += [Result(f"{name}_p50_b{samples}_s", seconds) for name, seconds in times.items()]
        for limit in ("tbe", "operator"):
            results.append(ratio(f"inprocess_over_{limit}_b{samples}", times["inprocess"] / times[limit]))
        if samples == 1:
            cold = {
                name: p50(seconds) for name, seconds in interleave(candidates, COLD_ROUNDS, pause_s=PAUSE_S).items()
            }
            results += [Result(f"cold_{name}_p50_b{samples}_s", seconds) for name, seconds in cold.items()]
            results.append(ratio(f"cold_inprocess_over_operator_b{samples}", cold["inprocess"] / cold["operator"]))
    return results


def _candidates(
    engine: Engine,
    tbe: Lookup,
    operator: Lookup,
    requests: list[Arrays],
    prepared: list[tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, Callable[[], Any]]:
    ours, tbe_inputs = cycle(requests), cycle(prepared)
    alone = cycle(prepared)
    return {
        "inprocess": lambda: lookup(engine, next(ours)),
        "tbe": lambda: tbe(*next(tbe_inputs)),
        "operator": lambda: operator(*next(alone)),
    }


def lookup(engine: Engine, request: Arrays) -> Embeddings:
    """What the backend does for one request, without Triton."""
    return engine.outputs(Tensors(None, request.values, request.lengths))[EMBEDDINGS]


def bare_tbe(engine: Engine) -> IntNBitTableBatchedEmbeddingBagsCodegen:
    """FBGEMM's inference module over the bundle's own bytes, without a bounds check."""
    tables = engine.bundle.manifest.tables
    tbe = IntNBitTableBatchedEmbeddingBagsCodegen(
        [
            (table.name, table.rows, table.dim, SparseType(table.dtype.value.lower()), EmbeddingLocation.HOST)
            for table in tables
        ],
        device="cpu",
        pooling_mode=PoolingMode.SUM,
        output_dtype=SparseType.FP32,
        row_alignment=1,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    (tbe.weights_host,) = TableFiles(engine.bundle.path, engine.bundle.manifest).tensors
    tbe.weights_physical_offsets = [shard.offset_bytes for shard in engine.bundle.manifest.plan.shards]
    tbe.initialize_logical_weights_placements_and_offsets()
    tbe.weight_initialized = True
    return tbe


def bare_operator(tbe: IntNBitTableBatchedEmbeddingBagsCodegen) -> Lookup:
    """The one operator that the module calls, with its arguments laid out beforehand: the limit."""
    return partial(
        _call_operator,
        (
            *(tbe.weights_host, tbe.weights_uvm, tbe.weights_placements, tbe.weights_offsets, tbe.weights_tys),
            *(tbe.D_offsets, tbe.total_D, tbe.max_int2_D, tbe.max_int4_D, tbe.max_int8_D),
            *(tbe.max_float16_D, tbe.max_float32_D),
        ),
    )


def _call_operator(fixed: tuple[Any, ...], indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    pooled: torch.Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function.default(
        *fixed, indices, offsets, int(PoolingMode.SUM), None, SparseType.FP32.as_int(), row_alignment=1
    )
    return pooled


def indices_and_offsets(request: Arrays | Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = np.concatenate([[0], np.cumsum(request.lengths)])
    return torch.from_numpy(request.values), torch.from_numpy(offsets)
