"""Rankings: 500 items for one user, of three kinds of models, as every candidate needs them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from benchmarks.peer_workload import Floats, Ids, PeerWorkload
from benchmarks.scores_model import DENSE, WIDTH, dlrm_dcn, save_dense_part
from benchmarks.sequences_model import save_behind_rows
from benchmarks.sequences_workload import din
from export import ExportConfig, export_model
from serving.model.settings import ServingSettings
from serving.requests.types import Tensors
from serving.torchscript import torchscript

ITEMS, USER_IDS, REQUESTS = 500, 50, 8
USER_FEATURES, ITEM_FEATURES = 10, 16
ROWS, DIM = 100_000, 64
OUTPUT = "scores"
# Features by number: 10 of the user, 15 of the item, the user's history, and the item itself, which read one table.
HISTORY = USER_FEATURES + ITEM_FEATURES - 1
TARGET = HISTORY + 1
KEYS = [f"f{number}" for number in range(TARGET + 1)]
USER = (*range(USER_FEATURES), HISTORY)
USER_SIDE = [KEYS[number] for number in USER]
FEATURES = [
    *((table, USER_IDS if table < USER_FEATURES else 1) for table in range(HISTORY)),
    (HISTORY, USER_IDS),
    (HISTORY, 1),
]


class TowersBehindRows(nn.Module):
    """A tower of three layers for the user, one of two for the item, and their product."""

    def __init__(self) -> None:
        super().__init__()
        self.user_width, self.history, self.dim = USER_FEATURES * DIM, HISTORY * DIM, DIM
        user, item = len(USER) * DIM, ITEM_FEATURES * DIM + WIDTH
        relu = nn.ReLU
        self.user = nn.Sequential(nn.Linear(user, 512), relu(), nn.Linear(512, 256), relu(), nn.Linear(256, DIM))
        self.item = nn.Sequential(nn.Linear(item, 128), relu(), nn.Linear(128, DIM))

    def forward(self, rows: Tensor, dense: Tensor) -> Tensor:
        """Scores [B, 1] of pooled rows [B, D] and dense inputs [B, WIDTH]."""
        before, after = self.history, self.history + self.dim
        user = torch.cat([rows[:, : self.user_width], rows[:, before:after]], dim=1)
        item = torch.cat([rows[:, self.user_width : before], rows[:, after:], dense], dim=1)
        scores: Tensor = (self.user(user) * self.item(item)).sum(dim=1, keepdim=True)
        return scores


class Towers(nn.Module):
    """The same over its tables."""

    def __init__(self, bags: EmbeddingBagCollection) -> None:
        super().__init__()
        self.bags, self.towers = bags, TowersBehindRows()

    def forward(self, ids: KeyedJaggedTensor, dense_features: Tensor) -> Tensor:
        """Scores [B, 1]."""
        scores: Tensor = self.towers(self.bags(ids).values(), dense_features)
        return scores


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model.

    Attributes:
        make: the model over its tables.
        save: writes what follows its tables as TorchScript, for peers.
        has_sequences: whether it takes the rows of the history; otherwise their sum.
    """

    make: Callable[[PeerWorkload], nn.Module]
    save: Callable[[Any, Path], None]
    has_sequences: bool = False


@dataclass(frozen=True, slots=True)
class RankingsWorkload:
    """A model, and rankings by it.

    Attributes:
        name: of the kind of model.
        tables: the tables, and the ids of the rankings: those of the user are repeated for each item.
        model: with FP32 rows.
        dense: [requests, ITEMS, WIDTH].
    """

    name: str
    tables: PeerWorkload
    model: nn.Module
    dense: Floats

    @classmethod
    def make(cls, name: str) -> Self:
        """With random rows and ids, and a dense part that is not trained."""
        random = np.random.default_rng(0)
        columns = sum(ids for _, ids in FEATURES)
        padded = random.integers(0, ROWS, (REQUESTS, ITEMS, columns))
        first = 0
        for number, (_, ids) in enumerate(FEATURES):
            if number in USER:
                padded[..., first : first + ids] = padded[:, :1, first : first + ids]
            first += ids
        sequences = (HISTORY, TARGET) if KINDS[name].has_sequences else ()
        count = HISTORY + 1
        tables = PeerWorkload(f"rank_{name}", [ROWS] * count, [DIM] * count, FEATURES, {ITEMS: padded}, sequences)
        torch.manual_seed(0)
        model = KINDS[name].make(tables).eval()
        return cls(name, tables, model, random.random((REQUESTS, ITEMS, WIDTH), np.float32))

    def export(self, repository: Path) -> Path:
        """Our bundle. Requests with repeated users are large, and clients may wait long."""
        settings = ServingSettings(max_busy_ms=10_000, max_request_ids=1 << 19)
        config = ExportConfig(scores=True, user_side=USER_SIDE, serving=settings)
        example = self._call(self.tensors(repeated=True)[0], 7)
        return export_model(self.model, repository, self.name, config, example=example)

    def tensors(self, *, repeated: bool) -> list[Tensors]:
        """The rankings as we take them."""
        return [
            self._tensors(padded, dense, repeated=repeated)
            for padded, dense in zip(self.tables.requests[ITEMS], self.dense, strict=True)
        ]

    def _tensors(self, padded: Ids, dense: Floats, *, repeated: bool) -> Tensors:
        bags = np.split(padded, np.cumsum([ids for _, ids in FEATURES])[:-1], axis=1)
        if not repeated:
            bags = [bag[:1] if number in USER else bag for number, bag in enumerate(bags)]
        return Tensors(
            tuple(KEYS),
            np.concatenate([bag.ravel() for bag in bags]),
            np.concatenate([np.full(len(bag), bag.shape[1], np.int32) for bag in bags]),
            outputs=(OUTPUT,),
            dense={DENSE: dense},
            shared=[] if repeated else USER_SIDE,
        )

    def answer(self, number: int) -> Floats:
        """The model's own scores of a ranking, by TorchRec: [ITEMS, 1]."""
        with torch.inference_mode():
            scores: Tensor = self.model(*self._call(self.tensors(repeated=True)[number]))
        answer: Floats = scores.reshape(-1, 1).numpy()
        return answer

    def arrays(self, *, repeated: bool) -> list[dict[str, npt.NDArray[np.generic]]]:
        """The rankings as peers take them.

        With the user once, the user's ids fill the first rows of `ids`, which have the width of an item's ids.
        """
        padded, dense = self.tables.padded(ITEMS), self.dense
        if KINDS[self.name].has_sequences:  # with the length of the history
            dense = np.concatenate([dense, np.full((*dense.shape[:2], 1), USER_IDS, np.float32)], axis=2)
        if repeated:
            return [{"ids": ids, "dense": rows} for ids, rows in zip(padded, dense, strict=True)]
        of_user = np.repeat([number in USER for number in range(len(FEATURES))], [ids for _, ids in FEATURES])
        requests: list[dict[str, npt.NDArray[np.generic]]] = []
        for ids, rows in zip(padded, dense, strict=True):
            user = np.zeros((user_rows(), ITEM_FEATURES), np.int64)
            user.ravel()[: of_user.sum()] = ids[0, of_user]
            requests.append(
                {
                    "ids": np.concatenate([user, ids[:, ~of_user]]),
                    "dense": np.concatenate([np.zeros((len(user), rows.shape[1]), np.float32), rows]),
                }
            )
        return requests

    def write(self, folder: Path, *, repeated: bool) -> None:
        """What a peer reads."""
        self.tables.write_tables(folder, ["int8"])
        KINDS[self.name].save(self.model, folder / "dense.pt")
        about: dict[str, Any] = {"inputs": WIDTH + KINDS[self.name].has_sequences, "outputs": 1}
        if not repeated:
            about |= {"user": USER, "user_rows": user_rows()}
        (folder / "dense.json").write_text(json.dumps(about))

    def _call(self, tensors: Tensors, samples: int = ITEMS) -> tuple[Any, ...]:
        """A call of the model, for the first items of a request with repeated users."""
        lengths = tensors.lengths.reshape(len(KEYS), ITEMS)
        bags = np.split(tensors.values, np.cumsum(lengths.sum(axis=1))[:-1])
        values = np.concatenate([bag[: samples * row[0]] for bag, row in zip(bags, lengths, strict=True)])
        ids = KeyedJaggedTensor(
            KEYS, torch.from_numpy(values), lengths=torch.from_numpy(lengths[:, :samples].reshape(-1).copy())
        )
        dense = torch.from_numpy(tensors.dense[DENSE][:samples])
        return (dense, ids) if self.name == "dcn" else (ids, dense)


def user_rows() -> int:
    """The rows that a user's ids fill."""
    return -(-len(USER) * USER_IDS // ITEM_FEATURES)


def _save_towers(model: Towers, path: Path) -> None:
    with torchscript():
        torch.jit.freeze(torch.jit.script(model.towers.eval())).save(path)


KINDS = {
    "din": Kind(lambda tables: din(tables, KEYS[HISTORY], KEYS[TARGET]), save_behind_rows, has_sequences=True),
    "towers": Kind(lambda tables: Towers(tables.pooled()), _save_towers),
    "dcn": Kind(lambda tables: dlrm_dcn(tables.pooled()), save_dense_part),
}


def wire_bytes(messages: Sequence[bytes]) -> float:
    """The mean size of requests."""
    return float(np.mean([len(message) for message in messages]))
