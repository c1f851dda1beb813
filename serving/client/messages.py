"""The request that a client sends, and the answers that it returns."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.bundle.scores import INPUT_DTYPES
from serving.client.model_info import ModelInfo
from serving.errors import InvalidRequest
from serving.protocol.messages import ModelInferRequest, add_ids
from serving.requests.answer_columns import NO_LENGTHS, AnswerColumns, Values
from serving.requests.parameters import encode_parameters
from serving.requests.types import Lengths, Tensors


class _Versioned(AnswerColumns[Values]):
    """An answer of one model version. Its arrays are read-only views of the response's bytes."""

    def __init__(
        self, values: Mapping[str, Values], version: int, lengths: Mapping[str, Lengths] = NO_LENGTHS
    ) -> None:
        super().__init__(values, lengths)
        self.version = version


class Answer(_Versioned[Any]):
    """Pooled embeddings, {feature: [B, dim]}, float32 or float16, in the order of the request.

    A feature of an EmbeddingCollection has `JaggedRows` instead: one row for each id, not pooled.
    The arrays are read-only views of the response's bytes.

    Attributes:
        version: the model version that computed the whole answer.
    """


class Scores(_Versioned[npt.NDArray[Any]]):
    """Scores of a whole model, {output: [B, …]}, each in the dtype of its output.

    The arrays are read-only views of the response's bytes.

    Attributes:
        version: the model version that computed the whole answer.
    """


_INT32 = np.iinfo(np.int32)


def infer_request(model: str, tensors: Tensors, info: ModelInfo) -> Any:
    """A ModelInferRequest for `model` with `tensors`. It names its features unless they are in the default order.

    Raises:
        InvalidRequest: the model takes int32 ids, and an id is outside int32.
    """
    request = ModelInferRequest(model_name=model)
    values = tensors.values
    if values.dtype != info.ids_dtype:
        if values.size and not _INT32.min <= values.min() <= values.max() <= _INT32.max:
            raise InvalidRequest(f"values: expected ids of {info.ids_dtype}, got {values.min()} to {values.max()}")
        values = values.astype(info.ids_dtype)
    add_ids(request, values, tensors.lengths, tensors.weights)
    for name, rows in tensors.dense.items():
        request.inputs.add(name=name, datatype=INPUT_DTYPES[rows.dtype].value, shape=[1, *rows.shape])
        request.raw_input_contents.append(rows.tobytes())
    if info.scores:  # a model without scores returns all its outputs
        for name in tensors.outputs:
            request.outputs.add(name=name)
    is_default = tensors.features is not None and list(tensors.features) == list(info.keys)
    encode_parameters(tensors, request.parameters, ("features",) if is_default else ())
    return request
