"""Free ports."""

import contextlib

from serving.server import Access
from serving.server.launch.ports import free_ports
from tests.support.servers import (
    FREE,
)


def test_servers_that_start_together_take_different_ports() -> None:
    with contextlib.ExitStack() as starting:
        taken = [starting.enter_context(free_ports(Access(http=True), FREE)) for _ in range(300)]
    chosen = [port for each in taken for port in (each.grpc, each.http, each.operations)]
    assert len(set(chosen)) == 900
