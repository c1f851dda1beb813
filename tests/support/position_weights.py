"""Collections behind position weights, with random ones."""

from collections.abc import Mapping, Sequence

import torch
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.support.models import Spec, collection

SPECS = (
    Spec("user", 500, 16, "SUM", ("user_id",)),
    Spec("item", 300, 32, "SUM", ("item_id", "recent")),
    Spec("word", 1000, 24, "SUM", ("words", "recent")),
)
LONGEST = {"user_id": 1, "item_id": 4, "recent": 7, "words": 30}


def positioned(
    specs: Sequence[Spec] = SPECS, longest: Mapping[str, int] = LONGEST, *, by_key: bool = True, seed: int = 0
) -> FeatureProcessedEmbeddingBagCollection:
    """A module for each key, or one for all that are in `longest`."""
    processors = (
        {key: PositionWeightedModule(most) for key, most in longest.items()}
        if by_key
        else PositionWeightedModuleCollection(dict(longest))
    )
    module = FeatureProcessedEmbeddingBagCollection(collection(specs, weighted=True, seed=seed), processors)
    with torch.no_grad():
        for parameter in module._feature_processors.parameters():
            parameter.normal_()
    return module


def by_module() -> FeatureProcessedEmbeddingBagCollection:
    """For `--model`."""
    return positioned()
