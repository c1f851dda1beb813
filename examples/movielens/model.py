"""A small ranking model: TorchRec embedding tables, and a dense part that reads their pooled embeddings."""

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from examples.movielens.data import Batch, catalogue

# By table: dim, pooling, features. A user's recent items and the item itself share a table.
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
    """An MLP over pooled embeddings, and over products of the item's with the user's and the recent items'."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(sum(DIMS.values()) + 2, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)
        )

    def forward(self, pooled: dict[str, Tensor]) -> Tensor:
        """The logit of each sample, float32 [B], from pooled embeddings, float32 [B, dim] by feature."""
        item = pooled["item_id"]
        products = [(pooled[name] * item).sum(dim=1, keepdim=True) for name in ("user_id", "recent_items")]
        logits: Tensor = self.layers(torch.cat([*(pooled[name] for name in FEATURES), *products], dim=1))
        return logits.squeeze(1)


class Ranker(nn.Module):
    """Predicts whether a user likes an item."""

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
        """The logit of each sample, float32 [B]."""
        logits: Tensor = self.dense(self.embeddings(features).to_dict())
        return logits


def build() -> Ranker:
    """Build the untrained model. `tbe-export model --model examples.movielens.model:build` calls this."""
    return Ranker()


def to_kjt(batch: Batch) -> KeyedJaggedTensor:
    """A batch as a KeyedJaggedTensor."""
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(FEATURES),
        values=torch.cat([torch.from_numpy(batch.features[name][0]) for name in FEATURES]),
        lengths=torch.cat([torch.from_numpy(batch.features[name][1]) for name in FEATURES]),
    )
