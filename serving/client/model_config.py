"""What a model's config says to clients."""

from typing import Any

import numpy as np
from tritonclient.grpc import model_config_pb2

from serving.bundle.scores import DenseInput
from serving.client.answer import ModelInfo
from serving.request.tensors import EMBEDDINGS, IDS, LOOKED_UP, ONCE

_TYPE_FP16, _TYPE_INT32 = model_config_pb2.TYPE_FP16, model_config_pb2.TYPE_INT32


def info_of(config: Any) -> ModelInfo:
    """The model with this config, a ModelConfig of Triton's. tbe-export made it."""
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    features, dims = parameters["features"].split(","), [int(dim) for dim in parameters["dims"].split(",")]
    keys: dict[str, tuple[str, ...]] = {}
    for key, feature in zip(parameters.get("keys", parameters["features"]).split(","), features, strict=True):
        keys[key] = (*keys.get(key, ()), feature)
    types = {each.name: each.data_type for each in (*config.input, *config.output)}
    return ModelInfo(
        dims=dict(zip(features, dims, strict=True)),
        keys=keys,
        weighted=tuple(filter(None, parameters.get("weighted", "").split(","))),
        output_dtype=np.dtype(np.float16 if types.get(EMBEDDINGS) == _TYPE_FP16 else np.float32),
        contract=parameters["contract"],
        ids_dtype=np.dtype(np.int32 if types.get("values") == _TYPE_INT32 else np.int64),
        sequences=frozenset(filter(None, parameters.get("sequences", "").split(","))),
        tables=dict(zip(parameters["tables"].split(","), dims, strict=True)) if "tables" in parameters else {},
        dense=tuple(DenseInput(each.name, each.dims[1]) for each in config.input if each.name not in IDS),
        scores={each.name: tuple(each.dims[1:]) for each in config.output if each.name not in LOOKED_UP},
        takes_once=any(each.name == ONCE for each in config.output),
    )
