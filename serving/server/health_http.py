"""The operations port: whether a server lives, whether it is ready, and its metrics, over HTTP.

`/livez` and `/readyz` follow Kubernetes: 200 with one word, or 503 with the reason. They start no process and send no
request to a model, so overload does not change readiness. `/readyz?verbose` also names lost hosts of routers, models
whose release is not served, and models to which no further delta is applied. A router with lost hosts stays ready,
because it answers requests that need none of them.
`/metrics` has Triton's metrics, from a Unix socket that only this user can open, and the metrics of the server as a
whole.

Triton's HTTP library keeps a request of any length in memory. This one limits the size of headers and reads nothing
after them. A connection gets one answer and ends within `_PATIENCE_S`. If there are more than `_MOST` connections,
the oldest one is closed, so a client that only holds connections cannot keep probes out.
"""

import asyncio
import hmac
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from http import HTTPStatus
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from serving.errors import ConfigurationError, ServingError
from serving.server.access import Access
from serving.server.health_state import Answer, HealthState

if TYPE_CHECKING:
    import h11

# The content type of Prometheus' text format, as Triton sends it.
_TEXT = "text/plain; charset=utf-8"
# Connections at once, and seconds until one is closed.
_MOST, _PATIENCE_S = 64, 10.0
# TLS handshakes at once, and seconds until one is aborted.
_MOST_HANDSHAKES, _HANDSHAKE_S = 256, 5.0
# Bytes of a request's headers, and bytes that are read at once.
_HEADERS_BYTES, _READ_BYTES = 16 << 10, 4 << 10
# A router's replicas by host, in its metrics: see `serving.backend.host_metrics`.
_REPLICAS_UP = "tbe_host_replicas_up{"


@contextmanager
def operations_port(
    listener: socket.socket, health: HealthState, scrape: Callable[[], bytes], access: Access
) -> Iterator[None]:
    """Answer on a socket, on a thread of its own, until the block ends.

    Args:
        listener: a socket that is bound.
        health: the health of the server.
        scrape: returns the server's metrics in Prometheus' text format; may raise ServingError.
        access: says whether the port uses TLS, and which token it expects.

    Raises:
        ConfigurationError: another process took the port, or h11 is not installed.
    """
    if find_spec("h11") is None:  # clients and exports go without
        raise ConfigurationError(
            "h11 is not installed, which the operations port needs: `pip install 'tbe-serving[server]'`"
        )
    if access.operations_tls:
        health.tls_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    health.reload_certificate()
    port = _Port(health, scrape, access.operations_token)
    listens: Future[Callable[[], object]] = Future()
    thread = threading.Thread(
        target=asyncio.run,
        args=(port.serve(listener, health.tls_context, listens),),
        name="operations port",
        daemon=True,
    )
    thread.start()
    stop = listens.result()
    try:
        yield
    finally:
        stop()
        thread.join()


class _Port:
    """Answers connections, of which it keeps a bounded number."""

    def __init__(self, health: HealthState, scrape: Callable[[], bytes], token: str | None) -> None:
        self._health = health
        self._scrape = scrape
        self._authorization = None if token is None else f"Bearer {token}".encode()
        # The connections, oldest first.
        self._tasks: dict[Any, None] = {}

    async def serve(
        self, listener: socket.socket, tls: ssl.SSLContext | None, listens: "Future[Callable[[], object]]"
    ) -> None:
        """Answer requests. `listens` gets a function that ends this, which any thread may call."""
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        handshakes: set[_Connection] = set()

        def accept() -> _Connection:
            if len(handshakes) >= _MOST_HANDSHAKES:
                raise ConnectionRefusedError  # asyncio closes the connection
            return _Connection(self._answer, handshakes)

        options: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": _HANDSHAKE_S}
        try:
            server = await loop.create_server(accept, sock=listener, **options)
        except OSError as error:
            host, port = listener.getsockname()
            listens.set_exception(
                ConfigurationError(f"--operations-port {port}: cannot listen on {host}: {error.strerror}")
            )
            return
        listens.set_result(lambda: loop.call_soon_threadsafe(stopped.set))
        await stopped.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import h11

        task = asyncio.current_task()
        self._tasks[task] = None
        if len(self._tasks) > _MOST:
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]
            oldest.cancel()
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEADERS_BYTES)
        writer.transport.set_write_buffer_limits(0)  # so that all is sent when it is drained
        try:
            async with asyncio.timeout(_PATIENCE_S):
                status, body, is_head = await self._answer_to(http, reader)
                headers = {"Content-Type": _TEXT, "Content-Length": str(len(body)), "Connection": "close"}
                if status == HTTPStatus.UNAUTHORIZED:
                    headers["WWW-Authenticate"] = "Bearer"
                writer.write(http.send(h11.Response(status_code=status, headers=list(headers.items()))) or b"")
                writer.write(b"" if is_head else body)
                await writer.drain()
                writer.close()
        except (TimeoutError, OSError):
            pass  # too slow, or gone
        finally:
            self._tasks.pop(task, None)
            if not writer.is_closing():
                writer.transport.abort()

    async def _answer_to(self, http: "h11.Connection", reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
        """The status and body of the answer to the next request, and whether the request is HEAD."""
        import h11

        try:
            while (request := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await reader.read(_READ_BYTES))
        except h11.RemoteProtocolError as error:
            return error.error_status_hint, f"expected HTTP/1.1: {error}\n".encode(), False
        if not isinstance(request, h11.Request):
            raise ConnectionAbortedError  # it was closed before it asked
        if request.method not in (b"GET", b"HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, b"expected GET\n", False
        path, _, query = request.target.partition(b"?")
        match path:
            case b"/livez":
                status, body = self._health.live()
            case b"/readyz":
                status, body = await self._ready(query == b"verbose")
            case b"/metrics":
                status, body = await self._metrics(dict(request.headers).get(b"authorization", b""))
            case _:
                status, body = HTTPStatus.NOT_FOUND, b"expected /livez, /readyz or /metrics\n"
        return status, body, request.method == b"HEAD"

    async def _ready(self, is_verbose: bool) -> Answer:
        status, body = self._health.ready()
        if is_verbose and status == HTTPStatus.OK:
            with suppress(ServingError):
                body += _lost_hosts(await asyncio.to_thread(self._scrape))
            problems = sorted(self._health.release_problems.copy().items())
            body += "".join(f"release: model {model!r}: {why}\n" for model, why in problems if why).encode()
            if (copies := self._health.deltas) is not None:
                body += "".join(f"stopped: {line}\n" for line in copies.stopped_lines()).encode()
        return status, body

    async def _metrics(self, authorization: bytes) -> Answer:
        if self._authorization is not None and not hmac.compare_digest(authorization, self._authorization):
            return HTTPStatus.UNAUTHORIZED, b"expected the token: `Authorization: Bearer TOKEN`\n"
        page = self._health.metrics()
        with suppress(ServingError):  # tritonserver is restarting: `tbe_ready` says so
            page += await asyncio.to_thread(self._scrape)
        return HTTPStatus.OK, page


class _Connection(asyncio.StreamReaderProtocol):
    """A connection. It is in `handshakes` until its TLS handshake ends; asyncio does not report a failed one."""

    def __init__(self, answer: Any, handshakes: "set[_Connection]") -> None:
        super().__init__(asyncio.StreamReader(limit=_READ_BYTES), answer)
        self._handshakes = handshakes
        handshakes.add(self)
        asyncio.get_running_loop().call_later(_HANDSHAKE_S, handshakes.discard, self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._handshakes.discard(self)
        super().connection_made(transport)


def _lost_hosts(page: bytes) -> bytes:
    """A line for each host of a router without an answering replica."""
    lost = [line for line in page.decode().splitlines() if line.startswith(_REPLICAS_UP) and line.endswith(" 0")]
    return "".join(f"lost: {line.removeprefix(_REPLICAS_UP).partition('}')[0]}\n" for line in lost).encode()
