"""KServe's ModelInfer, which most peers speak: one raw tensor in, one raw tensor out."""

import numpy as np
from tritonclient.grpc import service_pb2 as pb

MODEL = "tables"


def ids_of(request: pb.ModelInferRequest) -> np.ndarray:
    """`ids` int64 [B, ids] of a request."""
    return np.frombuffer(request.raw_input_contents[0], np.int64).reshape(request.inputs[0].shape)


def response(embeddings: np.ndarray) -> pb.ModelInferResponse:
    """The response that carries `embeddings`."""
    message = pb.ModelInferResponse(model_name=MODEL, raw_output_contents=[embeddings.tobytes()])
    message.outputs.add(name="embeddings", datatype="FP32", shape=embeddings.shape)
    return message


def request(ids: np.ndarray) -> pb.ModelInferRequest:
    """The request that carries `ids`."""
    message = pb.ModelInferRequest(model_name=MODEL, raw_input_contents=[ids.tobytes()])
    message.inputs.add(name="ids", datatype="INT64", shape=ids.shape)
    message.outputs.add(name="embeddings")
    return message
