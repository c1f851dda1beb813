"""The config.pbtxt of a new model."""

from pathlib import Path
from typing import Any


def test_config_pbtxt_is_what_the_design_asks_for(repository: Path) -> None:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    def parse(name: str) -> Any:
        return text_format.Parse((repository / name / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())

    config = parse("mixed")
    assert config.name == "mixed"
    assert config.max_batch_size > 1
    assert config.HasField("dynamic_batching")
    assert [(each.name, each.allow_ragged_batch) for each in config.input] == [("values", True), ("lengths", True)]
    assert config.parameters["features"].string_value == "user_id,item_id,recent_items,genres,words"
    assert config.parameters["dims"].string_value == "16,32,32,8,24"
    assert all(each.string_value for name in ("mixed", "weighted") for each in parse(name).parameters.values())
    assert [each.name for each in parse("weighted").input] == ["values", "lengths", "weights"]
    assert parse("half").output[0].data_type == model_config_pb2.TYPE_FP16
