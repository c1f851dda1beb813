"""What travels to a host and back: KServe's ModelInferRequest and ModelInferResponse."""

from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from serving.bundle.hosts import HostBundle, IdDtype
from serving.errors import InternalError
from serving.ranks.partial import PartialRequest, PartialSums
from serving.request.tensors import EMBEDDINGS
from serving.said import shown

METHOD = "/inference.GRPCInferenceService/ModelInfer"
# The request parameters with the digest of the bundle that has to answer, and with what it has to be a part of.
BUNDLE, PART_OF = "bundle", "part_of"
# All of a response but its numbers is smaller than this.
_LARGEST_REST_BYTES = 1 << 12
_MOST_SHOWN = 150
MORE_THAN_ONE = "expected one response, got more"
_DTYPES: dict[str, type[np.floating[Any]]] = {"FP32": np.float32, "FP16": np.float16}
_ID_TYPES = {IdDtype.INT32: np.int32, IdDtype.INT64: np.int64}


class Messages:
    """The requests to a host, encoded, and its responses, decoded. A response is what anybody may have sent.

    Args:
        bundle: what has to answer.
        id_dtype: of rows, as they travel.
    """

    def __init__(self, bundle: HostBundle, id_dtype: IdDtype) -> None:
        self._id_dtype = id_dtype
        self._by = (bundle.model, str(bundle.version))
        # Of all answers of the bundle. Known after the first.
        self._datatype: str | None = None
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
        if request.part_of is not None:
            content.parameters[PART_OF].string_param = request.part_of
        encoded: bytes = content.SerializeToString()
        return self._prefix + encoded

    def decode(self, message: bytes | None, request: PartialRequest) -> PartialSums:
        """The partial sums in a response: float32 or float16 [B, columns], its own bytes.

        Raises:
            InternalError: it is no response, another model's, or answers another request.
        """
        if message is None:
            raise InternalError("expected a response, got none")
        try:
            response = pb.ModelInferResponse.FromString(message)
        except DecodeError:
            raise InternalError("expected a ModelInferResponse, got other bytes") from None
        by = (response.model_name, response.model_version)
        if by != self._by:
            raise InternalError(f"expected an answer of {_described(*self._by)}, got one of {_described(*by)}")
        if not len(response.outputs) == len(response.raw_output_contents) == 1:
            raise InternalError(
                f"expected one output, got {len(response.outputs)}, and bytes of {len(response.raw_output_contents)}"
            )
        output, content = response.outputs[0], response.raw_output_contents[0]
        datatypes = (*_DTYPES,) if self._datatype is None else (self._datatype,)
        shape = [1, request.samples, request.columns]
        if output.name != EMBEDDINGS or output.datatype not in datatypes or list(output.shape) != shape:
            found = f"{output.name!r} of {output.datatype!r} {list(output.shape[: len(shape) + 1])}"
            raise InternalError(
                f"expected {EMBEDDINGS!r} of {' or '.join(datatypes)} {shape}, got {shown(found, _MOST_SHOWN)}"
            )
        dtype = np.dtype(_DTYPES[output.datatype])
        if len(content) != request.samples * request.columns * dtype.itemsize:
            raise InternalError(f"expected {output.datatype} {shape}, got {len(content)} bytes")
        self._datatype = output.datatype
        sums: PartialSums = np.frombuffer(content, dtype).reshape(shape[1:])
        return sums


def largest_answer(request: PartialRequest) -> int:
    """The most bytes that the response to a request has."""
    return _LARGEST_REST_BYTES + request.samples * request.columns * np.dtype(np.float32).itemsize


def _described(model: str, version: str) -> str:
    return shown(f"{model!r} version {version!r}", _MOST_SHOWN)
