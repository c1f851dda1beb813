"""What travels to a host and back: KServe's ModelInferRequest and ModelInferResponse."""

from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from serving.bundle.hosts import HostBundle, IdDtype
from serving.errors import InternalError
from serving.ranks.partial import PartialRequest, PartialSums

METHOD = "/inference.GRPCInferenceService/ModelInfer"
# The request parameter with the digest of the bundle that has to answer.
BUNDLE = "bundle"
_DTYPES: dict[str, type[np.floating[Any]]] = {"FP32": np.float32, "FP16": np.float16}
_ID_TYPES = {IdDtype.INT32: np.int32, IdDtype.INT64: np.int64}

Response = pb.ModelInferResponse


class Messages:
    """The requests to a host, encoded, and its responses, decoded.

    Args:
        bundle: what has to answer.
        id_dtype: of rows, as they travel.
    """

    def __init__(self, bundle: HostBundle, id_dtype: IdDtype) -> None:
        self._id_dtype = id_dtype
        # Requests are bytes: what all have in common is encoded once.
        prefix = pb.ModelInferRequest(model_name=bundle.model, model_version=str(bundle.version))
        prefix.parameters[BUNDLE].string_param = bundle.manifest
        self._prefix: bytes = prefix.SerializeToString()

    def encode(self, request: PartialRequest) -> bytes:
        """A ModelInferRequest. Protocol buffers join messages by putting one behind the other."""
        content = pb.ModelInferRequest()
        rows = request.rows.astype(_ID_TYPES[self._id_dtype])
        for name, datatype, array in (
            ("values", self._id_dtype.value, rows),
            ("lengths", "INT32", request.lengths),
            ("weights", "FP32", request.weights),
        ):
            if array is not None:
                content.inputs.add(name=name, datatype=datatype, shape=[1, array.size])
                content.raw_input_contents.append(array.tobytes())
        if request.segments is not None:
            content.parameters["features"].string_param = request.segments
        encoded: bytes = content.SerializeToString()
        return self._prefix + encoded


def decode(response: Any, request: PartialRequest) -> PartialSums:
    """The partial sums in a response: float32 or float16 [B, columns], the response's own bytes.

    Raises:
        InternalError: the response answers another request.
    """
    expected = [1, request.samples, request.columns]
    output = response.outputs[0] if len(response.outputs) == len(response.raw_output_contents) == 1 else None
    if output is None or list(output.shape) != expected or output.datatype not in _DTYPES:
        found = None if output is None else f"{output.datatype} {list(output.shape)}"
        raise InternalError(f"expected sums of shape {expected}, got {found}")
    content = response.raw_output_contents[0]
    dtype = np.dtype(_DTYPES[output.datatype])
    if len(content) != request.samples * request.columns * dtype.itemsize:
        raise InternalError(f"expected sums of shape {expected}, got {len(content)} bytes")
    sums: PartialSums = np.frombuffer(content, dtype).reshape(expected[1:])
    return sums
