"""A repository that starts fast, for tests that are about starting and stopping."""

from pathlib import Path

import pytest

from export import export_model
from tests.models import SUM, collection


@pytest.fixture(scope="session")
def one_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the model `m`."""
    path = tmp_path_factory.mktemp("one") / "repository"
    export_model(collection(SUM), path, "m")
    return path
