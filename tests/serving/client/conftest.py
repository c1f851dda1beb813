"""A server that fails as told, and a lookup by a client of each kind."""

from collections.abc import Iterator

import pytest

from tests.support.fake_server import FakeServer, serving
from tests.support.lookups import Lookup, lookup_async, lookup_sync


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture
def address(fake: FakeServer) -> Iterator[str]:
    with serving(fake) as address:
        yield address


@pytest.fixture(params=[lookup_sync, lookup_async], ids=["LookupClient", "AsyncLookupClient"])
def lookup(request: pytest.FixtureRequest) -> Lookup:
    """One lookup by a client of each kind."""
    chosen: Lookup = request.param
    return chosen
