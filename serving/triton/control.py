"""Load, unload and list the models of a server: Triton's model repository API, over HTTP.

The server listens on a Unix socket that only its own user can reach. If clients use HTTP too, it listens on its HTTP
port, and the API needs a key.

Run with Triton 24.10.
The API: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md
"""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import quote

from serving.arguments import check_arguments, check_timeout
from serving.errors import (
    AccessDenied,
    DeadlineExceeded,
    InternalError,
    ModelNotFound,
    ServerUnavailable,
    ServingError,
)
from serving.model.settings import RECOVERED
from serving.triton.command_line import KEY_HEADER
from serving.triton.error_messages import load_failure

# The reason in the index of a version that was unloaded on request.
UNLOADED = "unloaded"
# The prefix of a Unix socket's address, here and in --http-address.
UNIX = "unix:"
# A parameter of the config that a model is loaded with, never of config.pbtxt. It marks a model that serves other
# versions than config.pbtxt names. Its value is the version that config.pbtxt names: a number, or the newest.
_INSTEAD_OF = "expected_version"
NEWEST = "newest"
_ERRORS: Mapping[int, type[ServingError]] = {403: AccessDenied, 404: ModelNotFound, 503: ServerUnavailable}


@dataclass(frozen=True, slots=True)
class VersionState:
    """A version in the server's index. `state` is "READY" if it serves, or else `reason` says why not."""

    model: str
    version: int
    state: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """The control API of one server.

    Attributes:
        address: the server's HTTP address, "host:port" or "unix:/path".
        key: the key of its restricted protocols, or None.
        timeout_s: the deadline of each call, in seconds.

    Raises:
        ConfigurationError: `timeout_s` is not a possible timeout.
        ServingError: from every method, if the server cannot be reached or refuses.
    """

    address: str
    key: str | None = field(repr=False)
    timeout_s: float

    def __post_init__(self) -> None:
        check_arguments(self)
        check_timeout(self.timeout_s)

    def server_version(self) -> str:
        """Triton's version, such as "2.51.0"."""
        version: str = self._call("v2")["version"]
        return version

    def index(self) -> tuple[VersionState, ...]:
        """Every version that the server has loaded, or tried to load.

        Triton 2.51 reads the repository for the index, and lists nothing if the repository has a broken link. Only
        the versions that serve are returned then.
        """
        try:
            index = self._call("v2/repository/index", {})
        except InternalError:
            serving = [(model, version) for model, version in self.answered() if self._serves(model, version)]
            return tuple(VersionState(model, version, "READY", "") for model, version in serving)
        return tuple(
            VersionState(
                entry["name"], int(entry["version"]), entry.get("state", ""), _without_trace(entry.get("reason", ""))
            )
            for entry in index
            if entry.get("version")
        )

    def _serves(self, model: str, version: int) -> bool:
        try:
            self._call(f"v2/models/{_quoted(model)}/versions/{version}/ready")
        except (InternalError, ModelNotFound):
            return False
        return True

    def ready(self, model: str) -> tuple[int, ...]:
        """The versions of `model` that serve."""
        return tuple(entry.version for entry in self.index() if entry.model == model and entry.state == "READY")

    def config(self, model: str) -> Any:
        """The ModelConfig that `model` is served with, as JSON."""
        return self._call(f"v2/models/{_quoted(model)}/config")

    def load(self, model: str, versions: Sequence[int] = (), config: Any = None) -> tuple[int, ...]:
        """Serve exactly `versions`. The old versions serve until the new ones are ready.

        Args:
            model: the name of the model.
            versions: the versions, or empty for those that config.pbtxt names. The newest one answers requests that
                name no version.
            config: the ModelConfig to load them with, as JSON. None stands for the current ModelConfig of the model,
                or, without `versions`, for the one that Triton makes of config.pbtxt.

        Returns:
            The versions that serve now.

        Raises:
            ServingError: a version is missing, or cannot be loaded. The old versions continue to serve.
        """
        if versions:
            self._load(model, _pinned(self.config(model) if config is None else config, versions))
            now = self.ready(model)
            # Triton ignores versions that it does not find, if it finds one of them.
            if missing := sorted({*versions} - {*now}):
                raise ModelNotFound(f"model {model!r}: expected version {missing[0]} to serve, got {list(now)}")
            return now
        self._load(model, config)
        if config is not None:
            return self.ready(model)
        # Triton reads config.pbtxt only if that file or a version changed. Otherwise it keeps the last config that
        # it was given, which may name other versions.
        config = self.config(model)
        if _INSTEAD_OF in config["parameters"]:
            _serve(config, config["parameters"].pop(_INSTEAD_OF)["string_value"])
            self._load(model, config)
        return self.ready(model)

    def recover(self, model: str, config: Any, versions: Sequence[int], since: float) -> None:
        """Unload a model whose process died, and load it as it was served. A load alone would do nothing.

        Args:
            model: the name of the model.
            config: the ModelConfig that it was served with, as `config` returned it.
            versions: the versions that were served. `config` may name more: Triton 2.51 does not record that one
                version of several was unloaded.
            since: Unix time. Weights files that were not changed after it are not verified again.
        """
        override = _pinned(config, versions)
        override["parameters"][RECOVERED] = {"string_value": str(since)}
        self._call(f"v2/repository/models/{_quoted(model)}/unload", {})
        self._load(model, override)

    def answered(self) -> dict[tuple[str, int], int]:
        """The number of successful requests, by (model, version).

        Errors do not count: while a model's process hangs, Triton itself refuses requests to it.
        """
        return {
            (entry["name"], int(entry["version"])): entry["inference_stats"]["success"]["count"]
            for entry in self._call("v2/models/stats")["model_stats"]
        }

    def infer(self, model: str, version: int, request: Any) -> None:
        """Send one request, and drop the answer."""
        self._call(f"v2/models/{_quoted(model)}/versions/{version}/infer", request)

    def _load(self, model: str, config: Any) -> None:
        parameters = {} if config is None else {"parameters": {"config": json.dumps(config)}}
        try:
            self._call(f"v2/repository/models/{_quoted(model)}/load", parameters)
        except ServingError as error:
            raise type(error)(load_failure(str(error), lambda: self.ready(model))) from None

    def _call(self, path: str, body: Any = None) -> Any:
        """Call by GET, or by POST if there is a body. Returns the JSON of the response."""
        headers = {} if self.key is None else {KEY_HEADER: self.key}
        data = None if body is None else json.dumps(body)
        connection = _connection(self.address, self.timeout_s)
        try:
            connection.request("GET" if body is None else "POST", f"/{path}", data, headers)
            response = connection.getresponse()
            content = response.read()
            if response.status != HTTPStatus.OK:
                raise _ERRORS.get(response.status, InternalError)(_reason(response, content))
            # Its index has the names of all folders of the repository, which may not be UTF-8.
            return json.loads(content.decode(errors="surrogateescape")) if content else None
        except TimeoutError:
            raise DeadlineExceeded(f"{self.address}: no answer within {self.timeout_s:g} s") from None
        except (OSError, ValueError, HTTPException) as error:
            raise ServerUnavailable(f"{self.address}: no answer of a server: {error or repr(error)}") from None
        finally:
            connection.close()


def metrics_page(address: str, timeout_s: float) -> bytes:
    """A server's metrics, in Prometheus' text format.

    Args:
        address: the address of the metrics, "unix:/path".
        timeout_s: the deadline, in seconds.

    Raises:
        ServerUnavailable: the server does not answer.
    """
    connection = _connection(address, timeout_s)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read()
    except (OSError, HTTPException) as error:
        raise ServerUnavailable(f"tritonserver: no answer: {error or repr(error)}") from None
    finally:
        connection.close()


class _UnixConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(address: str, timeout_s: float) -> HTTPConnection:
    if address.startswith(UNIX):
        return _UnixConnection(address.removeprefix(UNIX), timeout_s)
    return HTTPConnection(address, timeout=timeout_s)


def _quoted(model: str) -> str:
    return quote(model, safe="")


def _reason(response: HTTPResponse, content: bytes) -> str:
    try:
        reason: str = json.loads(content)["error"]
    except (ValueError, TypeError, KeyError):
        reason = f"{response.status} {response.reason}"
    reason = _without_trace(reason)
    if response.status == HTTPStatus.FORBIDDEN:
        reason += ": `tbe-serve run` keeps the key for its own user on its own machine"
    return reason


def _without_trace(reason: str) -> str:
    """A reason of Triton's without the traceback after it."""
    return reason.partition("\n\nAt:\n")[0].strip()


def replaced_policy(config: Any) -> str | None:
    """The version that config.pbtxt names if a model was loaded with other versions: a number, or `NEWEST`.

    Args:
        config: the ModelConfig that the model is served with, as `Control.config` returns it.

    Returns:
        None if the model was loaded as config.pbtxt says.
    """
    parameter = config["parameters"].get(_INSTEAD_OF)
    return None if parameter is None else str(parameter["string_value"])


def _pinned(config: Any, versions: Sequence[int]) -> Any:
    """A copy of `config` that serves these versions, and has the version of config.pbtxt as `_INSTEAD_OF`."""
    parameters = dict(config["parameters"])
    parameters.pop(RECOVERED, None)
    if _INSTEAD_OF not in parameters:
        own_versions = config.get("version_policy", {}).get("specific", {}).get("versions", [])
        parameters[_INSTEAD_OF] = {"string_value": str(own_versions[0]) if own_versions else NEWEST}
    return {**config, "parameters": parameters, "version_policy": {"specific": {"versions": list(versions)}}}


def _serve(config: Any, version: str) -> None:
    """Change `config` to serve `version`: a number, or `NEWEST`."""
    config["version_policy"] = (
        {"latest": {"num_versions": 1}} if version == NEWEST else {"specific": {"versions": [int(version)]}}
    )
    config["parameters"].pop(RECOVERED, None)
