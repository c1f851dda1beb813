"""The settings of a served model: from one table come the options, what config.pbtxt holds, and what is refused."""

from dataclasses import asdict, replace
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from typer.main import get_command

from serving.__main__ import app
from serving.errors import ConfigurationError
from serving.model.config_file import apply_settings, settings_of
from serving.model.settings import ServingSettings, table

OLD = """
name: "m"
max_batch_size: 256
instance_group { count: 2 kind: KIND_CPU }
dynamic_batching {
  default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 50000 max_queue_size: 7 }
}
version_policy { specific { versions: 3 } }
parameters { key: "capture" value { string_value: "/captured" } }
parameters { key: "capture_max_bytes" value { string_value: "1000" } }
parameters { key: "capture_slow_ms" value { string_value: "2.5" } }
parameters { key: "schema_digest" value { string_value: "c" } }
parameters { key: "max_busy_ms" value { string_value: "5" } }
parameters { key: "max_call_ids" value { string_value: "3" } }
parameters { key: "max_call_samples" value { string_value: "4" } }
parameters { key: "max_request_ids" value { string_value: "1" } }
parameters { key: "max_request_samples" value { string_value: "2" } }
parameters { key: "merged_requests" value { string_value: "6" } }
parameters { key: "verify_weights" value { string_value: "false" } }
"""
# Settings that a config of that release does not have.
LATER: dict[str, Any] = {
    "score_threads": 2,
    "hosts": {"0": "a:8001,b:8001", "1": "dns:///c:8001"},
    "shard_timeout_ms": 50,
    "on_shard_failure": {"*": "zero", "item": "error"},
    "hosts_root_certificates": "/roots.pem",
    "hosts_certificate_chain": "/chain.pem",
    "hosts_private_key": "/key.pem",
    "hosts_server_name": "movies",
    "hosts_metadata": "/token.json",
}
SAID: dict[str, Any] = {
    "instances": 2,
    "merged_requests": 6,
    "queue_requests": 7,
    "queue_timeout_ms": 50,
    "max_request_ids": 1,
    "max_request_samples": 2,
    "max_call_ids": 3,
    "max_call_samples": 4,
    "max_busy_ms": 5,
    "version": 3,
    "verify_weights": False,
    "capture": "/captured",
    "capture_slow_ms": 2.5,
    "capture_max_bytes": 1000,
}
# Settings that a config of that release does not have either, and that are written even if they have their defaults.
ADDED: dict[str, Any] = {"max_sequence_bytes": 9, "threads": 3, "weights_memory": "locked"}
# Of every setting a value that is not its default.
CHANGED = SAID | LATER | ADDED


def old_config() -> Any:
    return text_format.Parse(OLD, model_config_pb2.ModelConfig())


def test_a_config_of_an_earlier_release_is_read_and_written_unchanged() -> None:
    config = old_config()
    settings = settings_of(config)
    defaults = ServingSettings()
    assert asdict(settings) == SAID | {name: getattr(defaults, name) for name in LATER | ADDED}
    apply_settings(config, settings)
    expected = old_config()
    for name in ADDED:
        expected.parameters[name].string_value = defaults.parameters[name]
    assert config == expected


def test_the_lists_here_have_every_setting() -> None:
    assert CHANGED.keys() == {entry.name for entry, _ in table()}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_setting_is_read_from_config_pbtxt(name: str) -> None:
    changed = replace(ServingSettings(), **{name: CHANGED[name]})
    config = old_config()
    apply_settings(config, changed)
    assert settings_of(config) == changed != ServingSettings()


def test_configure_has_an_option_with_help_for_each_setting() -> None:
    options = {
        param.name: param
        for param in get_command(app).commands["configure"].params  # type: ignore[attr-defined]
        if param.param_type_name == "option"
    }
    expected = [field.name for field, _ in table()]
    assert [name for name in options if name in expected] == expected
    for field, setting in table():
        assert options[field.name].opts == [setting.flag or f"--{field.name.replace('_', '-')}"]
        assert options[field.name].help == setting.help
    assert options["verify_weights"].secondary_opts == ["--no-verify-weights"]
    unset = {"no_capture", "no_capture_slow_ms", "no_warm_up", *(f"no_{name}" for name in LATER)}
    assert {name for name in options if name.startswith("no_")} == unset


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        pytest.param("instances", 0, "expected 1 to 2147483647, got 0", id="too small"),
        pytest.param("queue_requests", 2**31, "expected 0 to 2147483647, got 2147483648", id="too large"),
        pytest.param("version", 0, "expected 1 to 9223372036854775807, got 0", id="may be None"),
        pytest.param("capture", "c", "expected an absolute path in UTF-8, got 'c'", id="path"),
        pytest.param("capture_slow_ms", 0.0, r"expected a finite number > 0, got 0\.0", id="number"),
        pytest.param("verify_weights", 1, "expected bool, got 1", id="flag"),
        pytest.param("hosts", {"0": "a"}, r"expected NUMBER=HOST:PORT\[,HOST:PORT\], got {'0': 'a'}", id="address"),
        pytest.param("hosts", {"0": "a:1,b:65536"}, r"expected NUMBER=.*, got {'0': 'a:1,b:65536'}", id="port"),
        pytest.param("hosts", {"0": "http://a:1"}, r"expected NUMBER=.*, got {'0': 'http://a:1'}", id="scheme"),
        pytest.param("hosts", {"00": "a:1"}, r"expected NUMBER=.*, got {'00': 'a:1'}", id="two zeros"),
        pytest.param("hosts", {"³": "a:1"}, r"expected NUMBER=.*, got {'³': 'a:1'}", id="digit that is no number"),
        pytest.param("hosts", {"٣": "a:1"}, r"expected NUMBER=.*, got {'٣': 'a:1'}", id="digit of another script"),
        pytest.param("hosts", {"x": "a:1"}, r"expected NUMBER=HOST:PORT\[,HOST:PORT\], got {'x': 'a:1'}", id="host"),
        pytest.param("hosts_server_name", "a b", "expected the name of a host, got 'a b'", id="name"),
        pytest.param("on_shard_failure", {"a": "none"}, "expected error or zero, got {'a': 'none'}", id="choice"),
    ],
)
def test_an_invalid_value_is_refused_by_the_name_of_its_setting(name: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name}: {said}$"):
        ServingSettings(**{name: value})


@pytest.mark.parametrize("text", ["x", "[1]", '{"0": 1}', "{}x"])
def test_a_parameter_by_name_that_cannot_be_read_is_refused(text: str) -> None:
    config = old_config()
    config.parameters["hosts"].string_value = text
    with pytest.raises(ConfigurationError, match=r"^hosts: expected a JSON object of strings, got "):
        settings_of(config)


@pytest.mark.parametrize(
    ("groups", "before"),
    [
        pytest.param("", 1, id="none"),
        pytest.param("instance_group { kind: KIND_CPU }", 1, id="no count"),
        pytest.param("instance_group { kind: KIND_CPU } instance_group { count: 2 kind: KIND_CPU }", 3, id="one count"),
        pytest.param("instance_group { count: 2 kind: KIND_CPU } instance_group { count: 3 kind: KIND_CPU }", 5, id="two"),
    ],
)  # fmt: skip
def test_instances_of_all_groups_become_one_group(groups: str, before: int) -> None:
    """Somebody else's config.pbtxt may have any; Triton takes one instance where it says nothing."""
    config = text_format.Parse(groups, model_config_pb2.ModelConfig())
    assert settings_of(config).instances == before
    apply_settings(config, ServingSettings(instances=4))
    assert [(group.count, group.kind) for group in config.instance_group] == [(4, 2)]  # KIND_CPU


@pytest.mark.parametrize(("name", "text"), [("max_call_ids", "many"), ("verify_weights", "True")])
def test_a_parameter_that_cannot_be_read_is_refused_by_name(name: str, text: str) -> None:
    config = old_config()
    config.parameters[name].string_value = text
    with pytest.raises(ConfigurationError, match=f"^{name}: expected (a number|true or false), got '{text}'$"):
        settings_of(config)
