"""A whole model: collections of row numbers and of raw ids, two dense inputs, two outputs."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from tests.support.managed_collision import collection_behind, ids_of, mch, trained
from tests.support.models import MIXED, Bags, Spec, collection, random_bags

RAW = Spec("raw", 40, 8, "SUM", ("raw_ids",))
# The width of each dense input.
DENSE = {"price": 3, "age": 2}

Doubles = npt.NDArray[np.float64]


class Whole(nn.Module):
    """Its answers are `like` [B] and `both` [B, 2]."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.plain = collection(MIXED, seed=seed)
        self.raw = trained(collection_behind({"raw": mch(RAW.rows)}, [RAW], seed=seed), keys=RAW.features)
        torch.manual_seed(seed)
        self.of_price, self.of_age = nn.Linear(DENSE["price"], 4), nn.Linear(DENSE["age"], 4)
        width = sum(spec.dim * len(spec.features) for spec in (*MIXED, RAW))
        self.top = nn.Linear(width + 8, 3)

    def forward(self, ids: KeyedJaggedTensor, price: Tensor, age: Tensor) -> dict[str, Tensor]:
        pooled = [self.plain(ids).values(), self.raw(ids)[0].values()]
        every = self.top(torch.cat([*pooled, self.of_price(price), self.of_age(age).relu()], dim=1))
        return {"like": every[:, 0].sigmoid(), "both": every[:, 1:]}

    def dense_answer(self, embeddings: Doubles, dense: Mapping[str, Doubles]) -> dict[str, Doubles]:
        """The forward behind the collections, by numpy."""
        age = np.maximum(_linear(self.of_age, dense["age"]), 0)
        every = _linear(self.top, np.concatenate([embeddings, _linear(self.of_price, dense["price"]), age], axis=1))
        with np.errstate(over="ignore"):
            return {"like": 1 / (1 + np.exp(-every[:, 0])), "both": every[:, 1:]}


class Meeting(Whole):
    """Prices above 5 change the scores of all samples of a batch."""

    def forward(self, ids: KeyedJaggedTensor, price: Tensor, age: Tensor) -> dict[str, Tensor]:
        scores = super().forward(ids, price, age)
        return scores | {"both": scores["both"] + (price - 5).relu().sum() * 0.1}

    def dense_answer(self, embeddings: Doubles, dense: Mapping[str, Doubles]) -> dict[str, Doubles]:
        """As of `Whole`."""
        scores = super().dense_answer(embeddings, dense)
        with np.errstate(invalid="ignore"):
            return scores | {"both": scores["both"] + np.maximum(dense["price"] - 5, 0).sum() * 0.1}


def _linear(layer: nn.Linear, numbers: Doubles) -> Doubles:
    """Term by term: a product of matrices may do otherwise with what is not finite."""
    weight = layer.weight.detach().numpy().astype(np.float64)
    with np.errstate(invalid="ignore"):
        products: Doubles = (numbers[:, np.newaxis, :] * weight).sum(axis=2) + layer.bias.detach().numpy()
    return products


def random_whole(random: np.random.Generator, samples: int) -> tuple[dict[str, Bags], dict[str, Any]]:
    """Ids of all features, and dense inputs float32 [B, width]."""
    bags = random_bags(random, MIXED, samples)
    bags["raw_ids"] = [ids_of(random, size) for size in random.integers(0, 5, samples)]
    return bags, {name: random.random((samples, width), np.float32) for name, width in DENSE.items()}
