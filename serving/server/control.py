"""Which versions a server serves: Triton's model repository API, over gRPC.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md
"""

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from serving.client.connection import Closing, Connection
from serving.errors import from_status
from serving.settings import INSTEAD_OF, RECOVERED


@dataclass(frozen=True, slots=True)
class VersionState:
    """A version in the server's index; `state` is "READY" when it serves, and `reason` says why it does not."""

    model: str
    version: int
    state: str
    reason: str


class Control(Closing):
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
            # Triton reads config.pbtxt if that, or a version, changed; else it goes on with what it was given.
            config = self.config(model)
            if INSTEAD_OF in config.parameters:
                _serve(config, config.parameters.pop(INSTEAD_OF).string_value)
                self._load(model, config)
        else:
            config = self.config(model)
            if INSTEAD_OF not in config.parameters:
                said = config.version_policy.specific.versions
                config.parameters[INSTEAD_OF].string_value = str(said[0]) if said else ""
            _serve(config, str(version))
            self._load(model, config)
        return self.ready(model)

    def recover(self, model: str) -> None:
        """Load a model anew, as it was served, when its process died: a load alone would do nothing."""
        config = self.config(model)
        config.parameters[RECOVERED].string_value = "true"
        self._call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=model))
        self._load(model, config)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

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
            reason = error.details().partition("\n\nAt:\n")[0]  # then Triton names the line of our code that gave it
            raise from_status(error.code().name, f"{self._where}: {reason.strip()}") from None


def _serve(config: Any, version: str) -> None:
    """Make `config` serve a version, the newest if it is ""."""
    config.ClearField("version_policy")
    if version:
        config.version_policy.specific.versions.append(int(version))
    config.parameters.pop(RECOVERED, None)
