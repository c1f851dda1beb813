"""config.pbtxt of a new model: the template in `model_repository/lookup`, filled through Triton's own protobuf."""

from importlib.resources import files
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from export.errors import PublishError
from serving.bundle import Manifest, OutputDtype
from serving.config_file import CONFIG, apply_settings, parameters_of, read_config, settings_of
from serving.errors import ConfigurationError
from serving.settings import ServingSettings

_TEMPLATE = files("model_repository").joinpath("lookup")
_DATA_TYPE = {
    OutputDtype.FP32: model_config_pb2.TYPE_FP32,
    OutputDtype.FP16: model_config_pb2.TYPE_FP16,
}


def model_config(name: str, manifest: Manifest, settings: ServingSettings) -> str:
    """The text of config.pbtxt for a model that serves `manifest`."""
    config = text_format.Parse(_TEMPLATE.joinpath(CONFIG).read_text(), model_config_pb2.ModelConfig())
    config.name = name
    if manifest.weighted:
        config.input.add(name="weights", data_type=model_config_pb2.TYPE_FP32, dims=[-1], allow_ragged_batch=True)
    config.output[0].data_type = _DATA_TYPE[manifest.output_dtype]
    keys = [feature.key for feature in manifest.features]
    parameters = {
        "features": ",".join(feature.name for feature in manifest.features),
        "dims": ",".join(str(table.dim) for table in manifest.feature_tables),
        "weighted": ",".join(manifest.weighted_keys),
        "contract": manifest.contract,
    }
    if len(manifest.keys) < len(keys):
        parameters["keys"] = ",".join(keys)
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    apply_settings(config, settings)
    text: str = text_format.MessageToString(config)
    return text


def model_py() -> str:
    """The text of a version's model.py."""
    return _TEMPLATE.joinpath("1", "model.py").read_text()


def check_model(model: Path, manifest: Manifest, settings: ServingSettings | None) -> None:
    """Compare a published model with a new version: all versions share one contract and one config.pbtxt.

    Raises:
        PublishError: the features, dims, weights or output dtype differ, or other settings were asked for than it
            has, or its config.pbtxt cannot be read.
    """
    try:
        config = read_config(model)
        served = settings_of(config)
    except ConfigurationError as error:
        raise PublishError(str(error)) from error
    parameters = parameters_of(config)
    if parameters.get("contract") != manifest.contract:
        features = ",".join(feature.name for feature in manifest.features)
        raise PublishError(
            f"{model / CONFIG}: expected the contract of the versions already there (features "
            f"{parameters.get('features')}, dims {parameters.get('dims')}), "
            f"got features {features}, dims {','.join(str(t.dim) for t in manifest.feature_tables)}, "
            f"{manifest.output_dtype.value} out, {'weighted' if manifest.weighted else 'unweighted'}: "
            "clients would break; publish under another name"
        )
    if settings is not None and settings != served:
        raise PublishError(
            f"{model / CONFIG}: expected the settings that the model is served with, {served}, got {settings}: "
            f"publish without them, then `tbe-serve configure {model}`"
        )
