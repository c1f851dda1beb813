"""The channel of a client, which is made when it is needed, and made again when the names of its servers stand for
other addresses, and in a forked child."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import grpc.aio

from serving.client.connection import Connection
from serving.client.forks import check_process, opened_for_asyncio
from serving.client.targets import Target
from serving.errors import ConfigurationError, RequestCancelled

T = TypeVar("T")


class _Open(Generic[T]):
    """A channel.

    Attributes:
        channel: of grpc or grpc.aio.
        target: that it was made for.
        methods: what `make` made of it.
        ends_s: when all calls that were made on it have ended, by `time.monotonic`.
    """

    def __init__(self, channel: Any, target: str, methods: T) -> None:
        self.channel = channel
        self.target = target
        self.methods = methods
        self.ends_s = 0.0


class LiveChannel(Generic[T]):
    """A channel to the servers of a connection. Several threads may use one of grpc.

    One of grpc.aio belongs to the event loop in which it is made or, without a running one, to the first in which it
    is used.

    Args:
        connection: its servers.
        library: the module grpc or grpc.aio.
        make: makes the callables of the methods that are called, of a channel.
        options: of the channel, before those of the connection.

    Raises:
        ConfigurationError: the TLS files cannot be used.
        ServerUnavailable: a name among several addresses cannot be resolved.
    """

    def __init__(
        self, connection: Connection, library: Any, make: Callable[[Any], T], *options: tuple[str, Any]
    ) -> None:
        connection.check_tls()
        self._where = ",".join(connection.addresses)
        self._connection, self._library, self._make, self._options = connection, library, make, options
        self._is_asyncio = library is grpc.aio
        self._loop = _running_loop() if self._is_asyncio else None
        self._target = Target(connection.addresses)
        self._closed = False
        self._open: _Open[T] | None = None
        self._retired: list[_Open[T]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        _LIVE.add(self)

    def methods(self, timeout_s: float) -> T:
        """What `make` made of the channel, for a call that ends within `timeout_s`.

        Raises:
            ConfigurationError: this is another event loop than the channel's, or the process was forked from one that
                was using gRPC.
            RequestCancelled: the channel is closed.
        """
        check_process(self._where)
        if self._is_asyncio:
            self._check_loop()
        target = self._target.now()
        with self._lock:
            if self._closed:
                raise RequestCancelled(f"{self._where}: the client is closed")
            current = self._open
            if current is None or current.target != target:
                current = self._opened(target)
            now = time.monotonic()
            current.ends_s = max(current.ends_s, now + timeout_s)
            for retired in [each for each in self._retired if each.ends_s < now]:
                self._retired.remove(retired)
                self._close_unused(retired)
            return current.methods

    def _check_loop(self) -> None:
        running = _running_loop()
        if running is None:
            raise ConfigurationError(f"{self._where}: expected to be awaited in a running event loop")
        self._loop = self._loop or running
        if self._loop is not running:
            raise ConfigurationError(
                f"{self._where}: was made or used in another event loop: make a client in each, or use one loop, as "
                "asyncio.Runner does"
            )

    def _opened(self, target: str) -> _Open[T]:
        """A channel to the target in place of the last one, whose calls go on. Both share connections in gRPC."""
        channel = self._connection.channel(self._library, self._options, target)
        if self._is_asyncio:
            opened_for_asyncio(channel)
        if self._open is not None:
            self._retired.append(self._open)
        self._open = _Open(channel, target, self._make(channel))
        return self._open

    def _close_unused(self, retired: _Open[T]) -> None:
        closed = retired.channel.close()
        if self._is_asyncio:
            task = asyncio.ensure_future(closed)
            self._closing.add(task)  # asyncio has only weak references
            task.add_done_callback(self._closing.discard)

    def close(self) -> list[Any]:
        """Close it. Calls in progress are cancelled. Returns what is to be awaited then, of grpc.aio."""
        with self._lock:
            self._closed = True
            channels = [each.channel for each in (self._open, *self._retired) if each is not None]
            self._open, self._retired = None, []
        if self._is_asyncio:
            return [self._closed_in_its_loop(channel) for channel in channels]
        for channel in channels:
            channel.close()
        return []

    async def _closed_in_its_loop(self, channel: Any) -> None:
        """Close a channel of grpc.aio. If its event loop has ended, nothing waits for its calls."""
        if self._loop is _running_loop():
            await channel.close()
        elif self._loop is not None and self._loop.is_running():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(channel.close(), self._loop))

    def forked(self) -> None:
        """Called in the child of a fork: its channel is the parent's, whose connections it must leave alone."""
        _OF_PARENT.extend(each for each in (self._open, *self._retired) if each is not None)
        self._open, self._retired = None, []
        self._lock = threading.Lock()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_LIVE: WeakSet[LiveChannel[Any]] = WeakSet()
# The channels of the parent, in a forked child: were they let go, gRPC would end them there.
_OF_PARENT: list[_Open[Any]] = []


def _forked() -> None:
    for live in _LIVE:
        live.forked()


os.register_at_fork(after_in_child=_forked)
