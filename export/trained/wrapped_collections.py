"""The collection inside a feature-processed or managed collision collection, which looks the rows up."""

from typing import Any

from torchrec.modules.embedding_modules import EmbeddingCollectionInterface
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

_EMBEDDING_BAGS = "_embedding_bag_collection"
_EMBEDDINGS = "_embedding_module"


def inner_of(collection: Any) -> tuple[str, Any]:
    """The collection that looks rows up, with its path in `collection`: itself, or the one behind processors or
    managed collision modules."""
    if isinstance(collection, BaseManagedCollisionEmbeddingCollection):
        return _EMBEDDINGS, getattr(collection, _EMBEDDINGS)
    if isinstance(collection, FeatureProcessedEmbeddingBagCollection):
        return _EMBEDDING_BAGS, getattr(collection, _EMBEDDING_BAGS)
    return "", collection


def is_sequence(collection: Any) -> bool:
    """Whether a collection returns a row for each id, as an EmbeddingCollection does, and does not pool."""
    return isinstance(inner_of(collection)[1], EmbeddingCollectionInterface)


def takes_weights(collection: Any) -> bool:
    """Whether a collection weighs rows by the weights of a KJT. Feature processors put their own in their place."""
    inner = inner_of(collection)[1]
    own = isinstance(collection, FeatureProcessedEmbeddingBagCollection)
    return bool(not own and not is_sequence(collection) and inner.is_weighted())
