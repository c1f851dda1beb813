"""What servers are tested with."""

from pathlib import Path

import pytest


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one version of the model `m`, which a test may change."""
    from export import export_model
    from tests.support.models import SUM, collection

    export_model(collection(SUM), tmp_path / "r", "m")
    return tmp_path / "r"
