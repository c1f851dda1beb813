"""KServe's ModelInfer, which most peers speak: raw tensors in, one raw tensor out."""

import numpy as np
from arrays import Arrays
from tritonclient.grpc import service_pb2 as pb

MODEL = "tables"
_DTYPES = {"INT64": np.int64, "FP32": np.float32}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


def arrays_of(request: pb.ModelInferRequest) -> Arrays:
    """The arrays [B, width] of a request by name."""
    return {
        input_.name: np.frombuffer(content, _DTYPES[input_.datatype]).reshape(input_.shape)
        for input_, content in zip(request.inputs, request.raw_input_contents, strict=True)
    }


def response(output: str, answer: np.ndarray) -> pb.ModelInferResponse:
    """The response that carries `answer` as `output`."""
    message = pb.ModelInferResponse(model_name=MODEL, raw_output_contents=[answer.tobytes()])
    message.outputs.add(name=output, datatype="FP32", shape=answer.shape)
    return message


def request(arrays: Arrays) -> pb.ModelInferRequest:
    """The request that carries `arrays`."""
    message = pb.ModelInferRequest(model_name=MODEL)
    for name, array in arrays.items():
        message.inputs.add(name=name, datatype=_NAMES[array.dtype], shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    return message
