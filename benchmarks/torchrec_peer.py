"""TorchRec's own way to an inference module: quantize_inference_model, shard_quant_model, trace, script.

It cuts quantized tables in three of the six ways. On CPU one of these, column-wise, takes the bytes that pad a row
for columns, and answers 80 numbers for 64: that leaves two. It also drops the tables' weights on the way, so they are
filled in from a bundle afterwards: both sides then read the same bytes.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import global_settings
from torchrec.distributed.planner import ParameterConstraints
from torchrec.fx import Tracer
from torchrec.inference.modules import quantize_inference_model, shard_quant_model

from benchmarks.workload import Arrays
from serving.bundle.load import Bundle, weights_path

SHARDING_TYPES = ("table_wise", "row_wise")


class _PlainTensors(nn.Module):
    """TorchRec's types do not load in another process: values and lengths in, embeddings out."""

    def __init__(self, sharded: nn.Module, features: list[str]) -> None:
        super().__init__()
        self.sharded = sharded
        self.features = features

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Embeddings [B, D] for values int64 [N] and lengths int64 [F·B]."""
        kjt = KeyedJaggedTensor(keys=self.features, values=values, lengths=lengths)
        pooled: torch.Tensor = self.sharded(kjt).values()
        return pooled


def build(module: EmbeddingBagCollection, bundle: Bundle, kind: str, ranks: int, request: Arrays) -> tuple[Any, Any]:
    """The scripted module, and the one it came from, which answers {feature: embeddings}.

    Args:
        module: the trained tables.
        bundle: of the same tables on one rank.
        kind: one of SHARDING_TYPES.
        ranks: how many.
        request: any; the sharded module works out its input dist when it is first called.
    """
    features = [feature.name for feature in bundle.manifest.features]
    with _on_cpu():
        quantized = quantize_inference_model(nn.Sequential(module))
        constraints = {
            table.name: ParameterConstraints(sharding_types=[kind], compute_kernels=["quant"])
            for table in bundle.manifest.tables
        }
        sharded, plan = shard_quant_model(
            quantized, world_size=ranks, compute_device="cpu", sharding_device="cpu", constraints=constraints
        )
        _fill(sharded, plan.plan["0"], bundle)
        plain = _PlainTensors(sharded, features)
        plain(torch.from_numpy(request.values), torch.from_numpy(request.lengths).long())
        graph = Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"]).trace(plain)
        scripted = torch.jit.script(torch.fx.GraphModule(plain, graph))
    return scripted, lambda request: _by_feature(sharded, features, request)


def _by_feature(sharded: nn.Module, features: list[str], request: Arrays) -> dict[str, torch.Tensor]:
    kjt = KeyedJaggedTensor(
        keys=features, values=torch.from_numpy(request.values), lengths=torch.from_numpy(request.lengths).long()
    )
    answer: dict[str, torch.Tensor] = sharded(kjt).to_dict()
    return answer


def _fill(sharded: nn.Module, plan: Any, bundle: Bundle) -> None:
    """Copy each shard's rows: scale and bias, then the codes of its columns; their rows are padded behind that."""
    whole = np.memmap(weights_path(bundle.path, bundle.manifest, 0), np.uint8, mode="r")
    tables = {table.name: table for table in bundle.manifest.tables}
    offsets = {shard.table: shard.offset_bytes for shard in bundle.manifest.plan.shards}
    tbes = [module for module in sharded.modules() if isinstance(module, IntNBitTableBatchedEmbeddingBagsCodegen)]
    for rank, tbe in enumerate(tbes):
        weights = [rows for rows, _ in tbe.split_embedding_weights(split_scale_shifts=False)]
        for spec, rows in zip(tbe.embedding_specs, weights, strict=True):
            table = tables[spec[0]]
            stored = whole[offsets[table.name] :][: table.rows * table.row_bytes].reshape(table.rows, -1)
            (top,) = (
                shard.shard_offsets[0]
                for shard in plan[table.name].sharding_spec.shards
                if shard.placement.rank() == rank
            )
            rows.copy_(torch.from_numpy(stored[top : top + len(rows)]))


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """TorchRec's global that lets inference sharding run without a GPU, put back afterwards; and less noise."""
    before = global_settings.get_propogate_device()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    global_settings.set_propogate_device(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        global_settings.set_propogate_device(before)
        logging.disable(disabled)
