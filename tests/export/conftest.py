"""What tests of several rooms of `export` compare with."""

import pytest

from serving.engine import Engine
from tests.support.sharded import sharded


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """`MIXED` on one rank."""
    return sharded(tmp_path_factory.mktemp("one"))
