"""A ranker over a user's history, and what follows its tables, for other servers.

DIN's target attention (arXiv 1706.06978): a small network weighs each item of the history beside the item that is
scored. Pooled features and dense inputs are beside it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, JaggedTensor, KeyedJaggedTensor

from serving.torchscript import torchscript

# The dense inputs of its forward: their name, and columns.
DENSE, WIDTH = "dense_features", 13
# The most ids of a history.
LONGEST = 50


class Padded(nn.Module):
    """What follows the tables, on histories that are filled up to `LONGEST`, as most code has it."""

    def __init__(self, pooled: int, dim: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.Linear(4 * dim, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())
        self.of_dense = nn.Sequential(nn.Linear(WIDTH, dim), nn.ReLU())
        self.over = nn.Sequential(nn.Linear(pooled + 3 * dim, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, pooled: Tensor, history: Tensor, lengths: Tensor, target: Tensor, dense: Tensor) -> Tensor:
        """Scores [B] of pooled [B, D], history [B, LONGEST, dim], lengths [B], target [B, dim], dense [B, WIDTH]."""
        items = target.unsqueeze(1).expand(-1, history.size(1), -1)
        weights = self.weigh(torch.cat([items, history, items - history, items * history], dim=2))
        is_there = torch.arange(history.size(1), device=history.device) < lengths.unsqueeze(1)
        attended = (weights * history * is_there.unsqueeze(2)).sum(dim=1)
        return self.top(pooled, attended, target, dense)

    def top(self, pooled: Tensor, attended: Tensor, target: Tensor, dense: Tensor) -> Tensor:
        """Scores [B]."""
        scores: Tensor = self.over(torch.cat([pooled, attended, target, self.of_dense(dense)], dim=1))
        return scores.squeeze(1)


class Din(nn.Module):
    """The ranker.

    Args:
        bags: the pooled tables.
        items: the table of items, whose rows the features `history` and `target` read.
        history, target: the names of these features. A sample has one target.
    """

    def __init__(self, bags: EmbeddingBagCollection, items: EmbeddingCollection, history: str, target: str) -> None:
        super().__init__()
        self.bags, self.items, self.history, self.target = bags, items, history, target
        width = sum(config.embedding_dim * len(config.feature_names) for config in bags.embedding_bag_configs())
        torch.manual_seed(0)
        self.dense = Padded(width, items.embedding_dim())

    def forward(self, ids: KeyedJaggedTensor, dense_features: Tensor) -> Tensor:
        """Scores [B]."""
        rows: Mapping[str, JaggedTensor] = self.items(ids)
        history, target = rows[self.history], rows[self.target].to_padded_dense(1)[:, 0]
        scores: Tensor = self.dense(
            self.bags(ids).values(), history.to_padded_dense(LONGEST), history.lengths(), target, dense_features
        )
        return scores


class JaggedDin(Din):
    """The same answers, from the rows that there are, without padding."""

    def forward(self, ids: KeyedJaggedTensor, dense_features: Tensor) -> Tensor:
        """Scores [B]."""
        rows: Mapping[str, JaggedTensor] = self.items(ids)
        history, target = rows[self.history].values(), rows[self.target].to_padded_dense(1)[:, 0]
        lengths = rows[self.history].lengths()
        sample = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
        item = target[sample]
        weights = self.dense.weigh(torch.cat([item, history, item - history, item * history], dim=1))
        attended = torch.zeros_like(target).index_add_(0, sample, weights * history)
        return self.dense.top(self.bags(ids).values(), attended, target, dense_features)


class _BehindRows(nn.Module):
    """As other servers have it: all rows side by side, the history filled up with zeros; its length behind the dense
    inputs.
    """

    def __init__(self, model: Din) -> None:
        super().__init__()
        self.dense, self.dim, self.longest, self.width = model.dense, model.items.embedding_dim(), LONGEST, WIDTH

    def forward(self, rows: Tensor, dense: Tensor) -> Tensor:
        pooled = rows[:, : -(self.longest + 1) * self.dim]
        history = rows[:, pooled.size(1) : -self.dim].reshape(-1, self.longest, self.dim)
        scores: Tensor = self.dense(
            pooled, history, dense[:, self.width], rows[:, -self.dim :], dense[:, : self.width]
        )
        return scores.unsqueeze(1)


def save_behind_rows(model: Din, path: Path) -> None:
    """As TorchScript, frozen: rows [B, D] and dense inputs [B, WIDTH + 1] in, scores [B, 1] out."""
    with torchscript():
        torch.jit.freeze(torch.jit.script(_BehindRows(model).eval())).save(path)


def train(model: Din, requests: Sequence[KeyedJaggedTensor], steps: int = 100) -> None:
    """Some steps of the dense part, towards labels that history, target and dense inputs decide."""
    torch.manual_seed(1)
    for parameter in (*model.bags.parameters(), *model.items.parameters()):
        parameter.requires_grad = False
    weight = torch.randn(WIDTH)
    optimizer = torch.optim.Adam(model.dense.parameters(), lr=3e-3)
    for step in range(steps):
        ids = requests[step % len(requests)]
        rows = model.items(ids)
        history, target = rows[model.history], rows[model.target].values()
        liking = (history.to_padded_dense(LONGEST).sum(1) * target).sum(1)
        dense = torch.rand(len(target), WIDTH)
        logits = liking / liking.std() + (dense - 0.5) @ weight
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids, dense), (logits > 0).float())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
