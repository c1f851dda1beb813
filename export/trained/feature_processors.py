"""TorchRec's feature processors, which weigh ids by their position in the bag (torchrec 1.8).

`FeatureProcessedEmbeddingBagCollection` has a weighted EmbeddingBagCollection and its processors: a
PositionWeightedModule for each key, or a PositionWeightedModuleCollection for some keys. In eval, as in training, the
n-th id of a bag gets the n-th weight of its key. Keys without weights get 1. A bag with more ids than weights raises
(`torch.gather`).
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

_PROCESSORS = "_feature_processors"


def position_weights_of(collection: FeatureProcessedEmbeddingBagCollection) -> dict[str, tuple[str, Tensor]]:
    """The position weights [n] of each key that has some, with their path in `collection`."""
    processors: Any = getattr(collection, _PROCESSORS)
    if isinstance(processors, PositionWeightedModuleCollection):
        weights = processors.position_weights.items()
        return {key: (f"{_PROCESSORS}.position_weights.{key}", weight) for key, weight in weights}
    return {
        key: (f"{_PROCESSORS}.{key}.position_weight", module.position_weight) for key, module in processors.items()
    }


def unknown_processors(collection: FeatureProcessedEmbeddingBagCollection) -> Iterator[tuple[str, nn.Module, str]]:
    """The processors that are not served: path in `collection`, module, and why."""
    processors: Any = getattr(collection, _PROCESSORS)
    by_key = isinstance(processors, nn.ModuleDict)
    served: Any = PositionWeightedModule if by_key else PositionWeightedModuleCollection
    modules = dict(processors.items()) if by_key else {"": processors}
    for key, module in modules.items():
        path = f"{_PROCESSORS}.{key}".rstrip(".")
        if type(module) is not served:
            yield path, module, f"expected a {served.__name__}"
        elif any(weights.numel() == 0 for weights in module.parameters()):
            yield path, module, "expected a weight for one position or more, got none"
        elif module._pre_processed:
            yield path, module, "takes positions from the weights of a request (`pre_process_input` was called)"
