"""The config.pbtxt of a new model."""

from pathlib import Path
from typing import Any

import msgspec
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serving.bundle.load import open_bundle
from serving.client.model_info import info_of
from serving.model.config_file import model_config
from serving.model.settings import ServingSettings


def test_config_pbtxt_has_the_expected_inputs_and_parameters(repository: Path) -> None:
    def parse(name: str) -> Any:
        return text_format.Parse((repository / name / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())

    config = parse("mixed")
    assert config.name == "mixed"
    assert config.max_batch_size > 1
    assert config.HasField("dynamic_batching")
    assert [(tensor.name, tensor.allow_ragged_batch) for tensor in config.input] == [
        ("values", True),
        ("lengths", True),
    ]
    assert config.parameters["features"].string_value == "user_id,item_id,recent_items,genres,words"
    assert config.parameters["dims"].string_value == "16,32,32,8,24"
    assert all(
        parameter.string_value for name in ("mixed", "weighted") for parameter in parse(name).parameters.values()
    )
    assert [tensor.name for tensor in parse("weighted").input] == ["values", "lengths", "weights"]
    assert parse("half").output[0].data_type == model_config_pb2.TYPE_FP16


def test_a_key_named_differently_from_its_feature_is_listed(mixed: Path) -> None:
    """Our exports give such a feature its key's name. The format does not ask that of other writers."""
    manifest = open_bundle(mixed).manifest
    first, *rest = manifest.features
    manifest = msgspec.structs.replace(manifest, features=(msgspec.structs.replace(first, shared_key="user"), *rest))
    config = text_format.Parse(model_config("m", manifest, ServingSettings()), model_config_pb2.ModelConfig())
    keys = info_of(config).keys
    assert keys["user"] == ("user_id",)
    assert [*keys] == [*manifest.keys]
