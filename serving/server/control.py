"""Which versions a server serves: Triton's model repository API, over gRPC.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from serving.client.connection import Connection
from serving.config_file import parameters_of
from serving.errors import ModelNotFound, from_status

# Times that a model was loaded anew after its process died; the backend shows it as a metric.
RECOVERIES = "recoveries"


@dataclass(frozen=True, slots=True)
class VersionState:
    """A version in the server's index; `state` is "READY" when it serves, and `reason` says why it does not."""

    model: str
    version: int
    state: str
    reason: str


class Control:
    """Loads, unloads and asks; each call has the connection's deadline.

    Raises:
        ServingError: from every method, when the server cannot be reached or refuses.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._channel = connection.channel(grpc)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def index(self) -> tuple[VersionState, ...]:
        """Every version that the server has loaded, or failed to."""
        found = self._call("RepositoryIndex", pb.RepositoryIndexRequest()).models
        return tuple(
            VersionState(each.name, int(each.version), each.state, each.reason) for each in found if each.version
        )

    def ready(self, model: str) -> tuple[int, ...]:
        """The versions of `model` that serve."""
        return tuple(each.version for each in self.index() if each.model == model and each.state == "READY")

    def config(self, model: str) -> Any:
        """The ModelConfig that `model` is served with."""
        return self._call("ModelConfig", pb.ModelConfigRequest(name=model)).config

    def load(self, model: str, version: int | None = None) -> tuple[int, ...]:
        """Serve what config.pbtxt says, or `version`; the one that serves now goes on until that is ready.

        Returns:
            The versions that serve now.

        Raises:
            ServingError: it cannot be loaded; what served before still does.
        """
        if version is None:
            self._load(model)
        else:
            config = self.config(model)
            config.version_policy.specific.versions[:] = [version]
            self._load(model, config)
        found = self.ready(model)
        if version is not None and found != (version,):
            raise ModelNotFound(f"{self._where}: model {model!r}: version {version} is not there")
        return found

    def recover(self, model: str) -> None:
        """Load a model anew, as it was served, when its process died: a load alone would do nothing."""
        config = self.config(model)
        count = int(parameters_of(config).get(RECOVERIES, "0"))
        config.parameters[RECOVERIES].string_value = str(count + 1)
        self._call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=model))
        self._load(model, config)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _where(self) -> str:
        return ",".join(self._connection.addresses)

    def _load(self, model: str, config: Any = None) -> None:
        request = pb.RepositoryModelLoadRequest(model_name=model)
        if config is not None:
            text = json_format.MessageToJson(config, preserving_proto_field_name=True)
            request.parameters["config"].string_param = text
        self._call("RepositoryModelLoad", request)

    def _call(self, method: str, request: Any) -> Any:
        metadata = self._connection.call_metadata(None)
        try:
            return getattr(self._stub, method)(request, timeout=self._connection.timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise from_status(error.code().name, f"{self._where}: {error.details()}") from None
