"""The messages of a lookup: what a client sends, and what it reads of the answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.bundle.scores import INPUT_DTYPES, DenseInput
from serving.errors import InvalidRequest
from serving.protocol.messages import ModelInferRequest
from serving.requests.answers import JaggedRows
from serving.requests.parameters import encode_parameters
from serving.requests.types import Embeddings, Outputs, Tensors


class Answer(dict[str, Any]):
    """Pooled embeddings, {feature: [B, dim]}, float32 or float16, in the order asked for.

    For a feature of an EmbeddingCollection it has a `JaggedRows` instead: a row for each id, not pooled.
    The arrays are read-only views of the response's bytes.

    Attributes:
        version: the version of the model that gave the whole answer.
    """

    def __init__(self, embeddings: Mapping[str, Embeddings | JaggedRows], version: int) -> None:
        super().__init__(embeddings)
        self.version = version


class Scores(dict[str, npt.NDArray[Any]]):
    """What a whole model answers, {output: [B, …]}, each in the dtype of the output. The arrays are read-only views
    of the response's bytes.

    Attributes:
        version: the version of the model that gave the whole answer.
    """

    def __init__(self, scores: Outputs, version: int) -> None:
        super().__init__(scores)
        self.version = version


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a client needs to know of a served model.

    Attributes:
        dims: dim of each feature's embedding, in the model's default order.
        keys: the keys that requests bring ids for, in the model's default order, each with the features that read it.
        weighted: the keys whose ids have weights.
        output_dtype: float32 or float16.
        schema_digest: equal for versions that answer the same features with the same dims and dtype.
        ids_dtype: of ids as they travel, int64 or int32.
        dense: the inputs that scores need beside ids.
        scores: the shape of each score of a sample, or of an id, by the name of the output.
        score_dtypes: the dtype of each score, likewise.
        by_id: the dense inputs and scores that have a row for each id of a key, and the key of each.
        sequences: the features that are answered by a row for each id.
        tables: dim of each table whose rows can be asked for. Models that were exported without it have none.
        takes_shared: whether requests may say which features come once. Models that were exported without it do not
            take it.
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


_INT32 = np.iinfo(np.int32)
_KSERVE_NAME = {np.dtype(np.int64): "INT64", np.dtype(np.int32): "INT32"}


def infer_request(model: str, tensors: Tensors, info: ModelInfo) -> Any:
    """A ModelInferRequest for `model` with `tensors`. It names its features if they are not in the default order.

    Raises:
        InvalidRequest: the model takes int32, and an id is not in its range.
    """
    request = ModelInferRequest(model_name=model)
    values = tensors.values
    if values.dtype != info.ids_dtype:
        if values.size and not _INT32.min <= values.min() <= values.max() <= _INT32.max:
            raise InvalidRequest(f"values: expected ids of {info.ids_dtype}, got {values.min()} to {values.max()}")
        values = values.astype(info.ids_dtype)
    for name, datatype, array in (
        ("values", _KSERVE_NAME[info.ids_dtype], values),
        ("lengths", "INT32", tensors.lengths),
        ("weights", "FP32", tensors.weights),
    ):
        if array is not None:
            request.inputs.add(name=name, datatype=datatype, shape=[1, array.size])
            request.raw_input_contents.append(array.tobytes())
    for name, rows in tensors.dense.items():
        request.inputs.add(name=name, datatype=INPUT_DTYPES[rows.dtype].value, shape=[1, *rows.shape])
        request.raw_input_contents.append(rows.tobytes())
    if info.scores:  # else all are answered
        for name in tensors.outputs:
            request.outputs.add(name=name)
    is_default = tensors.features is not None and list(tensors.features) == list(info.keys)
    encode_parameters(tensors, request.parameters, ("features",) if is_default else ())
    return request
