"""A whole model to serve: torchrec's DLRM_DCN with a small dense part, and that part for other servers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM_DCN

from serving.torchscript import torchscript

# The dense inputs of its forward: their name, and columns.
DENSE = "dense_features"
WIDTH = 13
_STEPS = 100
_BATCH = 256


def dlrm_dcn(tables: EmbeddingBagCollection) -> DLRM_DCN:
    """The same dense part every time, not trained."""
    torch.manual_seed(0)
    dim = tables.embedding_bag_configs()[0].embedding_dim
    return DLRM_DCN(
        tables,
        dense_in_features=WIDTH,
        dense_arch_layer_sizes=[64, dim],
        over_arch_layer_sizes=[64, 1],
        dcn_num_layers=2,
        dcn_low_rank_dim=16,
    )


def train(model: DLRM_DCN, requests: Sequence[KeyedJaggedTensor]) -> None:
    """Some steps of the dense part, towards labels that ids and dense inputs decide: scores then differ by both."""
    torch.manual_seed(1)
    pooled = [model.sparse_arch(request).detach() for request in requests]
    taste, weight = torch.randn(pooled[0].shape[1:]), torch.randn(WIDTH)
    dense_part = nn.ModuleList([model.dense_arch, model.inter_arch, model.over_arch])
    optimizer = torch.optim.Adam(dense_part.parameters(), lr=3e-3)
    for step in range(_STEPS):
        embeddings = pooled[step % len(pooled)]
        dense = torch.rand(len(embeddings), WIDTH)
        logits = (embeddings * taste).sum((1, 2)) / embeddings.std() / taste.numel() ** 0.5 + (dense - 0.5) @ weight
        scores = model.over_arch(model.inter_arch(model.dense_arch(dense), embeddings)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, (logits > 0).float())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


class _DensePart(nn.Module):
    """What follows the tables. Its code is torchrec's."""

    def __init__(self, model: DLRM_DCN) -> None:
        super().__init__()
        self.dense_arch, self.inter_arch, self.over_arch = model.dense_arch, model.inter_arch, model.over_arch
        self.tables, self.dim = len(model.sparse_arch.sparse_feature_names), model.sparse_arch.D

    def forward(self, pooled: Tensor, dense: Tensor) -> Tensor:
        sparse = pooled.reshape(-1, self.tables, self.dim)
        scores: Tensor = self.over_arch(self.inter_arch(self.dense_arch(dense), sparse))
        return scores


def save_dense_part(model: DLRM_DCN, path: Path) -> None:
    """As TorchScript, frozen: embeddings [B, D] and dense inputs [B, WIDTH] in, scores [B, 1] out."""
    part = _DensePart(model).eval()
    example = torch.rand(2, part.tables * part.dim), torch.rand(2, WIDTH)
    # torch.jit.script does not compile torchrec's cross network.
    with torchscript():
        traced: torch.jit.ScriptModule = torch.jit.trace(part, example)  # type: ignore[no-untyped-call]
        torch.jit.freeze(traced).save(path)
