"""The collection inside a feature-processed or managed collision collection, which looks the rows up."""

from typing import Any

from torchrec.modules.embedding_modules import EmbeddingCollectionInterface
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

_EMBEDDING_BAGS = "_embedding_bag_collection"
_EMBEDDINGS = "_embedding_module"


def inner_of(collection: Any) -> tuple[str, Any]:
    """The collection that looks rows up, with its path in `collection`.

    It is `collection` itself, or the one inside it that follows feature processors or managed collision modules.
    """
    if isinstance(collection, BaseManagedCollisionEmbeddingCollection):
        return _EMBEDDINGS, getattr(collection, _EMBEDDINGS)
    if isinstance(collection, FeatureProcessedEmbeddingBagCollection):
        return _EMBEDDING_BAGS, getattr(collection, _EMBEDDING_BAGS)
    return "", collection


def is_sequence(collection: Any) -> bool:
    """Whether a collection returns a row for each id, as an EmbeddingCollection does, and does not pool."""
    return isinstance(inner_of(collection)[1], EmbeddingCollectionInterface)


def takes_weights(collection: Any) -> bool:
    """Whether a collection weighs rows by the weights of a KJT. Feature processors replace these weights."""
    if isinstance(collection, FeatureProcessedEmbeddingBagCollection) or is_sequence(collection):
        return False
    return bool(inner_of(collection)[1].is_weighted())
