"""What all versions of a model share."""

from pathlib import Path

import pytest

from export import export_model
from export.errors import PublishError
from tests.support.folders import files
from tests.support.models import MIXED, SUM, collection


def test_versions_of_a_model_share_a_contract(tmp_path: Path) -> None:
    export_model(collection(MIXED), tmp_path / "r", "m")
    before = files(tmp_path)
    with pytest.raises(PublishError, match=r"expected the contract .*publish under another name"):
        export_model(collection(SUM), tmp_path / "r", "m")
    assert files(tmp_path) == before
