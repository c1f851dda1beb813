"""A model whose AUC falls where one table is stored as INT4, and not where the other is; and labelled rows for it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

ROWS, DIM = 200, 8


class Planted(nn.Module):
    """Scores are made of small numbers of `matters` beside a large one, which takes up the range of INT4's codes.

    `idle` has as many rows. What it adds to a score is a thousandth of what `matters` adds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"{name}_id"])
                for name in ("matters", "idle")
            ]
        )
        self.over = nn.Linear(2 * DIM, 1)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for table in self.bags.embedding_bags.values():
                table.weight.copy_(torch.randn(ROWS, DIM, generator=generator) * 0.2)
            self.bags.embedding_bags["matters"].weight[:, 0] = 8
            self.over.weight.fill_(1)
            self.over.weight[:, DIM:] = 0.001
            self.over.bias.fill_(-8)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Logits [B]."""
        logits: Tensor = self.over(self.bags(ids).values())
        return logits.squeeze(1)


class Probabilities(Planted):
    """The same, as probabilities, and beside them a number that is none."""

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(ids)
        return {"click": logits.sigmoid(), "distance": logits * 2}


def build() -> Planted:
    """For `--model`."""
    return Planted()


def build_probabilities() -> Probabilities:
    """For `--model`."""
    return Probabilities()


def labelled_table(rows: int) -> pa.Table:
    """Rows with ids of both tables, and labels that follow the scores, not always."""
    random = np.random.default_rng(rows)
    ids = {name: random.integers(ROWS, size=rows) for name in ("matters_id", "idle_id")}
    kjt = KeyedJaggedTensor.from_lengths_sync(
        keys=[*ids], values=torch.from_numpy(np.concatenate([*ids.values()])), lengths=torch.ones(2 * rows).int()
    )
    with torch.no_grad():
        logits = Planted()(kjt).numpy()
    labels = random.random(rows) < 1 / (1 + np.exp(-3 * logits))
    return pa.table({**ids, "click": labels.astype(np.int8), "ts": np.arange(rows)})


def write_labelled(path: Path, rows: int) -> Path:
    """Write such rows as a parquet file."""
    pq.write_table(labelled_table(rows), path, row_group_size=700)
    return path
