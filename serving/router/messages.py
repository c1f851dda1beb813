"""Requests to a host and its responses: as arrays, and as KServe's ModelInferRequest and ModelInferResponse."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from serving.bundle.plan import HostBundle, IdDtype
from serving.bundle.tensor_names import EMBEDDINGS
from serving.errors import InternalError, shown
from serving.protocol.messages import ModelInferRequest, ModelInferResponse, add_ids, path_of
from serving.requests.parameters import PARAMETERS
from serving.requests.types import Ids, Lengths, Weights

PartialSums = npt.NDArray[np.float32] | npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class PartialRequest:
    """A request to a host. A segment is one feature over one shard.

    Attributes:
        rows: row numbers of the host's shards, segment-major; int64 [n].
        lengths: bag sizes, segment-major; int32 [segments · B].
        weights: the per-id weight of each row, float32 [n], or None if the host's segments take no weights.
        segments: the names of the requested segments, joined by commas, or None for all of the host's, in its order.
        samples: B.
        columns: the columns of the answer: the sum of the segments' widths.
        part_of: the plan that the answering bundle must be a part of, as `serving.bundle.plan.Part.text`, or None if
            that is not checked.
    """

    rows: Ids
    lengths: Lengths
    weights: Weights | None
    segments: str | None
    samples: int
    columns: int
    part_of: str | None = None


METHOD = path_of("ModelInfer")
# The parameters of a request to a host.
_SEGMENTS, _BUNDLE, _PART_OF = (PARAMETERS[field].name for field in ("features", "bundle", "part_of"))
# Maximum bytes of a response without its numbers.
_LARGEST_REST_BYTES = 1 << 12
_MOST_SHOWN = 150
MORE_THAN_ONE = "expected one response, got more"
_DTYPES: dict[str, type[np.floating[Any]]] = {"FP32": np.float32, "FP16": np.float16}
_ID_TYPES = {IdDtype.INT32: np.int32, IdDtype.INT64: np.int64}


class Messages:
    """Encodes requests to a host, and decodes its responses. Responses are not trusted.

    Args:
        bundle: the bundle that has to answer.
        id_dtype: the dtype of the row numbers in a message.
    """

    def __init__(self, bundle: HostBundle, id_dtype: IdDtype) -> None:
        self._id_dtype = id_dtype
        self._by = (bundle.model, str(bundle.version))
        # The datatype of all responses; None before the first one.
        self._datatype: str | None = None
        # The part that all requests have in common is encoded once.
        prefix = ModelInferRequest(model_name=bundle.model, model_version=str(bundle.version))
        prefix.parameters[_BUNDLE].string_param = bundle.manifest
        self._prefix: bytes = prefix.SerializeToString()

    def encode(self, request: PartialRequest) -> bytes:
        """The bytes of a ModelInferRequest. Protocol buffers merge messages whose bytes are concatenated."""
        content = ModelInferRequest()
        add_ids(content, request.rows.astype(_ID_TYPES[self._id_dtype]), request.lengths, request.weights)
        if request.segments is not None:
            content.parameters[_SEGMENTS].string_param = request.segments
        if request.part_of is not None:
            content.parameters[_PART_OF].string_param = request.part_of
        encoded: bytes = content.SerializeToString()
        return self._prefix + encoded

    def decode(self, message: bytes | None, request: PartialRequest) -> PartialSums:
        """The partial sums in a response: float32 or float16 [B, columns]. They share the memory of its content.

        Raises:
            InternalError: the message is not a ModelInferResponse, comes from another model, or does not fit the
                request.
        """
        if message is None:
            raise InternalError("expected a response, got none")
        try:
            response = ModelInferResponse.FromString(message)
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
            got = f"{output.name!r} of {output.datatype!r} {list(output.shape[: len(shape) + 1])}"
            raise InternalError(
                f"expected {EMBEDDINGS!r} of {' or '.join(datatypes)} {shape}, got {shown(got, _MOST_SHOWN)}"
            )
        dtype = np.dtype(_DTYPES[output.datatype])
        if len(content) != request.samples * request.columns * dtype.itemsize:
            raise InternalError(f"expected {output.datatype} {shape}, got {len(content)} bytes")
        self._datatype = output.datatype
        sums: PartialSums = np.frombuffer(content, dtype).reshape(shape[1:])
        return sums


def largest_answer(request: PartialRequest) -> int:
    """The maximum bytes of the response to a request."""
    return _LARGEST_REST_BYTES + request.samples * request.columns * np.dtype(np.float32).itemsize


def _described(model: str, version: str) -> str:
    return shown(f"{model!r} version {version!r}", _MOST_SHOWN)
