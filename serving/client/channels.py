"""A client's gRPC channel: opened at the first call, and replaced after a fork or when its names resolve to other
addresses."""

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
    """An open channel.

    Attributes:
        channel: a channel of grpc or grpc.aio.
        target: its gRPC target.
        methods: its callables, as `make` returned them.
        ends_s: the latest deadline of its calls, by `time.monotonic`.
    """

    def __init__(self, channel: Any, target: str, methods: T) -> None:
        self.channel = channel
        self.target = target
        self.methods = methods
        self.ends_s = 0.0


class LiveChannel(Generic[T]):
    """A channel to the servers of a connection.

    Threads may share a channel of grpc. A channel of grpc.aio belongs to the event loop that runs when it is made or,
    if none runs, to the first event loop that uses it.

    Args:
        connection: its servers.
        library: the module grpc or grpc.aio.
        make: makes the callables for a channel's methods.
        options: channel options, which precede the connection's own.

    Raises:
        ConfigurationError: the TLS files are invalid.
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
        """The channel's callables, for a call that ends within `timeout_s`.

        Raises:
            ConfigurationError: the channel belongs to another event loop, or the parent was using gRPC when it forked
                this process.
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
            for retired in [channel for channel in self._retired if channel.ends_s < now]:
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
        """Open a channel to `target`, and retire the current one, whose calls continue. gRPC shares connections
        between both."""
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
        """Close the channel and cancel its calls. For grpc.aio, returns coroutines that the caller must await."""
        with self._lock:
            self._closed = True
            channels = [opened.channel for opened in self._all_open()]
            self._open, self._retired = None, []
        if self._is_asyncio:
            return [self._closed_in_its_loop(channel) for channel in channels]
        for channel in channels:
            channel.close()
        return []

    def _all_open(self) -> list[_Open[T]]:
        return [*([] if self._open is None else [self._open]), *self._retired]

    async def _closed_in_its_loop(self, channel: Any) -> None:
        """Close a channel of grpc.aio in its event loop, unless that loop has ended."""
        if self._loop is _running_loop():
            await channel.close()
        elif self._loop is not None and self._loop.is_running():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(channel.close(), self._loop))

    def forked(self) -> None:
        """Forget the channels in a forked child, without closing them: their connections are the parent's."""
        _PARENT_CHANNELS.extend(self._all_open())
        self._open, self._retired = None, []
        self._lock = threading.Lock()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_LIVE: WeakSet[LiveChannel[Any]] = WeakSet()
# The parent's channels, in a forked child. Keeping them stops gRPC from destroying them there.
_PARENT_CHANNELS: list[_Open[Any]] = []


def _forked() -> None:
    for live in _LIVE:
        live.forked()


os.register_at_fork(after_in_child=_forked)
