"""The collection that looks rows up, behind position weights or managed collision modules."""

from typing import Any

from torchrec.modules.embedding_modules import EmbeddingCollectionInterface
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

_BAGS = "_embedding_bag_collection"
_MANAGED = "_embedding_module"


def inner_of(collection: Any) -> tuple[str, Any]:
    """The collection that looks rows up, with its path in `collection`: itself, or the one behind processors or
    managed collision modules."""
    if isinstance(collection, BaseManagedCollisionEmbeddingCollection):
        return _MANAGED, getattr(collection, _MANAGED)
    if isinstance(collection, FeatureProcessedEmbeddingBagCollection):
        return _BAGS, getattr(collection, _BAGS)
    return "", collection


def is_sequence(collection: Any) -> bool:
    """Whether a collection answers a row for each id, as an EmbeddingCollection does, and pools nothing."""
    return isinstance(inner_of(collection)[1], EmbeddingCollectionInterface)
