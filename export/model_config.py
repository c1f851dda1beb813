"""config.pbtxt: the template in `model_repository/lookup`, filled through Triton's own protobuf."""

from importlib.resources import files
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from export.errors import PublishError
from serving.bundle import Manifest, OutputDtype

CONFIG = "config.pbtxt"
_TEMPLATE = files("model_repository").joinpath("lookup")
_DATA_TYPE = {
    OutputDtype.FP32: model_config_pb2.TYPE_FP32,
    OutputDtype.FP16: model_config_pb2.TYPE_FP16,
}


def model_config(name: str, manifest: Manifest) -> str:
    """The text of config.pbtxt for a model that serves `manifest`."""
    config = text_format.Parse(_TEMPLATE.joinpath(CONFIG).read_text(), model_config_pb2.ModelConfig())
    config.name = name
    if manifest.weighted:
        config.input.add(name="weights", data_type=model_config_pb2.TYPE_FP32, dims=[-1], allow_ragged_batch=True)
    config.output[0].data_type = _DATA_TYPE[manifest.output_dtype]
    tables = zip(manifest.features, manifest.feature_tables, strict=True)
    parameters = {
        "features": ",".join(feature.name for feature in manifest.features),
        "dims": ",".join(str(table.dim) for table in manifest.feature_tables),
        "weighted": ",".join(feature.name for feature, table in tables if table.weighted),
        "contract": manifest.contract,
    }
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    text: str = text_format.MessageToString(config)
    return text


def model_py() -> str:
    """The text of a version's model.py."""
    return _TEMPLATE.joinpath("1", "model.py").read_text()


def check_contract(path: Path, manifest: Manifest) -> None:
    """Compare a published config.pbtxt with `manifest`: all versions of a model share one contract.

    Raises:
        PublishError: the features, dims, weights or output dtype differ, or the file cannot be parsed.
    """
    try:
        config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    except (OSError, text_format.ParseError) as error:
        raise PublishError(f"{path}: cannot be read: {error}") from error
    if config.parameters["contract"].string_value != manifest.contract:
        features = ",".join(feature.name for feature in manifest.features)
        raise PublishError(
            f"{path}: expected the contract of the versions already there (features "
            f"{config.parameters['features'].string_value}, dims {config.parameters['dims'].string_value}), "
            f"got features {features}, dims {','.join(str(t.dim) for t in manifest.feature_tables)}, "
            f"{manifest.output_dtype.value} out, {'weighted' if manifest.weighted else 'unweighted'}: "
            "clients would break; publish under another name"
        )
