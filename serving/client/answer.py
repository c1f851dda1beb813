"""What a client gets: the embeddings of its samples, and what it needs to know of the model beforehand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.kjt import Embeddings


class Answer(dict[str, Embeddings]):
    """{feature: [B, dim]}, in the order asked for. The arrays are read-only views of what came over the wire.

    Attributes:
        version: the version of the model that answered, all of it.
    """

    def __init__(self, embeddings: Mapping[str, Embeddings], version: int) -> None:
        super().__init__(embeddings)
        self.version = version


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a client needs to know of a served model.

    Attributes:
        dims: width of each feature's embedding, in the model's default order.
        keys: what requests bring ids for, in the model's default order, and the features that read each.
        weighted: the keys whose ids carry weights.
        output_dtype: float32 or float16.
        contract: equal for versions that answer the same features with the same dims and dtype.
    """

    dims: dict[str, int]
    keys: dict[str, tuple[str, ...]]
    weighted: tuple[str, ...]
    output_dtype: np.dtype[Any]
    contract: str

    @classmethod
    def of(cls, parameters: Mapping[str, str], output_dtype: "np.dtype[Any]") -> "ModelInfo":
        """What the `parameters` of a model's config say."""
        features, dims = parameters["features"].split(","), map(int, parameters["dims"].split(","))
        keys: dict[str, tuple[str, ...]] = {}
        for key, feature in zip(parameters.get("keys", parameters["features"]).split(","), features, strict=True):
            keys[key] = (*keys.get(key, ()), feature)
        return cls(
            dims=dict(zip(features, dims, strict=True)),
            keys=keys,
            weighted=tuple(filter(None, parameters.get("weighted", "").split(","))),
            output_dtype=output_dtype,
            contract=parameters["contract"],
        )
