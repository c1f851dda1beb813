"""Which versions a server serves: Triton's model repository API, over HTTP on its own machine.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import quote

from serving.client.connection import check_timeout
from serving.errors import AccessDenied, DeadlineExceeded, ModelNotFound, ServerFault, ServerUnavailable, ServingError
from serving.server.access import KEY_HEADER
from serving.settings import INSTEAD_OF, RECOVERED

# The server is on this machine: no proxy that the environment names knows it.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ERRORS: Mapping[int, type[ServingError]] = {403: AccessDenied, 404: ModelNotFound, 503: ServerUnavailable}


@dataclass(frozen=True, slots=True)
class VersionState:
    """A version in the server's index; `state` is "READY" when it serves, and `reason` says why it does not."""

    model: str
    version: int
    state: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """Loads, unloads and asks.

    Attributes:
        http: the server's HTTP address, "host:port".
        key: opens what the server keeps closed; None where it keeps nothing closed.
        timeout_s: deadline of each call.

    Raises:
        ServingError: from every method, when the server cannot be reached or refuses.
    """

    http: str
    key: str | None = field(repr=False)
    timeout_s: float

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)

    def server_version(self) -> str:
        """Triton's version, such as "2.51.0"."""
        version: str = self._call("v2")["version"]
        return version

    def index(self) -> tuple[VersionState, ...]:
        """Every version that the server has loaded, or failed to."""
        found = self._call("v2/repository/index", {})
        return tuple(
            VersionState(each["name"], int(each["version"]), each.get("state", ""), each.get("reason", ""))
            for each in found
            if each.get("version")
        )

    def ready(self, model: str) -> tuple[int, ...]:
        """The versions of `model` that serve."""
        return tuple(each.version for each in self.index() if each.model == model and each.state == "READY")

    def config(self, model: str) -> Any:
        """The ModelConfig that `model` is served with, as JSON."""
        return self._call(f"v2/models/{_quoted(model)}/config")

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
            if INSTEAD_OF in config["parameters"]:
                _serve(config, config["parameters"].pop(INSTEAD_OF)["string_value"])
                self._load(model, config)
        else:
            config = self.config(model)
            if INSTEAD_OF not in config["parameters"]:
                said = config.get("version_policy", {}).get("specific", {}).get("versions", [])
                config["parameters"][INSTEAD_OF] = {"string_value": str(said[0]) if said else ""}
            _serve(config, str(version))
            self._load(model, config)
        return self.ready(model)

    def recover(self, model: str, since: float) -> None:
        """Load a model anew, as it was served, when its process died: a load alone would do nothing.

        Args:
            model: its name.
            since: when the server was started, Unix time: weights that have not changed since were verified.
        """
        config = self.config(model)
        config["parameters"][RECOVERED] = {"string_value": str(since)}
        self._call(f"v2/repository/models/{_quoted(model)}/unload", {})
        self._load(model, config)

    def _load(self, model: str, config: Any = None) -> None:
        parameters = {} if config is None else {"parameters": {"config": json.dumps(config)}}
        self._call(f"v2/repository/models/{_quoted(model)}/load", parameters)

    def _call(self, path: str, body: Any = None) -> Any:
        """GET, or POST where there is a body."""
        headers = {} if self.key is None else {KEY_HEADER: self.key}
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"http://{self.http}/{path}", data=data, headers=headers)
            with _DIRECT.open(request, timeout=self.timeout_s) as response:
                content = response.read()
            return json.loads(content) if content else None
        except urllib.error.HTTPError as error:
            raise _ERRORS.get(error.code, ServerFault)(f"{self.http}: {_reason(error)}") from None
        except TimeoutError:
            raise DeadlineExceeded(f"{self.http}: no answer within {self.timeout_s:g} s") from None
        except (urllib.error.URLError, OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", None) or repr(error)
            raise ServerUnavailable(
                f"{self.http or repr('')}: expected the HTTP address of a server: {reason}"
            ) from None


def _quoted(model: str) -> str:
    return quote(model, safe="")


def _reason(error: urllib.error.HTTPError) -> str:
    content = error.read()
    try:
        reason: str = json.loads(content)["error"]
    except (ValueError, TypeError, KeyError):
        reason = f"{error.code} {error.reason}"
    reason = reason.partition("\n\nAt:\n")[0].strip()  # then Triton names the line of our code that gave it
    if error.code == 403:
        reason += ": `tbe-serve run` keeps the key for its own user on its own machine"
    return reason


def _serve(config: Any, version: str) -> None:
    """Make `config` serve a version, the newest if it is ""."""
    config["version_policy"] = (
        {"specific": {"versions": [int(version)]}} if version else {"latest": {"num_versions": 1}}
    )
    config["parameters"].pop(RECOVERED, None)
