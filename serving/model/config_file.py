"""config.pbtxt of a served model: read, change and write it, through Triton's own protobuf."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict, ParseDict
from tritonclient.grpc import model_config_pb2

from serving.errors import ConfigurationError
from serving.files.reading import read_file
from serving.files.replacing import replacing
from serving.model.settings import LARGEST_HANDOVER, ServingSettings, parsed

if TYPE_CHECKING:  # clients have no use for cryptography
    from serving.bundle.signature import TrustedKeys

CONFIG = "config.pbtxt"


def read_config(model: Path, trusted: "TrustedKeys | None" = None) -> Any:
    """Read a model's config.pbtxt, as a ModelConfig of Triton's.

    Args:
        model: the model's folder, <repository>/<name>.
        trusted: one of these keys must have signed the file as that model's. Where None, no signature is needed.

    Raises:
        ConfigurationError: the file is missing, cannot be parsed, or holds a setting that cannot be used; names it.
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
        config = text_format.Parse(content.decode(), model_config_pb2.ModelConfig())
        settings_of(config)
    except (text_format.ParseError, UnicodeDecodeError, RecursionError, ConfigurationError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return config


def as_json(config: Any) -> Any:
    """A ModelConfig as JSON, as Triton's control API takes and gives it."""
    return MessageToDict(config, preserving_proto_field_name=True)


def of_json(config: Any) -> Any:
    """The ModelConfig of `as_json`. Fields that only newer releases of Triton have are left out."""
    return ParseDict(config, model_config_pb2.ModelConfig(), ignore_unknown_fields=True)


def write_config(model: Path, config: Any) -> bytes:
    """Replace a model's config.pbtxt. A reader sees the old file or the new one, and nothing in between.

    Returns:
        The content of the new file.

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
    """The settings that a ModelConfig holds. A parameter that is missing has its default.

    Raises:
        ConfigurationError: a setting cannot be used; the message names it.
    """
    queue = config.dynamic_batching.default_queue_policy
    versions = config.version_policy.specific.versions
    held_by_fields: dict[str, Any] = {
        "instances": sum(group.count or 1 for group in config.instance_group) or 1,
        "queue_requests": queue.max_queue_size,
        "queue_timeout_ms": queue.default_timeout_microseconds // 1000,
        "version": versions[0] if versions else None,
    }
    return ServingSettings(**held_by_fields, **parsed(parameters_of(config)))


def apply_settings(config: Any, settings: ServingSettings) -> None:
    """Write `settings` into a ModelConfig. Everything else in it stays."""
    config.max_batch_size = LARGEST_HANDOVER
    _apply_instances(config, settings.instances)
    config.dynamic_batching.ClearField("default_queue_policy")
    if settings.queue_requests or settings.queue_timeout_ms:
        queue = config.dynamic_batching.default_queue_policy
        queue.max_queue_size = settings.queue_requests
        queue.default_timeout_microseconds = 1000 * settings.queue_timeout_ms
        queue.timeout_action = queue.REJECT
    config.ClearField("version_policy")
    if settings.version is not None:
        config.version_policy.specific.versions.append(settings.version)
    _apply_parameters(config, settings)


def _apply_instances(config: Any, instances: int) -> None:
    """Have one group of instances, which is the first of those that are there."""
    groups = config.instance_group or [config.instance_group.add(kind=model_config_pb2.ModelInstanceGroup.KIND_CPU)]
    groups[0].count = instances
    del config.instance_group[1:]


def _apply_parameters(config: Any, settings: ServingSettings) -> None:
    for name in parsed(parameters_of(config)):
        del config.parameters[name]
    for name, value in settings.parameters.items():
        config.parameters[name].string_value = value
    # protobuf's JSON leaves empty strings out. Clients such as pytriton's then miss `string_value`.
    for name in [name for name, text in parameters_of(config).items() if not text]:
        del config.parameters[name]


def parameters_of(config: Any) -> Mapping[str, str]:
    """The parameters of a ModelConfig, by name."""
    return {key: value.string_value for key, value in config.parameters.items()}
