"""What holds for both programs."""

import math
import subprocess
import sys
from importlib.metadata import version

import pytest

from export.config import ExportConfig
from export.plan.sharding import Sharding
from serving.client import LookupClient, Retries
from serving.errors import ConfigurationError
from serving.model.settings import ServingSettings
from serving.server import Control


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0, -math.inf, 1e300], ids=str)
def test_configs_refuse_nan_infinity_and_huge_numbers(number: float) -> None:
    if number != 1e300:
        with pytest.raises(ConfigurationError, match="max_error 't': expected a finite number > 0"):
            ExportConfig(max_error={"t": number})
    with pytest.raises(ConfigurationError, match="pooling_factors 't': expected"):
        Sharding(pooling_factors={"t": number})
    if number != 1e300:
        with pytest.raises(ConfigurationError, match="capture_slow_ms: expected"):
            ServingSettings(capture_slow_ms=number)
    with pytest.raises(ConfigurationError, match="timeout_s: expected"):
        LookupClient("127.0.0.1:1", "m", number)
    with pytest.raises(ConfigurationError, match="timeout_s: expected"):
        Control(address="127.0.0.1:1", key=None, timeout_s=number)
    with pytest.raises(ConfigurationError, match="max_backoff_s: expected"):
        Retries(max_backoff_s=number)


@pytest.mark.parametrize("package", ["serving", "export"])
def test_a_program_prints_its_version_and_tested_versions(package: str) -> None:
    done = subprocess.run([sys.executable, "-m", package, "--version"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tbe-serving ")
    assert f"torch {version('torch')} (tested with 2.13 and 2.14)" in lines
    assert any(line.startswith("nvidia-pytriton 0.7") for line in lines)
