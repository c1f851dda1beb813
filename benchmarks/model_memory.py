"""What a model has in memory: in this process, and where it is served."""

import time
from pathlib import Path

import psutil

from serving.engine import Engine
from serving.server import Server
from serving.tables.pages import huge_bytes_of

_CHECK_PERIOD_S = 2.0
_MOST_LOOKS = 60


def in_memory(bundle: Path, threads: int = 1) -> Engine:
    """An engine whose weights are in memory. Else they would come there beside the lookups that are timed."""
    engine = Engine.open(bundle, threads=threads)
    engine.table_files.verify()
    return engine


def private_bytes(server: Server) -> int:
    """Memory that no file is behind: what is mapped of weights is the page cache's, whoever else has it mapped."""
    memory = [process.memory_info() for process in _processes(server)]
    return sum(process.rss - process.shared for process in memory)


def huge_bytes(server: Server) -> int:
    """How much of weights is mapped in huge pages."""
    return sum(huge_bytes_of(Path(f"/proc/{process.pid}/smaps_rollup").read_text()) for process in _processes(server))


def settle(server: Server) -> None:
    """Wait until no more weights come into memory."""
    before = -1
    for _ in range(_MOST_LOOKS):
        now = huge_bytes(server)
        if now == before:
            return
        before = now
        time.sleep(_CHECK_PERIOD_S)


def _processes(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)
