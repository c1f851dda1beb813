"""What becomes of servers: tests wait until it has."""

import time
from collections.abc import Callable

import psutil

from tests.support.servers import (
    Running,
    stubs,
    tritonserver_of,
)

PATIENCE_S = 120


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def another_answers(server: Running, model: str, than: list[psutil.Process]) -> bool:
    """Whether a model has a process again, and it is another."""
    try:
        now = stubs(tritonserver_of(server.process), model)
    except (ValueError, psutil.Error):  # no tritonserver, or one that has just ended
        return False
    return bool(now) and not set(now) & set(than)


def stopped(server: Running) -> tuple[int, str]:
    """Told to stop: how it ended, and what it said."""
    server.process.terminate()
    return ended(server)


def ended(server: Running) -> tuple[int, str]:
    code = server.process.wait(PATIENCE_S)
    assert server.process.stderr is not None
    return code, server.process.stderr.read()


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    return {
        connection.laddr for connection in process.net_connections("tcp") if connection.status == psutil.CONN_LISTEN
    }
