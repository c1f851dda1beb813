"""A ranker over a user's history and requests for its scores, as every candidate needs them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from benchmarks.peer_workload import MODEL, PAD, SIZES, Floats, Ids, PeerWorkload, save_requests
from benchmarks.scored_workload import ScoredWorkload
from benchmarks.sequences_model import DENSE, LONGEST, WIDTH, Din, JaggedDin, save_behind_rows, train
from export import ExportConfig, export_model
from serving.client import ModelInfo
from serving.client.messages import infer_request
from serving.model.settings import ServingSettings
from serving.requests.types import Tensors

ROWS, DIM = 100_000, 64
# The most ids that a sample has of each pooled feature.
POOLED = (1, 1, 1, 1, 2, 5, 10, 10)
ITEM_TABLE = len(POOLED)
HISTORY, TARGET = f"f{ITEM_TABLE}", f"f{ITEM_TABLE + 1}"


@dataclass(frozen=True, slots=True)
class SequencesWorkload(ScoredWorkload):
    """A ranker, and what is asked of it.

    Attributes:
        tables: the tables, and the ids of the requests. Histories have 1 to `LONGEST` ids.
        model: with FP32 rows; answers scores [B].
        dense: dense inputs by the number of samples, [requests, samples, WIDTH].
    """

    model: Din

    @classmethod
    def make(cls, sizes: Mapping[int, int] = SIZES, rows: int = ROWS) -> Self:
        """With random rows, and a dense part that was trained on the requests.

        Args:
            sizes: how many requests there are, by their number of samples.
            rows: of each table.
        """
        random = np.random.default_rng(0)
        features = [*enumerate(POOLED), (ITEM_TABLE, LONGEST), (ITEM_TABLE, 1)]
        last = sum(POOLED)
        requests: dict[int, Ids] = {}
        for samples, count in sizes.items():
            padded = random.integers(0, rows, (count, samples, last + LONGEST + 1))
            lengths = random.integers(1, LONGEST + 1, (count, samples, 1))
            padded[..., last:-1][np.arange(LONGEST) >= lengths] = PAD
            requests[samples] = padded
        tables = PeerWorkload(
            "scores_sequences", [rows] * (ITEM_TABLE + 1), [DIM] * (ITEM_TABLE + 1), features, requests, (8, 9)
        )
        dense = {samples: random.random((count, samples, WIDTH), np.float32) for samples, count in sizes.items()}
        workload = cls(tables, din(tables, HISTORY, TARGET), dense)
        train(workload.model, [workload.kjt(tensor) for tensor in workload.tensors(max(sizes))])
        workload.model.eval()
        return workload

    def jagged(self) -> JaggedDin:
        """The same model without padding. It shares the weights."""
        jagged = JaggedDin(self.model.bags, self.model.items, HISTORY, TARGET)
        jagged.dense = self.model.dense
        return jagged.eval()

    def export(self, repository: Path) -> Path:
        """Our bundle. Clients with 128 samples each wait longer than a model has them wait by default."""
        config = ExportConfig(scores=True, serving=ServingSettings(max_busy_ms=10_000))
        return export_model(self.model, repository, MODEL, config, example=self.example())

    def example(self) -> tuple[KeyedJaggedTensor, torch.Tensor]:
        """A call of the model."""
        (first, *_) = self.tensors(max(self.tables.requests))
        return self.kjt(first), torch.from_numpy(first.dense[DENSE])

    def eager(self, tensors: Tensors) -> Floats:
        """The model's own scores, by TorchRec: [B]."""
        with torch.inference_mode():
            scores: Floats = self.model(self.kjt(tensors), torch.from_numpy(tensors.dense[DENSE])).numpy()
        return scores

    def write(self, folder: Path, info: ModelInfo) -> None:
        """What peers and the load generator read.

        Args:
            info: of our model, as it is served.
        """
        self.tables.write_tables(folder, ["int8"])
        save_behind_rows(self.model, folder / "dense.pt")
        (folder / "dense.json").write_text(json.dumps({"inputs": WIDTH + 1, "outputs": 1}))
        for samples in self.tables.requests:
            tensors = self.tensors(samples)
            ours = [infer_request(MODEL, tensor, info).SerializeToString() for tensor in tensors]
            lengths = (self.tables.requests[samples][..., -LONGEST - 1 : -1] != PAD).sum(axis=2, keepdims=True)
            dense = np.concatenate([self.dense[samples], lengths.astype(np.float32)], axis=2)
            arrays = {"ids": self.tables.padded(samples), "dense": dense}
            save_requests(folder, samples, arrays, ours, self.eager(tensors[0])[:, np.newaxis])


def din(tables: PeerWorkload, history: str, target: str) -> Din:
    """A Din over the tables of a workload, with their float rows. Its last table has the items."""
    *bags, item = tables.module().embedding_bag_configs()
    config = EmbeddingConfig(
        name=item.name,
        num_embeddings=item.num_embeddings,
        embedding_dim=item.embedding_dim,
        feature_names=item.feature_names,
    )
    pooled, items = EmbeddingBagCollection(tables=bags), EmbeddingCollection(tables=[config])
    tables.copy_rows([*pooled.embedding_bags.items(), *items.embeddings.items()])
    return Din(pooled, items, history, target)
