"""config.pbtxt of a served model, through Triton's own protobuf: read it, change it, write it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serving.atomic import replacing
from serving.errors import ConfigurationError
from serving.files import read_file
from serving.settings import ServingSettings, parsed

if TYPE_CHECKING:  # cryptography is of no use to a client
    from serving.signature import TrustedKeys

CONFIG = "config.pbtxt"


def read_config(model: Path, trusted: "TrustedKeys | None" = None) -> Any:
    """The ModelConfig of the model in the folder `model`.

    Args:
        model: <repository>/<name>.
        trusted: one of these keys must have signed it as that model's; anybody may have made it where None.

    Raises:
        ConfigurationError: there is none, or it cannot be parsed.
        BundleError: none of the keys signed it.
    """
    path = model / CONFIG
    if trusted is None:
        try:
            content = read_file(path)
        except OSError as error:
            raise ConfigurationError(
                f"{path}: cannot be read: {error.strerror}: expected a model that tbe-export made, REPOSITORY/NAME"
            ) from error
    else:
        content = trusted.read_signed(path, Path(os.path.abspath(model)).name)
    try:
        return text_format.Parse(content.decode(), model_config_pb2.ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path}: {error}") from error


def write_config(model: Path, config: Any) -> bytes:
    """Replace config.pbtxt at once: who reads it meanwhile gets the old one or the new one. What it holds then.

    Raises:
        ConfigurationError: the folder cannot be written to.
    """
    path = model / CONFIG
    content: bytes = text_format.MessageToString(config).encode()
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}") from error
    return content


def settings_of(config: Any) -> ServingSettings:
    """How `config` says that its model is served.

    Raises:
        ConfigurationError: a setting cannot be used.
    """
    queue = config.dynamic_batching.default_queue_policy
    versions = config.version_policy.specific.versions
    said: dict[str, Any] = {
        "instances": sum(group.count for group in config.instance_group) or 1,
        "queue_requests": queue.max_queue_size,
        "queue_timeout_ms": queue.default_timeout_microseconds // 1000,
        "version": versions[0] if versions else None,
    }
    return ServingSettings(**said, **parsed(parameters_of(config)))


def apply_settings(config: Any, settings: ServingSettings) -> None:
    """Make `config` serve its model so."""
    config.max_batch_size = settings.limits.waiting_requests
    config.instance_group[0].count = settings.instances
    config.dynamic_batching.ClearField("default_queue_policy")
    if settings.queue_requests or settings.queue_timeout_ms:
        queue = config.dynamic_batching.default_queue_policy
        queue.max_queue_size = settings.queue_requests
        queue.default_timeout_microseconds = 1000 * settings.queue_timeout_ms
        queue.timeout_action = queue.REJECT
    config.ClearField("version_policy")
    if settings.version is not None:
        config.version_policy.specific.versions.append(settings.version)
    for name in parsed(parameters_of(config)):
        del config.parameters[name]
    for name, value in settings.parameters.items():
        config.parameters[name].string_value = value
    # protobuf's JSON leaves an empty string out, and clients such as pytriton's then miss its `string_value`.
    for name in [name for name, text in parameters_of(config).items() if not text]:
        del config.parameters[name]


def parameters_of(config: Any) -> Mapping[str, str]:
    """The strings of `parameters`."""
    return {key: value.string_value for key, value in config.parameters.items()}
