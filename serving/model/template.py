"""config.pbtxt and model.py of a new model: the template in `model_repository/lookup`, filled in."""

from importlib.resources import files

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serving.bundle.hosts import IdDtype
from serving.bundle.manifest import Manifest
from serving.bundle.tables import OutputDtype
from serving.model.config_file import CONFIG, apply_settings
from serving.model.settings import ServingSettings
from serving.request.tensors import ONCE, SEQUENCES

_TEMPLATE = files("model_repository").joinpath("lookup")
_ID_TYPE = {
    IdDtype.INT64: model_config_pb2.TYPE_INT64,
    IdDtype.INT32: model_config_pb2.TYPE_INT32,
}
_DATA_TYPE = {
    OutputDtype.FP32: model_config_pb2.TYPE_FP32,
    OutputDtype.FP16: model_config_pb2.TYPE_FP16,
}


def model_config(name: str, manifest: Manifest, settings: ServingSettings) -> str:
    """The text of config.pbtxt for the model `name`, whose versions have the features of `manifest`."""
    config = text_format.Parse(_TEMPLATE.joinpath(CONFIG).read_text(), model_config_pb2.ModelConfig())
    config.name = name
    if manifest.weighted:
        config.input.add(name="weights", data_type=model_config_pb2.TYPE_FP32, dims=[-1], allow_ragged_batch=True)
    config.input[0].data_type = _ID_TYPE[manifest.id_dtype]
    config.output[0].data_type = _DATA_TYPE[manifest.output_dtype]
    if (part := manifest.dense_part) is not None:
        for each in part.inputs:
            config.input.add(
                name=each.name,
                data_type=model_config_pb2.TYPE_FP32,
                dims=[-1, each.width],
                allow_ragged_batch=True,
                optional=True,
            )
        for output in part.outputs:
            config.output.add(name=output.name, data_type=model_config_pb2.TYPE_FP32, dims=[-1, *output.shape])
    if manifest.part_of is None:  # nobody asks a host for these
        config.output.add(name=SEQUENCES, data_type=_DATA_TYPE[manifest.output_dtype], dims=[-1])
        config.output.add(name=ONCE, data_type=_DATA_TYPE[manifest.output_dtype], dims=[-1, -1])
    keys = [feature.key for feature in manifest.features]
    parameters = {
        "features": ",".join(feature.name for feature in manifest.features),
        "dims": ",".join(str(table.dim) for table in manifest.feature_tables),
        "weighted": ",".join(manifest.weighted_keys),
        "contract": manifest.contract,
    }
    if len(manifest.keys) < len(keys):
        parameters["keys"] = ",".join(keys)
    if manifest.part_of is None:
        parameters["tables"] = ",".join(feature.table for feature in manifest.features)
        tables = zip(manifest.features, manifest.feature_tables, strict=True)
        parameters["sequences"] = ",".join(feature.name for feature, table in tables if table.is_sequence)
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    apply_settings(config, settings)
    text: str = text_format.MessageToString(config)
    return text


def model_py() -> str:
    """The text of a version's model.py."""
    return _TEMPLATE.joinpath("1", "model.py").read_text()
