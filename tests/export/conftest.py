"""What tests of several rooms of `export` compare with."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from serving.engine import Engine


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> "Engine":
    """`MIXED` on one rank."""
    from tests.support.sharded_exports import sharded

    return sharded(tmp_path_factory.mktemp("one"))
