"""A collection, what is built around one, and what changes its ids on the way."""

from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType


def pooled(*names: str, weighted: bool = False, pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=50, embedding_dim=8, feature_names=[f"f{name}"], pooling=pooling
            )
            for name in names or ("a", "b")
        ],
        is_weighted=weighted,
    )


class Around(nn.Module):
    """A collection, and a dense part."""

    def __init__(self, collection: nn.Module | None = None) -> None:
        super().__init__()
        self.ebc = collection or pooled()
        self.over = nn.Linear(16, 1)


class Hash(nn.Module):
    def forward(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(kjt.keys(), kjt.values() % 10, lengths=kjt.lengths())


class HashesValues(nn.Module):
    def forward(self, kjt: KeyedJaggedTensor) -> None:
        kjt.values().remainder_(10)
