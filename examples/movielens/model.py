"""A small ranking model: TorchRec embedding tables below, a dense part above."""

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from examples.movielens.data import Batch, catalogue

# Table: (dim, pooling, its features). A user's recent items and the item itself share a table.
TABLES = {
    "user": (32, PoolingType.SUM, ["user_id"]),
    "age": (8, PoolingType.SUM, ["age_bucket"]),
    "gender": (8, PoolingType.SUM, ["gender"]),
    "occupation": (8, PoolingType.SUM, ["occupation"]),
    "zip": (8, PoolingType.SUM, ["zip_prefix"]),
    "item": (32, PoolingType.MEAN, ["item_id", "recent_items"]),
    "year": (8, PoolingType.SUM, ["year"]),
    "genre": (16, PoolingType.SUM, ["genres"]),
    "word": (16, PoolingType.MEAN, ["title_words"]),
}
FEATURES = tuple(feature for _, _, features in TABLES.values() for feature in features)
DIMS = {feature: dim for dim, _, features in TABLES.values() for feature in features}


class DensePart(nn.Module):
    """Pooled embeddings to a logit: an MLP, and the products of the embeddings that live in one space."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(sum(DIMS.values()) + 2, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)
        )

    def forward(self, pooled: dict[str, Tensor]) -> Tensor:
        """The logit of each sample [B], from {feature: [B, dim]}."""
        item = pooled["item_id"]
        products = [(pooled[name] * item).sum(dim=1, keepdim=True) for name in ("user_id", "recent_items")]
        logits: Tensor = self.layers(torch.cat([*(pooled[name] for name in FEATURES), *products], dim=1))
        return logits.squeeze(1)


class Ranker(nn.Module):
    """Does this user like this item?"""

    def __init__(self) -> None:
        super().__init__()
        rows = catalogue().rows
        self.embeddings = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=rows[features[0]],
                    embedding_dim=dim,
                    feature_names=features,
                    pooling=pooling,
                )
                for name, (dim, pooling, features) in TABLES.items()
            ]
        )
        self.dense = DensePart()

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """The logit of each sample [B]."""
        logits: Tensor = self.dense(self.embeddings(features).to_dict())
        return logits


def build() -> Ranker:
    """The model, untrained: what `tbe-export model --model examples.movielens.model:build` calls."""
    return Ranker()


def to_kjt(batch: Batch) -> KeyedJaggedTensor:
    """A batch as TorchRec takes it."""
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(FEATURES),
        values=torch.cat([torch.from_numpy(batch.features[name][0]) for name in FEATURES]),
        lengths=torch.cat([torch.from_numpy(batch.features[name][1]) for name in FEATURES]),
    )
