"""Models of the call: batches, objects, dicts and defaults in place of tensors."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.models.inputs import (
    DIM,
    POOLED,
    WIDTH,
    NamedModel,
    by_name,
    dense,
    ids,
    named,
    nothing,
    numbers,
    of,
    pooled_ids,
    positional,
)
from tests.support.models import collection

ALL = 3 * DIM


class Network(nn.Module):
    """Three pooled features and a dense input; the forms differ in how these reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(POOLED)
        self.of_dense = nn.Linear(WIDTH, DIM)
        self.top = nn.Linear(ALL + DIM, 1)

    def logits(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        answer: Tensor = self.top(torch.cat([self.bags(keyed).values(), self.of_dense(numbers).relu()], dim=1))
        return answer


@dataclass
class Groups:
    """Features by data group, labels, and what a loader notes down."""

    dense_features: dict[str, KeyedTensor] = field(default_factory=dict)
    sparse_features: dict[str, KeyedJaggedTensor] = field(default_factory=dict)
    sequence_dense_features: dict[str, JaggedTensor] = field(default_factory=dict)
    labels: dict[str, Tensor] = field(default_factory=dict)
    tile_size: int = -1
    dummy: bool = False
    data_timestamp: float = -1.0
    checkpoint_info: dict[str, int] | None = None


def groups(random: np.random.Generator, samples: int) -> Groups:
    prices = KeyedTensor(["price", "age"], [2, WIDTH - 2], dense(random, samples))
    return Groups({"base": prices}, {"base": pooled_ids(random, samples)})


class ByGroup(Network):
    """TorchEasyRec: `forward(batch)`, a dataclass of dicts of KeyedTensors and KeyedJaggedTensors."""

    def forward(self, batch: Groups) -> dict[str, Tensor]:
        logits = self.logits(batch.sparse_features["base"], batch.dense_features["base"].values()).squeeze(dim=1)
        return {"logits": logits, "probs": logits.sigmoid()}


class ByKey(Network):
    """TorchEasyRec: columns of a dense KeyedTensor are taken by their key, in another order."""

    def forward(self, batch: Groups) -> dict[str, Tensor]:
        columns = batch.dense_features["base"].to_dict()
        logits = self.logits(batch.sparse_features["base"], torch.cat([columns["age"], columns["price"]], dim=1))
        return {"logits": logits.squeeze(dim=1)}


class Criteo:
    """A plain object, as torchrec's Batch and ModelInput are to who uses them."""

    def __init__(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor, labels: Tensor) -> None:
        self.dense_features, self.sparse_features, self.labels = dense_features, sparse_features, labels


def criteo(random: np.random.Generator, samples: int) -> Criteo:
    return Criteo(dense(random, samples), pooled_ids(random, samples), of(random, 2, samples).int())


class OfObject(Network):
    """torchrec's DLRMWrapper: `forward(model_input)`."""

    def forward(self, batch: Criteo) -> Tensor:
        return self.logits(batch.sparse_features, batch.dense_features)


class Row(NamedTuple):
    keyed: KeyedJaggedTensor
    price: Tensor
    unused: Tensor | None = None


class OfNamedTuple(Network):
    """Loaders that answer a NamedTuple, with a part that is None."""

    def forward(self, batch: Row) -> Tensor:
        return self.logits(batch.keyed, batch.price)


class Training(Network):
    """torchrec's DLRMTrain and TwoTowerTrainTask: the batch has labels, the answer the loss and (loss, logits, labels)."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = nn.BCEWithLogitsLoss()

    def forward(self, batch: Criteo) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        logits = self.logits(batch.sparse_features, batch.dense_features).squeeze(-1)
        loss = self.loss_fn(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


class Predicting(Network):
    """TorchEasyRec's PredictWrapper: answers None, what was predicted, and the batch itself; autocast, not enabled."""

    def forward(self, batch: Groups) -> tuple[None, tuple[dict[str, Tensor], Groups]]:
        with torch.amp.autocast(device_type="cpu", dtype=None, enabled=False):
            logits = self.logits(batch.sparse_features["base"], batch.dense_features["base"].values())
            result = {name: value for name, value in {"logits": logits}.items() if name is not None}
        return None, (result, batch)


class WithDefaults(Network):
    """twitter's heavy ranker: nine arguments, most of them None by default, some used where they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module | None = nn.LayerNorm(4)
        self.absent: nn.Module | None = None
        self.over = nn.Linear(5, 2)

    def forward(
        self,
        continuous: Tensor,
        keyed: KeyedJaggedTensor,
        discrete: Tensor | None = None,
        author_embedding: Tensor | None = None,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        parts = [self.logits(keyed, continuous)]
        if self.norm:
            if author_embedding is None:
                raise ValueError("author_embedding is None")
            parts.append(self.norm(author_embedding))
        if self.absent:
            parts.append(self.absent(discrete))
        if labels is not None and weights is not None:
            parts.append(labels * weights)
        return {"logits": self.over(torch.cat(parts, dim=1))}


class OfTensors(Network):
    """torchrec's DLRMPredictModule: a dict of tensors, "id_list_features.values" and ".lengths" among them."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        try:
            keyed = KeyedJaggedTensor(
                keys=["user_id", "item_id", "words"],
                lengths=batch["id_list_features.lengths"],
                values=batch["id_list_features.values"],
            )
            logits = self.logits(keyed, batch["float_features"]).sigmoid()
        except Exception as error:
            raise ValueError("batch") from error
        return {"default": logits.reshape([logits.size()[0]]).to(torch.device("cpu"), non_blocking=True).float()}


def tensors(random: np.random.Generator, samples: int) -> tuple[dict[str, Tensor]]:
    keyed = pooled_ids(random, samples)
    parts = {"id_list_features.values": keyed.values(), "id_list_features.lengths": keyed.lengths()}
    return ({"float_features": dense(random, samples), **parts},)


class OfFlat(Network):
    """torchrec-lightning-example: `forward(values, lengths, dense)`, and `.squeeze()` of all."""

    def forward(self, values: Tensor, lengths: Tensor, numbers: Tensor) -> Tensor:
        keyed = KeyedJaggedTensor(keys=["user_id", "item_id", "words"], values=values, lengths=lengths)
        return self.logits(keyed, numbers).squeeze()


def flat(random: np.random.Generator, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    keyed = pooled_ids(random, samples)
    return keyed.values(), keyed.lengths(), dense(random, samples)


class OfFlatSplit(nn.Module):
    """One KeyedJaggedTensor of values and lengths is split for two collections, and looked at key by key."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = collection(POOLED[:1]), collection(POOLED[1:], seed=1)
        self.over = nn.Linear(3 * DIM, 1)

    def forward(self, values: Tensor, lengths: Tensor, scale: Tensor) -> Tensor:
        keyed = KeyedJaggedTensor.from_lengths_sync(["user_id", "item_id", "words"], values, lengths)
        user, item = keyed.split([1, 2])
        pooled = [self.user(user).values(), self.item(item).values() * scale]
        scores: Tensor = self.over(torch.cat(pooled, dim=1)) / keyed["words"].lengths().clamp(min=1).unsqueeze(1)
        return scores


class OfPairs(Network):
    """TorchEasyRec's ScriptWrapper: values and lengths of each key in a dict of tensors."""

    def forward(self, data: dict[str, Tensor], device: str = "cpu") -> dict[str, Tensor]:
        keys = ["user_id", "item_id", "words"]
        keyed = KeyedJaggedTensor(
            keys=keys,
            values=torch.cat([data[f"{key}.values"] for key in keys], dim=-1),
            lengths=torch.cat([data[f"{key}.lengths"] for key in keys], dim=-1),
        )
        numbers = KeyedTensor(
            ["price", "age"], [2, WIDTH - 2], torch.cat([data["price.values"], data["age.values"]], dim=-1)
        )
        return {"logits": self.logits(keyed.to(torch.device(device), non_blocking=True), numbers.values())}


def pairs(random: np.random.Generator, samples: int) -> tuple[dict[str, Tensor]]:
    """One of the keys has one id in each sample, and so has a number that is no length."""
    keyed = ids(random, samples, "user_id", "item_id", "words", item_id=torch.ones(samples, dtype=torch.int32))
    arguments = {"price.values": numbers(random, samples, 2), "age.values": numbers(random, samples, WIDTH - 2)}
    arguments["seen.lengths"] = torch.ones(samples, dtype=torch.int32)
    for key, tensor in keyed.to_dict().items():
        arguments |= {f"{key}.values": tensor.values(), f"{key}.lengths": tensor.lengths()}
    return (arguments,)


class OfUserAndItem(nn.Module):
    """Two collections, each with its own KeyedJaggedTensor out of a dict: user and item side."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = collection(POOLED[:1]), collection(POOLED[1:], seed=1)
        self.query, self.key = nn.Linear(DIM, 4), nn.Linear(2 * DIM, 4)

    def forward(self, sides: dict[str, KeyedJaggedTensor]) -> Tensor:
        query = self.query(self.user(sides["user"]).values())
        match: Tensor = (query * self.key(self.item(sides["item"]).values())).sum(dim=1)
        return match


class AskedTwice(nn.Module):
    """Cookbooks' two towers: one collection is asked twice, for a user's items and for candidates."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(POOLED[1:2])
        self.user, self.item = nn.Linear(DIM, 4), nn.Linear(DIM, 4)

    def forward(self, user_features: KeyedJaggedTensor, item_features: KeyedJaggedTensor) -> Tensor:
        user, item = self.bags(user_features).to_dict()["item_id"], self.bags(item_features).to_dict()["item_id"]
        match: Tensor = (self.user(user) * self.item(item)).sum(dim=1)
        return match


class OfAnything(Network):
    """TorchEasyRec's ScriptWrapper and notebooks: a device, a number, a list of tensors, and what nobody reads."""

    def forward(
        self, keyed: KeyedJaggedTensor, parts: list[Tensor], temperature: float = 1.0, device: str = "cpu", **_: Any
    ) -> Tensor:
        return self.logits(keyed, torch.cat(parts, dim=-1).to(device)) / temperature


def parts(random: np.random.Generator, samples: int) -> list[Tensor]:
    return [numbers(random, samples, 1), numbers(random, samples, WIDTH - 1)]


CALLS: dict[str, NamedModel] = {
    "batch_by_group": NamedModel(ByGroup, positional(groups)),
    "batch_by_key": NamedModel(ByKey, positional(groups)),
    "batch_object": NamedModel(OfObject, positional(criteo)),
    "batch_named_tuple": NamedModel(
        OfNamedTuple, positional(lambda random, n: Row(pooled_ids(random, n), dense(random, n)))
    ),
    "training_wrapper": NamedModel(Training, positional(criteo)),
    "predicting_wrapper": NamedModel(Predicting, positional(groups)),
    "defaults": NamedModel(
        WithDefaults,
        named(continuous=dense, keyed=pooled_ids, author_embedding=lambda random, n: numbers(random, n, 4)),
    ),
    "defaults_given_as_none": NamedModel(
        WithDefaults,
        positional(dense, pooled_ids, nothing, lambda random, n: numbers(random, n, 4), nothing, nothing),
    ),
    "dict_of_tensors": NamedModel(OfTensors, tensors),
    "values_and_lengths": NamedModel(OfFlat, flat),
    "values_and_lengths_by_key": NamedModel(OfPairs, pairs),
    "values_and_lengths_split": NamedModel(
        OfFlatSplit, lambda random, n: (*flat(random, n)[:2], numbers(random, n, 1))
    ),
    "dict_of_keyed": NamedModel(
        OfUserAndItem,
        positional(
            by_name(
                {
                    "user": lambda random, n: ids(random, n, "user_id"),
                    "item": lambda random, n: ids(random, n, "item_id", "words"),
                }
            )
        ),
    ),
    "collection_asked_twice": NamedModel(
        AskedTwice,
        positional(*[lambda random, n: ids(random, n, "item_id")] * 2),
        refused="'user_features' and 'item_features' have ids of one key, 'item_id'",
    ),
    "numbers_and_lists": NamedModel(OfAnything, named(keyed=pooled_ids, parts=parts, temperature=lambda *_: 2.0)),
}
