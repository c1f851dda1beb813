"""Whole models with scores, and what they answer by themselves."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN

from export import ExportConfig, Sharding, WeightDtype
from tests.support.models import Bags, Spec, collection, flat
from tests.support.position_weights import LONGEST, positioned

WIDTH = 13
EXACT = ExportConfig(scores=True, dtype={"*": WeightDtype.FP32})
# Of the inputs of `by_position`, which no nn.Linear takes.
WIDTHS = {"price": 2}
EVEN = tuple(Spec(f"t{number}", 100 + number, 16, "SUM", (f"f{number}",)) for number in range(4))
LAYERS: dict[str, Any] = {"dense_arch_layer_sizes": [32, 16], "over_arch_layer_sizes": [32, 1]}
# Its keys are read by tables of both collections, and are not in the order of either.
QUERY = (Spec("user", 500, 16, "SUM", ("user_id", "country")), Spec("word", 1000, 24, "MEAN", ("words",)))
ITEM = (Spec("item", 300, 8, "SUM", ("item_id",)), Spec("seen", 300, 12, "MEAN", ("words", "item_id")))


class TwoTower(nn.Module):
    """Two collections, no dense input, two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.query = collection(QUERY, seed=1)
        self.item = collection(ITEM, seed=2)
        self.query_tower, self.item_tower = nn.Linear(56, 8), nn.Linear(32, 8)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        query = self.query(ids)
        queries = self.query_tower(torch.cat([query["words"], query["country"], query["user_id"]], dim=1))
        items = self.item_tower(self.item(ids).values())
        return {"match": (queries * items).sum(dim=1) * self.temperature, "queries": queries}


class Positioned(nn.Module):
    """A collection behind position weights, in a part of the model; a tuple of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Sequential(positioned())
        self.over = nn.Linear(128 + 2, 3)

    def forward(self, price: Tensor, ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        logits = self.over(torch.cat([price.log1p(), self.sparse(ids).values()], dim=1))
        return logits[:, 0], logits[:, 1:].softmax(dim=1)


class Centred(nn.Module):
    """The score of a sample depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(EVEN)
        self.over = nn.Linear(64, 1)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.over(self.bags(ids).values())
        return logits - logits.mean(dim=0)


class Surges(Centred):
    """The score of a sample depends on the others where a dense input is above 5."""

    def forward(self, ids: KeyedJaggedTensor, dense_features: Tensor) -> Tensor:  # type: ignore[override]
        logits: Tensor = self.over(self.bags(ids).values())
        return logits + torch.relu(dense_features - 5).sum() * 0.1


class Relative(Centred):
    """The score of a sample depends on the others where a dense input is above 1."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(64 + WIDTH, 1)

    def forward(self, ids: KeyedJaggedTensor, dense_features: Tensor) -> Tensor:  # type: ignore[override]
        relative = dense_features / dense_features.abs().max().clamp(min=1)
        logits: Tensor = self.over(torch.cat([self.bags(ids).values(), relative], dim=1))
        return logits


# The two towers' tables, cut over two hosts and a router.
ON_HOSTS = replace(
    EXACT,
    sharding=Sharding(
        ranks=3,
        ranks_per_host=1,
        types={"user": "row_wise", "word": "table_wise", "item": "column_wise", "seen": "data_parallel"},
        min_partition={"item": 4},
    ),
)


def even() -> EmbeddingBagCollection:
    """Four tables of one dim, as torchrec's models take them."""
    return collection(EVEN)


def dlrm() -> DLRM:
    """For `--model`, too."""
    torch.manual_seed(0)
    return DLRM(even(), dense_in_features=WIDTH, **LAYERS)


def dlrm_dcn() -> DLRM_DCN:
    torch.manual_seed(0)
    return DLRM_DCN(even(), dense_in_features=WIDTH, dcn_num_layers=2, dcn_low_rank_dim=8, **LAYERS)


def deepfm() -> SimpleDeepFMNN:
    torch.manual_seed(0)
    return SimpleDeepFMNN(
        num_dense_features=WIDTH, embedding_bag_collection=even(), hidden_layer_size=20, deep_fm_dimension=5
    )


def two_tower() -> TwoTower:
    torch.manual_seed(0)
    return TwoTower()


def by_position() -> Positioned:
    torch.manual_seed(0)
    return Positioned()


MODELS = (dlrm, dlrm_dcn, deepfm, two_tower, by_position)


def trained(module: nn.Module, steps: int = 3) -> nn.Module:
    """After a few steps of training towards random labels."""
    random = np.random.default_rng(0)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for _ in range(steps):
        bags, dense = random_request(module, random, 32)
        answers = _answer(module.train(), bags, dense)
        loss = sum((answer - torch.rand_like(answer)).square().mean() for answer in answers.values())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    return module.eval()


def random_request(
    module: nn.Module, random: np.random.Generator, samples: int
) -> tuple[dict[str, Bags], dict[str, npt.NDArray[np.float32]]]:
    """Ids of all features, and dense inputs."""
    rows: dict[str, int] = {}
    for part in module.modules():
        for config in part.embedding_bag_configs() if isinstance(part, EmbeddingBagCollection) else ():
            for key in config.feature_names:
                rows[key] = min(config.num_embeddings, rows.get(key, config.num_embeddings))
    bags: dict[str, Bags] = {
        key: [
            random.integers(0, count, size).tolist() for size in random.integers(0, LONGEST.get(key, 5) + 1, samples)
        ]
        for key, count in rows.items()
    }
    widths = {**WIDTHS, "dense_features": WIDTH}
    arguments = inspect.signature(module.forward).parameters
    return bags, {
        name: random.random((samples, width), np.float32) for name, width in widths.items() if name in arguments
    }


def own_scores(
    module: nn.Module, bags: Mapping[str, Bags], dense: Mapping[str, npt.NDArray[np.float32]]
) -> dict[str, npt.NDArray[np.float32]]:
    """What a model answers by itself, by the names that its scores are served by."""
    with torch.no_grad():
        return {name: value.numpy() for name, value in _answer(module.eval(), bags, dense).items()}


def _answer(
    module: nn.Module, bags: Mapping[str, Bags], dense: Mapping[str, npt.NDArray[np.float32]]
) -> dict[str, Tensor]:
    values, lengths = flat(bags)
    ids = KeyedJaggedTensor(list(bags), torch.from_numpy(values), lengths=torch.from_numpy(lengths))
    name = "ids" if "ids" in inspect.signature(module.forward).parameters else "sparse_features"
    answer: Any = module(**{name: ids}, **{name: torch.from_numpy(numbers) for name, numbers in dense.items()})
    if isinstance(answer, Tensor):
        return {"scores": answer}
    return dict(answer) if isinstance(answer, dict) else {f"scores_{n}": tensor for n, tensor in enumerate(answer)}
