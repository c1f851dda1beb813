"""A request as it travels: a ModelInferRequest of KServe's."""

from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from serving.client.answer import ModelInfo
from serving.errors import InvalidRequest
from serving.request.tensors import EVERY_HOST, ONCE, TABLES, Tensors

_INT32 = np.iinfo(np.int32)
_KSERVE_NAME = {np.dtype(np.int64): "INT64", np.dtype(np.int32): "INT32"}


def infer_request(model: str, tensors: Tensors, info: ModelInfo) -> Any:
    """A ModelInferRequest for `model` with `tensors`. It names its features if they are not in the default order.

    Raises:
        InvalidRequest: the model takes int32, and an id is not in its range.
    """
    request = pb.ModelInferRequest(model_name=model)
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
        request.inputs.add(name=name, datatype="FP32", shape=[1, *rows.shape])
        request.raw_input_contents.append(rows.tobytes())
    if info.scores:  # else all are answered
        for name in tensors.outputs:
            request.outputs.add(name=name)
    if tensors.features is not None and list(tensors.features) != list(info.keys):
        request.parameters["features"].string_param = ",".join(tensors.features)
    if tensors.tables is not None:
        request.parameters[TABLES].string_param = ",".join(tensors.tables)
    if tensors.once:
        request.parameters[ONCE].string_param = ",".join(tensors.once)
    if tensors.every_host:
        request.parameters[EVERY_HOST].bool_param = True
    return request
