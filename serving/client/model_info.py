"""What a client knows of a model, from the model's configuration in Triton."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.bundle.scores import DenseInput, InputDtype, ScoreDtype
from serving.bundle.tensor_names import EMBEDDINGS, ID_INPUTS, LOOKED_UP, SHARED
from serving.protocol.messages import DataType

# What lengths are counted in, int32, has no more.
_UNLIMITED = 2**31 - 1
_TYPE_FP16, _TYPE_INT32 = DataType.TYPE_FP16, DataType.TYPE_INT32


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Features, dims and outputs of a served model.

    Attributes:
        dims: dim of each feature's embedding, in the model's default order.
        keys: the keys that a request has ids for, in the model's default order, each with the features that read it.
        weighted: the keys whose ids have weights.
        output_dtype: float32 or float16.
        schema_digest: equal for versions that answer the same features with the same dims and dtype.
        ids_dtype: dtype of ids in requests, int64 or int32.
        sequences: the features of EmbeddingCollections, whose answer has one row for each id.
        tables: dim of each table that `rows` can read. Empty if the model was exported without row lookups.
        dense: the dense inputs that scores need.
        scores: the shape of each output's score of one sample, or of one id.
        score_dtypes: the dtype of each output.
        takes_shared: whether requests may name shared features.
        by_id: the key of each dense input and score that has one row for each id of a key.
        max_request_ids: most ids in a request.
        max_request_samples: most samples in a request.
    """

    dims: dict[str, int]
    keys: dict[str, tuple[str, ...]]
    weighted: tuple[str, ...]
    output_dtype: np.dtype[Any]
    schema_digest: str
    ids_dtype: np.dtype[Any]
    sequences: frozenset[str] = frozenset()
    tables: Mapping[str, int] = field(default_factory=dict)
    dense: tuple[DenseInput, ...] = ()
    scores: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    score_dtypes: Mapping[str, np.dtype[Any]] = field(default_factory=dict)
    takes_shared: bool = False
    by_id: Mapping[str, str] = field(default_factory=dict)
    max_request_ids: int = _UNLIMITED
    max_request_samples: int = _UNLIMITED


def info_of(config: Any) -> ModelInfo:
    """Read a model's Triton ModelConfig, which tbe-export wrote."""
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    features, dims = parameters["features"].split(","), [int(dim) for dim in parameters["dims"].split(",")]
    keys: dict[str, tuple[str, ...]] = {}
    for key, feature in zip(parameters.get("keys", parameters["features"]).split(","), features, strict=True):
        keys[key] = (*keys.get(key, ()), feature)
    types = {tensor.name: tensor.data_type for tensor in (*config.input, *config.output)}
    by_id = dict(zip(_names(parameters, "by_id"), _names(parameters, "by_id_keys"), strict=True))
    scores = [output for output in config.output if output.name not in LOOKED_UP]
    dense_inputs = [tensor for tensor in config.input if tensor.name not in ID_INPUTS]
    return ModelInfo(
        dims=dict(zip(features, dims, strict=True)),
        keys=keys,
        weighted=_names(parameters, "weighted"),
        output_dtype=np.dtype(np.float16 if types.get(EMBEDDINGS) == _TYPE_FP16 else np.float32),
        schema_digest=parameters["schema_digest"],
        ids_dtype=np.dtype(np.int32 if types.get("values") == _TYPE_INT32 else np.int64),
        sequences=frozenset(_names(parameters, "sequences")),
        tables=dict(zip(parameters["tables"].split(","), dims, strict=True)) if "tables" in parameters else {},
        dense=tuple(_dense_input(tensor, by_id.get(tensor.name)) for tensor in dense_inputs),
        scores={output.name: tuple(output.dims[1:]) for output in scores},
        score_dtypes={output.name: ScoreDtype(_kserve_name(output)).numpy for output in scores},
        by_id=by_id,
        max_request_ids=int(parameters.get("max_request_ids", _UNLIMITED)),
        max_request_samples=int(parameters.get("max_request_samples", _UNLIMITED)),
        takes_shared=any(output.name == SHARED for output in config.output),
    )


def _names(parameters: Mapping[str, str], parameter: str) -> tuple[str, ...]:
    return tuple(filter(None, parameters.get(parameter, "").split(",")))


def _dense_input(tensor: Any, key: str | None) -> DenseInput:
    return DenseInput(tensor.name, tuple(tensor.dims[1:]), InputDtype(_kserve_name(tensor)), key=key)


def _kserve_name(tensor: Any) -> str:
    name: str = DataType.Name(tensor.data_type)
    return name.removeprefix("TYPE_")
