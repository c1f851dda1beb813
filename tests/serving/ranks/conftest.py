"""A router and hosts that fail as told, for the tests of one file."""

from collections.abc import Iterator

import pytest

from tests.support.host_faults import Faulty, faulty
from tests.support.quick_reload import quick_reload


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    with quick_reload(), faulty(tmp_path_factory.mktemp("faulty")) as found:
        yield found
