"""An engine that cannot be opened leaves nothing behind."""

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from export import ExportConfig, Sharding
from serving.engine import Engine
from serving.errors import HostUnavailable
from serving.router.hosts_config import HostsConfig
from tests.support.hosts import export_hosts
from tests.support.models import Spec, collection

SPECS = (Spec("a", 100, 8, "SUM", ("x",)), Spec("b", 60, 8, "SUM", ("y",)))
# gRPC connects anew to a server that hangs up, at least once a second.
WAIT_S = 2.5
# Nobody else connects to it: a port of 127.0.0.1 may have been that of a host which others still look for.
ADDRESS = "127.0.0.77"


@contextmanager
def hanging_up() -> Iterator[tuple[str, Callable[[], int]]]:
    """A server that ends each connection at once: its address, and what counts the connections."""
    count = 0

    def accept() -> None:
        nonlocal count
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            count += 1
            connection.close()

    with socket.create_server((ADDRESS, 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"{ADDRESS}:{listener.getsockname()[1]}", lambda: count
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_hosts_are_left_alone_after_an_engine_was_refused(tmp_path: Path) -> None:
    sharding = Sharding(ranks=2, ranks_per_host=1, memory_bytes=1 << 20, types={"*": "row_wise"})
    bundle = export_hosts(tmp_path, collection(SPECS), ExportConfig(sharding=sharding))
    with hanging_up() as (address, connections):
        gc.disable()
        try:
            with pytest.raises(HostUnavailable):
                Engine.open(bundle, HostsConfig(addresses={0: address, 1: address}, timeout_s=2.0))
            time.sleep(WAIT_S)  # one that was on its way
            before = connections()
            assert before > 0
            time.sleep(WAIT_S)
            assert connections() == before
        finally:
            gc.enable()
