"""A file of settings, and the options that count after it."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from export.commands.options import OPTIONS
from export.commands.settings import export_config, read_settings, written_settings
from serving.bundle.load import open_bundle
from serving.errors import ConfigurationError
from serving.model.config_file import read_config, settings_of
from serving.model.settings import ServingSettings
from tests.support.commands import PLAN, TRAINED, tbe_export

SETTINGS = """
dtype = { "*" = "int4", user = "fp16" }
id_policy = "zero"
output_dtype = "fp16"

[sharding]
ranks = 4
memory_per_rank = "1 GiB"
types = "column_wise"
min_partition = { item = 16 }

[serving]
instances = 2
max_request_ids = 1000
"""


NAMES = """
dtype = { "ca*ts [a]" = "int4", "C:\\\\path \\"b\\" \\u007f" = "fp16", "ä, = #" = "int8" }
max_error = { item = 0.5 }
labelled = "a.jsonl"
trained_memory = 1000
scores = true
user_side = ["user", "ag*"]

[serving]
hosts = { 0 = "a:8001" }
max_busy_ms = 400
verify_weights = false
"""


@pytest.mark.parametrize("text", [SETTINGS, NAMES, ""])
def test_written_settings_are_read_back_unchanged(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    settings = read_settings(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_text(written_settings(settings))
    assert read_settings(tmp_path / "b.toml") == settings


def test_each_option_is_declared_once() -> None:
    keys = [(option.section, option.name) for option in OPTIONS]
    assert len(set(keys)) == len(keys)


def test_options_override_the_settings_file(tmp_path: Path) -> None:
    (tmp_path / "export.toml").write_text(SETTINGS)
    done = tbe_export(
        "model", *TRAINED, "--repository", str(tmp_path / "r"), "--name", "m",
        "--config", str(tmp_path / "export.toml"), "--dtype", "us*=int8", "--ranks", "2", "--sharding", "word=row_wise",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    manifest = open_bundle(tmp_path / "r" / "m" / "1").manifest
    assert [table.dtype.value for table in manifest.tables] == ["INT8", "INT4", "INT4", "INT4"]
    assert {table.id_policy.value for table in manifest.tables} == {"zero"}
    assert manifest.output_dtype.value == "FP16"
    assert len(manifest.plan.ranks) == 2
    assert [kind.value for kind in manifest.plan.sharding.values()] == ["column_wise"] * 3 + ["row_wise"]
    assert {shard.width for shard in manifest.plan.shards_by_table["item"]} == {16}
    served = settings_of(read_config(tmp_path / "r" / "m"))
    assert (served.instances, served.max_request_ids) == (2, 1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param('dtpye = "int8"', "unknown key 'dtpye': expected one of dtype, ", id="unknown key"),
        pytest.param(
            "[sharding]\nranks = 'two'", "Expected `int | null`, got `str` - at `$.sharding.ranks`", id="type"
        ),
        pytest.param("dtype = ", "Invalid value (at end of document)", id="not TOML"),
        pytest.param('dtype = "int3"', "dtype: expected one of fp32", id="value"),
        pytest.param(
            'id_policy = { user = "default_row: 3" }', "id_policy: expected a whole number, got ' 3'", id="number"
        ),
        pytest.param(
            "[sharding]\nmin_partition = { item = 6 }", "min_partition 'item': expected a multiple of 4", id="bound"
        ),
        pytest.param("[sharding]\nbatch_size = 0", "batch_size: expected 1 to ", id="range"),
        pytest.param('[sharding]\nmemory_per_rank = "x"', "memory_per_rank: expected a size", id="size"),
        pytest.param("[sharding]\nranks_per_host = 5\nbatch_size = 0", "batch_size: expected 1 to ", id="of two"),
        pytest.param(
            "[serving]\ninstance = 2", "serving: unknown key 'instance': expected one of ", id="unknown setting"
        ),
        pytest.param("[serving]\ninstances = 0", "serving: instances: expected", id="setting"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "export.toml").write_text(text)
    done = tbe_export(*PLAN, "--config", str(tmp_path / "export.toml"))
    assert done.exit_code == 1
    assert message in done.stderr
    assert done.stderr.startswith(f"tbe-export: --config {tmp_path}/export.toml: ")


@pytest.mark.parametrize(
    ("text", "option", "message"),
    [
        pytest.param(
            'dtype = "int4"', ["--dtype", "int3"], "--dtype: expected one of fp32", id="of the option alone"
        ),
        pytest.param("", ["--ranks-per-host", "3"], "--ranks-per-host: expected a divisor of 4", id="of two options"),
        pytest.param(
            "[sharding]\nranks_per_host = 3", [], "ranks_per_host: expected a divisor of 4 ranks", id="of both"
        ),
    ],
)
def test_errors_of_options_do_not_name_the_settings_file(
    tmp_path: Path, text: str, option: list[str], message: str
) -> None:
    (tmp_path / "export.toml").write_text(text)
    done = tbe_export("plan", *TRAINED, "--ranks", "4", "--config", str(tmp_path / "export.toml"), *option)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"tbe-export: {message}")


NUMBERS = ["-1", "0", "nan", "inf", "-inf", "1e400", f"{10**30}", "9" * 5000, '"nan"', '"inf"', '"x"', "true", "[]"]

FIELDS = [
    *((f"[{option.section}]\n" if option.section else "", option.name) for option in OPTIONS),
    *(("", table) for table in ("sharding", "serving")),
    *(("[serving]\n", field.name) for field in dataclasses.fields(ServingSettings)),
]


@pytest.mark.parametrize(("table", "field"), FIELDS, ids=lambda key: key.strip())
def test_numbers_in_a_settings_file_are_finite_or_refused_by_name(table: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "export.toml"
    for number in NUMBERS:
        path.write_text(f"{table}{field} = {number}\n")
        refused, parsed = "", [0.0]
        try:
            parsed = numbers(export_config(read_settings(path)))
        except ConfigurationError as error:
            refused = str(error)
        assert field in refused or (len(number) == 5000 and refused.startswith(str(path))) or not refused
        assert all(math.isfinite(number) and (isinstance(number, float) or abs(number) < 2**63) for number in parsed)


def numbers(config: Any) -> list[float]:
    """Every number in a config, and in the configs in it."""
    flat: list[float] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for part in value.values() if isinstance(value, dict) else [value]:
            flat += (
                numbers(part) if dataclasses.is_dataclass(part) else [part] if isinstance(part, int | float) else []
            )
    return flat
