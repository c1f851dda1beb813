"""What is asked for by the name of a table."""

from pathlib import Path

import pytest

from export import ExportConfig, WeightDtype, export_model
from serving.errors import ConfigurationError
from serving.model.settings import ServingSettings
from tests.support.models import collection


def test_the_last_matching_pattern_counts() -> None:
    config = ExportConfig(dtype={"*": WeightDtype.INT4, "us*": WeightDtype.FP16, "user": WeightDtype.FP32})
    assert config.dtype_of("user") is WeightDtype.FP32
    assert config.dtype_of("usual") is WeightDtype.FP16
    assert config.dtype_of("item") is WeightDtype.INT4
    assert ExportConfig().dtype_of("item") is None


def test_a_pattern_that_matches_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"dtype 'itme': .* matches none of user, item, genre, word"):
        export_model(collection(), tmp_path / "r", "m", ExportConfig(dtype={"itme": WeightDtype.INT4}))


def test_threads_of_scores_are_refused_where_there_are_none() -> None:
    serving = ServingSettings(score_threads=2)
    with pytest.raises(ConfigurationError, match="serving: score_threads: expected --scores beside it"):
        ExportConfig(serving=serving)
    assert ExportConfig(serving=serving, scores=True).serving == serving
    assert serving.of_host().score_threads is None
