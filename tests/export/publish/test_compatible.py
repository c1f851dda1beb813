"""What all versions of a model share."""

from pathlib import Path

import pytest

from export import ExportConfig, export_model
from export.errors import PublishError
from serving.model.settings import ServingSettings
from tests.support.folder_contents import files
from tests.support.models import MIXED, SUM, collection


def test_versions_of_a_model_share_a_contract(tmp_path: Path) -> None:
    export_model(collection(MIXED), tmp_path / "r", "m")
    before = files(tmp_path)
    with pytest.raises(PublishError, match=r"expected the schema .*publish under another name"):
        export_model(collection(SUM), tmp_path / "r", "m")
    assert files(tmp_path) == before


def test_other_settings_are_named(tmp_path: Path) -> None:
    export_model(collection(SUM), tmp_path / "r", "m", ExportConfig(serving=ServingSettings(threads=3, instances=2)))
    before = files(tmp_path)
    with pytest.raises(PublishError) as refused:
        export_model(collection(SUM), tmp_path / "r", "m", ExportConfig(serving=ServingSettings(threads=3)))
    said = "expected the settings that the model is served with: instances 2, not 1: publish without settings, then"
    assert said in str(refused.value)
    assert files(tmp_path) == before
    export_model(collection(SUM), tmp_path / "r", "m", ExportConfig(serving=None))
