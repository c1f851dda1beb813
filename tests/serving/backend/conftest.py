"""A client of the server that tests share."""

from collections.abc import Iterator

import pytest

from serving.client import LookupClient
from serving.server import Server


@pytest.fixture
def client(server: Server) -> Iterator[LookupClient]:
    with LookupClient(server.grpc, "mixed", timeout_s=30) as client:
        yield client
