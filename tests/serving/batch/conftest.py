"""A ranker, and a day of rows to score with it."""

from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from export import ExportConfig, export_model
    from tests.support.ranker import ranker

    path = tmp_path_factory.mktemp("batch") / "repository"
    return export_model(ranker(), path, "ranker", ExportConfig(scores=True))


@pytest.fixture
def day(tmp_path: Path) -> Path:
    """1,000 rows in row groups of 150."""
    from tests.support.day import write_day

    return write_day(tmp_path / "day.parquet")
