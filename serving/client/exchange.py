"""A lookup as steps: which calls are made with which messages, and what their answers mean. Does no I/O itself.

Each generator yields calls and is sent their responses, or thrown the error of one; so the client with threads and
the one with asyncio are the same.
"""

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

import numpy as np
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from serving.client.answer import Answer, ModelInfo
from serving.client.regions import Region, Regions
from serving.encoding import Features, decode, encode
from serving.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    RequestCancelled,
    ServerFault,
    ServingError,
    from_status,
)
from serving.kjt import Embeddings, Tensors
from serving.strict import is_utf8

T = TypeVar("T")
_TYPE_FP16 = model_config_pb2.TYPE_FP16
_PARAMETERS = {"features", "dims", "contract"}


class Call(NamedTuple):
    """A method of KServe's GRPCInferenceService, and its request."""

    method: str
    request: Any


Steps = Generator[Call, Any, T]


class Exchange:
    """What one client says to one model.

    Args:
        where: the server and the model, for errors.
        model: its name.
        shared_memory: whether answers come through shared memory.
    """

    def __init__(self, where: str, model: str, shared_memory: bool) -> None:
        if not is_utf8(model):
            raise InvalidRequest(f"{where}: expected a name in UTF-8")
        self._where = where
        self._model = model
        self._regions = Regions() if shared_memory else None
        self._info: ModelInfo | None = None

    def info(self) -> Steps[ModelInfo]:
        """The model's features and dims, asked for once."""
        if self._info is None:
            response = yield Call("ModelConfig", pb.ModelConfigRequest(name=self._model))
            parameters = {key: value.string_value for key, value in response.config.parameters.items()}
            data_type = response.config.output[0].data_type if response.config.output else None
            if not parameters.keys() >= _PARAMETERS:
                raise ServerFault(f"{self._where} was not made by tbe-export: its config names no features")
            self._info = ModelInfo.of(parameters, np.dtype(np.float16 if data_type == _TYPE_FP16 else np.float32))
        return self._info

    def lookup(self, features: Features) -> Steps[Answer]:
        """The embeddings of some samples."""
        info = yield from self.info()
        tensors = encode(features, info.weighted)
        keys = tensors.features or ()
        for name in keys:
            if name not in info.keys:
                raise InvalidRequest(f"feature {name!r}: expected one of {', '.join(map(repr, info.keys))}")
        dims = {name: info.dims[name] for key in keys for name in info.keys[key]}
        shape = (tensors.lengths.size // len(keys), sum(dims.values()))
        request = infer_request(self._model, tensors, info)
        if self._regions is None or 0 in shape:
            response = yield Call("ModelInfer", request)
            self._check_shape(response, shape)
            embeddings = np.frombuffer(response.raw_output_contents[0], info.output_dtype).reshape(shape)
        else:
            response, embeddings = yield from self._through_region(self._regions, request, info, shape)
        return Answer(decode(embeddings, dims), int(response.model_version))

    def close(self) -> Steps[None]:
        """Take back what the server was told."""
        if self._regions is not None:
            for region in self._regions.close():
                yield Call("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=region.name))

    def _through_region(
        self, regions: Regions, request: Any, info: ModelInfo, shape: tuple[int, int]
    ) -> Steps[tuple[Any, Embeddings]]:
        size_bytes = shape[0] * shape[1] * info.output_dtype.itemsize
        region = regions.take(size_bytes)
        try:
            if not region.registered:
                yield from _register(region)
            output = request.outputs.add(name="embeddings")
            output.parameters["shared_memory_region"].string_param = region.name
            output.parameters["shared_memory_byte_size"].int64_param = size_bytes
            try:
                response = yield Call("ModelInfer", request)
            except (InvalidRequest, ModelNotFound):
                status = yield Call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest())
                if region.name in status.regions:
                    raise
                yield from _register(region)  # the server was started anew meanwhile
                response = yield Call("ModelInfer", request)
            self._check_shape(response, shape)
        except (DeadlineExceeded, RequestCancelled):
            raise  # the server may still write: nobody gets this region again
        except ServingError:
            regions.give_back(region)
            raise
        array = region.array(info.output_dtype, shape)
        array.flags.writeable = False
        regions.give_back_after(array, region)
        return response, array

    def _check_shape(self, response: Any, shape: tuple[int, int]) -> None:
        found = list(response.outputs[0].shape)
        if found != [1, *shape]:
            raise ServerFault(
                f"{self._where}: expected embeddings of shape {[1, *shape]}, got {found}: another model took this "
                "one's name: make a new client"
            )


def _register(region: Region) -> Steps[None]:
    request = pb.SystemSharedMemoryRegisterRequest(
        name=region.name, key=f"/{region.name}", offset=0, byte_size=region.size_bytes
    )
    try:
        yield Call("SystemSharedMemoryRegister", request)
    except ServingError as error:
        raise from_status(
            error.code,
            f"{error}: shared memory needs a server on this host that allows it (tbe-serve run --allow "
            "shared-memory): make the client without",
        ) from None
    region.registered = True


def infer_request(model: str, tensors: Tensors, info: ModelInfo) -> Any:
    """A ModelInferRequest with `tensors`, its features named where they are not the model's default order."""
    request = pb.ModelInferRequest(model_name=model)
    for name, datatype, array in (
        ("values", "INT64", tensors.values),
        ("lengths", "INT32", tensors.lengths),
        ("weights", "FP32", tensors.weights),
    ):
        if array is not None:
            request.inputs.add(name=name, datatype=datatype, shape=[1, array.size])
            request.raw_input_contents.append(array.tobytes())
    if tensors.features is not None and list(tensors.features) != list(info.keys):
        request.parameters["features"].string_param = ",".join(tensors.features)
    return request
