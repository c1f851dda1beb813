"""A router and hosts that fail as told, for the tests of one file."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.host_faults import Faulty


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Faulty]":
    from tests.support.host_faults import faulty

    with faulty(tmp_path_factory.mktemp("faulty")) as found:
        yield found
