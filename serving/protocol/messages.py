"""The messages of Triton's gRPC protocol: KServe's GRPCInferenceService with Triton's additions, and ModelConfig.

The messages are in a descriptor pool of our own. In protobuf's default pool a name can be defined once in a process,
and tritonclient, KServe's SDK and MLServer each define `inference.ModelInferRequest` there, each in its own file. On
the wire all of them are the same.

`descriptors.binpb` is the FileDescriptorSet of model_config.proto and grpc_service.proto of
https://github.com/triton-inference-server/common, as protoc compiled them for the tritonclient that tests are pinned
to (tests/serving/protocol/test_messages.py). Their licence is `LICENSE`.
"""

from importlib.resources import files
from typing import Any

import numpy.typing as npt
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message_factory import GetMessageClass

DESCRIPTORS = "descriptors.binpb"
_PACKAGE = "inference"
_SERVICE = f"{_PACKAGE}.GRPCInferenceService"


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(files(__package__).joinpath(DESCRIPTORS).read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _pool()


def _message(name: str) -> Any:
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ModelConfig = _message("ModelConfig")
ModelConfigRequest = _message("ModelConfigRequest")
ModelInferRequest = _message("ModelInferRequest")
ModelInferResponse = _message("ModelInferResponse")
ModelInstanceGroup = _message("ModelInstanceGroup")
ModelReadyRequest = _message("ModelReadyRequest")
ModelStatisticsRequest = _message("ModelStatisticsRequest")
ServerMetadataRequest = _message("ServerMetadataRequest")
# Triton's names of dtypes, TYPE_INT64 and so on.
DataType: Any = EnumTypeWrapper(_POOL.FindEnumTypeByName(f"{_PACKAGE}.DataType"))


def add_ids(
    request: Any, values: npt.NDArray[Any], lengths: npt.NDArray[Any], weights: npt.NDArray[Any] | None
) -> None:
    """Add the inputs `values`, `lengths` and `weights` to a ModelInferRequest, each as [1, n].

    Args:
        request: the ModelInferRequest.
        values: int32 or int64 [n].
        lengths: int32 [n].
        weights: float32 [n], or None for no such input.
    """
    for name, datatype, array in (
        ("values", f"INT{8 * values.itemsize}", values),
        ("lengths", "INT32", lengths),
        ("weights", "FP32", weights),
    ):
        if array is not None:
            request.inputs.add(name=name, datatype=datatype, shape=[1, array.size])
            request.raw_input_contents.append(array.tobytes())


def path_of(method: str) -> str:
    """The path of a method of GRPCInferenceService, as gRPC names it."""
    return f"/{_SERVICE}/{method}"


def unary(channel: Any, method: str) -> Any:
    """The callable of a method that has one request and one response.

    Args:
        channel: of grpc or grpc.aio.
        method: of GRPCInferenceService, such as "ModelInfer".
    """
    described = _POOL.FindServiceByName(_SERVICE).methods_by_name[method]
    return channel.unary_unary(
        path_of(method),
        request_serializer=GetMessageClass(described.input_type).SerializeToString,
        response_deserializer=GetMessageClass(described.output_type).FromString,
    )
