"""The models of a repository, and their config.pbtxt: read, change and write it by Triton's own protobuf."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict, ParseDict

from serving.bundle.load import check_published
from serving.bundle.manifest import MANIFEST, Manifest
from serving.bundle.plan import IdDtype
from serving.bundle.tables import OutputDtype
from serving.bundle.tensor_names import SEQUENCES, SHARED
from serving.errors import ConfigurationError
from serving.files import read_file, replacing
from serving.model.settings import LARGEST_HANDOVER, ServingSettings, parsed
from serving.protocol.messages import DataType, ModelConfig, ModelInstanceGroup

if TYPE_CHECKING:  # clients do not need cryptography
    from serving.bundle.signature import TrustedKeys

CONFIG = "config.pbtxt"
# A parameter in the config of every model that tbe-export made.
OURS = "schema_digest"
# The versions to serve, by model, in place of those in config.pbtxt.
Pins = Mapping[str, tuple[int, ...]]


def find_models(repository: Path) -> tuple[str, ...]:
    """The models of a repository that tbe-export made.

    Raises:
        ConfigurationError: the repository does not exist, or has no exported model.
    """
    if not repository.is_dir():
        raise ConfigurationError(f"{repository}: expected a model repository, found no folder: tbe-export makes one")
    models = sorted({path.parent.parent.name for path in repository.glob(f"*/*/{MANIFEST}")})
    if not models:
        above = [repository / MANIFEST, *repository.glob(f"*/{MANIFEST}")]
        parent = next((manifest.parent.parent.parent for manifest in reversed(above) if manifest.exists()), None)
        hint = f": the repository is {parent}" if parent else ""
        raise ConfigurationError(f"{repository}: expected models made by tbe-export, found none{hint}")
    return tuple(models)


def other_models(repository: Path) -> tuple[str, ...]:
    """The models of a repository that tbe-export did not make: other folders with a config.pbtxt or a version."""
    ours = set(find_models(repository))
    folders = [path for path in repository.iterdir() if path.name not in ours and not path.name.startswith(".")]
    return tuple(sorted(path.name for path in folders if (path / CONFIG).is_file() or any(path.glob("[1-9]*/*"))))


def has_python(model: Path) -> bool:
    """Whether a model uses Triton's Python backend."""
    return any(model.glob("[1-9]*/model.py"))


def check_pins(repository: Path, models: Sequence[str], pins: Pins) -> None:
    """Refuse pins that name a missing model or version.

    Raises:
        ConfigurationError: a model or version is missing. The message lists the existing ones.
    """
    for model, pinned in pins.items():
        if model not in models:
            raise ConfigurationError(f"{repository}: expected one of the models {', '.join(models)}, got {model!r}")
        check_published(repository / model, pinned)


def read_config(model: Path, trusted: "TrustedKeys | None" = None) -> Any:
    """Read a model's config.pbtxt, as Triton's ModelConfig.

    Args:
        model: the model's folder, <repository>/<name>.
        trusted: one of these keys must have signed the file for this model. None: no signature is needed.

    Raises:
        ConfigurationError: the file is missing, cannot be parsed, or has an invalid setting. The message names it.
        BundleError: the file has no signature by one of the keys.
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
    return parse_config(content, str(path))


def parse_config(content: bytes, where: str) -> Any:
    """The content of a config.pbtxt, as Triton's ModelConfig.

    Args:
        content: the content of the file.
        where: its path, for messages.

    Raises:
        ConfigurationError: the content cannot be parsed, or has an invalid setting.
    """
    try:
        config = text_format.Parse(content.decode(), ModelConfig())
        settings_of(config)
    except (text_format.ParseError, UnicodeDecodeError, RecursionError, ConfigurationError) as error:
        raise ConfigurationError(f"{where}: {error}") from error
    return config


def as_json(config: Any) -> Any:
    """A ModelConfig as JSON, in the form of Triton's control API."""
    return MessageToDict(config, preserving_proto_field_name=True)


def of_json(config: Any) -> Any:
    """The inverse of `as_json`. Fields that only newer Triton releases have are ignored."""
    return ParseDict(config, ModelConfig(), ignore_unknown_fields=True)


def write_config(model: Path, config: Any) -> bytes:
    """Replace a model's config.pbtxt atomically: a reader sees the old file or the new one.

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
    """The settings in a ModelConfig. Missing parameters have their defaults.

    Raises:
        ConfigurationError: a setting is invalid. The message names it.
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
    """Write `settings` into a ModelConfig, and change nothing else."""
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


def point_at(config: Any, hosts: Mapping[str, str]) -> None:
    """Change the hosts in the ModelConfig of a router to hosts on its own machine, without TLS and metadata."""
    settings = replace(
        settings_of(config),
        hosts=hosts,
        hosts_root_certificates=None,
        hosts_certificate_chain=None,
        hosts_private_key=None,
        hosts_server_name=None,
        hosts_metadata=None,
    )
    _apply_parameters(config, settings)


def _apply_instances(config: Any, instances: int) -> None:
    """Keep the first instance group, with this count, or make one."""
    groups = config.instance_group or [config.instance_group.add(kind=ModelInstanceGroup.KIND_CPU)]
    groups[0].count = instances
    del config.instance_group[1:]


def _apply_parameters(config: Any, settings: ServingSettings) -> None:
    for name in parsed(parameters_of(config)):
        del config.parameters[name]
    for name, value in settings.parameters.items():
        config.parameters[name].string_value = value
    # protobuf's JSON leaves out empty strings. Clients such as pytriton's fail if `string_value` is missing.
    for name in [name for name, text in parameters_of(config).items() if not text]:
        del config.parameters[name]


def parameters_of(config: Any) -> Mapping[str, str]:
    """The parameters of a ModelConfig, by name."""
    return {key: value.string_value for key, value in config.parameters.items()}


_TEMPLATE = files("model_repository").joinpath("lookup")
_ID_TYPE = {
    IdDtype.INT64: DataType.TYPE_INT64,
    IdDtype.INT32: DataType.TYPE_INT32,
}
_DATA_TYPE = {
    OutputDtype.FP32: DataType.TYPE_FP32,
    OutputDtype.FP16: DataType.TYPE_FP16,
}


def model_config(name: str, manifest: Manifest, settings: ServingSettings) -> str:
    """The text of config.pbtxt for the model `name`, whose versions have the features of `manifest`."""
    config = text_format.Parse(_TEMPLATE.joinpath(CONFIG).read_text(), ModelConfig())
    config.name = name
    if manifest.weighted:
        config.input.add(name="weights", data_type=DataType.TYPE_FP32, dims=[-1], allow_ragged_batch=True)
    config.input[0].data_type = _ID_TYPE[manifest.id_dtype]
    config.output[0].data_type = _DATA_TYPE[manifest.output_dtype]
    if (part := manifest.dense_part) is not None:
        for dense_input in part.inputs:
            config.input.add(
                name=dense_input.name,
                data_type=DataType.Value(f"TYPE_{dense_input.dtype.value}"),
                dims=[-1, *dense_input.shape],
                allow_ragged_batch=True,
                optional=True,
            )
        for output in part.outputs:
            config.output.add(
                name=output.name,
                data_type=DataType.Value(f"TYPE_{output.dtype.value}"),
                dims=[-1, *output.shape],
            )
    if manifest.part_of is None:  # a router does not request these from its hosts
        config.output.add(name=SEQUENCES, data_type=_DATA_TYPE[manifest.output_dtype], dims=[-1])
        config.output.add(name=SHARED, data_type=_DATA_TYPE[manifest.output_dtype], dims=[-1, -1])
    parameters = {
        "features": ",".join(feature.name for feature in manifest.features),
        "dims": ",".join(str(table.dim) for table in manifest.feature_tables),
        "weighted": ",".join(manifest.weighted_keys),
        OURS: manifest.schema_digest,
    }
    if any(feature.key != feature.name for feature in manifest.features):
        parameters["keys"] = ",".join(feature.key for feature in manifest.features)
    if manifest.part_of is None:
        parameters["tables"] = ",".join(feature.table for feature in manifest.features)
        tables = zip(manifest.features, manifest.feature_tables, strict=True)
        parameters["sequences"] = ",".join(feature.name for feature, table in tables if table.is_sequence)
    by_id = (
        {}
        if part is None
        else part.by_id | {output.name: output.key for output in part.outputs if output.key is not None}
    )
    if by_id:
        parameters["by_id"], parameters["by_id_keys"] = ",".join(by_id), ",".join(by_id.values())
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    apply_settings(config, settings)
    text: str = text_format.MessageToString(config)
    return text


def model_py() -> str:
    """The text of a version's model.py."""
    return _TEMPLATE.joinpath("1", "model.py").read_text()
