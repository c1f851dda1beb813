"""Whether a forked child may use gRPC.

gRPC stops its threads before a fork and starts them in parent and child, but not while another thread is in a call.
Then its locks stay locked and its threads are missing in the child: a call hangs beyond its deadline, and a new
channel may end the process (seen with grpcio 1.85: SIGSEGV, SIGABRT). With asyncio a thread is always in gRPC.

So a child that was forked during a call, or from a process with asyncio clients, must not use gRPC. Any other child
makes new connections (`serving.client.channels`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from serving.errors import ConfigurationError


class _Process:
    """This process.

    Attributes:
        calls: one object for each call that is in gRPC. Adding and removing an object is atomic.
        asyncio_channels: its channels of grpc.aio.
        problem: why gRPC cannot be used, or None if it can.
    """

    def __init__(self) -> None:
        self.calls: set[object] = set()
        self.asyncio_channels: WeakSet[Any] = WeakSet()
        self.problem: str | None = None

    def forked(self) -> None:
        """Note in the child of a fork whether it may use gRPC. This runs before any other code of the child."""
        if self.calls:
            self.problem = "forked while another thread was in a call"
        elif len(self.asyncio_channels):
            self.problem = "forked from one that has asyncio clients"
        self.calls, self.asyncio_channels = set(), WeakSet()


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.forked)


def check_process(where: str) -> None:
    """Refuse a process that cannot use gRPC. Call this before making a channel, and before each call.

    Args:
        where: the start of the message.

    Raises:
        ConfigurationError: the parent was using gRPC when it forked this process.
    """
    if _PROCESS.problem is not None:
        raise ConfigurationError(
            f"{where}: this process was {_PROCESS.problem}, so gRPC would hang in it: start it by `spawn` or "
            "`forkserver`, or before the parent's first call"
        )


def opened_for_asyncio(channel: Any) -> None:
    """Register a channel of grpc.aio."""
    _PROCESS.asyncio_channels.add(channel)


@contextmanager
def calling() -> Iterator[None]:
    """Register a call for as long as it is in gRPC."""
    call = object()
    _PROCESS.calls.add(call)
    try:
        yield
    finally:
        _PROCESS.calls.discard(call)
