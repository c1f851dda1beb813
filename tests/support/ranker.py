"""A whole model for tests: three features, two dense inputs, and answers of two shapes by name."""

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from tests.support.models import SUM, collection


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = collection(SUM)
        self.of_user = nn.Linear(3, 4)
        self.of_item = nn.Linear(2, 4)
        self.top = nn.Linear(28 + 8, 3)

    def forward(self, features: KeyedJaggedTensor, user: Tensor, item: Tensor) -> dict[str, Tensor]:
        pooled = self.embeddings(features).values()
        every = self.top(torch.cat([pooled, self.of_user(user), self.of_item(item).relu()], dim=1))
        return {"like": every[:, 0].sigmoid(), "both": every[:, 1:]}


def ranker() -> Ranker:
    torch.manual_seed(0)
    return Ranker()


def ranker_of_ids() -> nn.Module:
    """The same without dense inputs, and with one answer."""
    torch.manual_seed(0)
    return _OfIds()


class _OfIds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = collection(SUM)
        self.top = nn.Linear(28, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.top(self.embeddings(features).values())
        return logits.squeeze(1)


class Mixing(_OfIds):
    """It compares the samples of a request with one another."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        logits = super().forward(features)
        return logits - logits.mean()


def mixing() -> nn.Module:
    torch.manual_seed(0)
    return Mixing()
