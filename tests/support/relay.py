"""A TCP relay between a router and a host, which fails as told: what a network does, without root."""

import enum
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from itertools import count
from typing import Self

_numbers = count()
_SETTLE_S = 0.01


class Way(enum.Enum):
    """A direction of bytes."""

    OUT = "to the host"
    BACK = "to the router"


BOTH = (Way.OUT, Way.BACK)


class Relay:
    """Passes bytes on to another address. A context manager; it ends with its block.

    Args:
        target: "host:port" that it connects to. It may be changed: new connections go there.

    Attributes:
        address: where it listens, on a loopback address of its own.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        # Nobody else listens on this address: the port is free again after it was closed for a while.
        number = 256 * (os.getpid() % 65_000) + next(_numbers) % 250
        self._host, self._port = str(ip_address("127.2.0.1") + number % (253 * 65_536)), 0
        self._open = {way: threading.Event() for way in BOTH}
        self._delay_s = 0.0
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._resets = 0
        self._listener: socket.socket | None = None

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    def __enter__(self) -> Self:
        for direction in self._open.values():
            direction.set()
        self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        for direction in self._open.values():
            direction.set()
        self._close()

    @contextmanager
    def silent(self, *ways: Way) -> Iterator[None]:
        """Nothing passes, and nobody is told; what was sent meanwhile comes afterwards, as TCP sends it again."""
        for way in ways or BOTH:
            self._open[way].clear()
        try:
            yield
        finally:
            for way in ways or BOTH:
                self._open[way].set()

    @contextmanager
    def delayed(self, seconds: float) -> Iterator[None]:
        """Everything takes so much longer, each way."""
        self._delay_s = seconds
        try:
            yield
        finally:
            self._delay_s = 0.0

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Connections are reset, and new ones are refused, as if the process had died."""
        self._close()
        try:
            yield
        finally:
            self._listen()

    def turn(self, target: str) -> None:
        """Reset what is connected, and go elsewhere from now on."""
        with self._lock:
            self.target = target
        self.reset()

    def reset(self) -> None:
        """Reset what is connected."""
        with self._lock:
            self._resets += 1
            for sock in self._sockets:
                with suppress(OSError):
                    # Closed with SO_LINGER 0, a connection is reset. `shutdown` wakes up whoever reads from it.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.shutdown(socket.SHUT_RD)

    def _listen(self) -> None:
        listener = socket.create_server((self._host, self._port), reuse_port=False)
        self._listener, self._port = listener, listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(listener,), name="relay", daemon=True).start()

    def _close(self) -> None:
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept` up
            self._listener.close()
        self.reset()
        deadline = time.monotonic() + 10
        while self._sockets and time.monotonic() < deadline:
            time.sleep(_SETTLE_S)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(near,), name="relay", daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        """Pass bytes on both ways until an end is closed."""
        with near:
            self._open[Way.OUT].wait()
            # Who connects while all is reset is reset as well, wherever it has come to.
            with self._lock:
                self._sockets.add(near)
                resets, (host, _, port) = self._resets, self.target.rpartition(":")
            with suppress(OSError), socket.create_connection((host, int(port))) as far:
                with self._lock:
                    is_reset = resets != self._resets
                    self._sockets.add(far)
                if not is_reset:
                    self._pass_on(near, far)
                with self._lock:
                    self._sockets.remove(far)
            with self._lock:
                self._sockets.remove(near)

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=self._pump, args=(far, near, Way.BACK), daemon=True)
        back.start()
        self._pump(near, far, Way.OUT)
        back.join()

    def _pump(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._open[way].wait()
                if self._delay_s:
                    time.sleep(self._delay_s)
                sink.sendall(data)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RD)  # ends the other way, too
