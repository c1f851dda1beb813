"""Malformed and hostile requests to the operations port of a real server, judged by Python's own HTTP client."""

import http.client
import io
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np

from serving.server import Server

PATHS = (b"/livez", b"/readyz", b"/readyz?verbose", b"/metrics")
_TARGETS = (
    *PATHS, b"/", b"*", b"", b"/metrics/../livez", b"/%2e%2e/etc/passwd", b"//livez", b"/livez%00", b"/LIVEZ",
    b"http://127.0.0.1/metrics", b"/metrics#x", b"/livez?" + b"q" * 9000, b"/" + b"a" * 200_000, b"/\xff\xfe", b"/x y",
)  # fmt: skip
_METHODS = (
    b"GET",
    b"GET",
    b"HEAD",
    b"POST",
    b"PUT",
    b"DELETE",
    b"OPTIONS",
    b"TRACE",
    b"CONNECT",
    b"get",
    b"G\x00T",
    b"",
)
_VERSIONS = (
    b"HTTP/1.1",
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"HTTP/1.1x",
    b"HTTP/99999999999.1",
    b"",
)
_HEADERS = (
    b"Host: x", b"Host: y", b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Expect: 100-continue", b"Connection: keep-alive",
    b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"Upgrade: websocket", b"Authorization: Bearer x",
    b"Authorization: Basic \xff", b" folded: x", b"No colon", b": empty", b"A" * 20_000 + b": x", b"X: " + b"y" * 60_000,
    b"X: a\rb", b"X: \x00", b"Range: bytes=0-", b"Accept-Encoding: gzip",
)  # fmt: skip
_BODIES = (
    b"",
    b"",
    b"hello",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50,
)
_OTHERS = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    b"\r\n" * 5000, b"SSH-2.0-x\r\n", b"\x00" * 100_000, b"GET /livez HTTP/1.1\r\n" + b"a: b\r\n" * 4000 + b"\r\n",
)  # fmt: skip
# Longest answer to one request, in seconds: the port gives up a request that does not come to its end after ten.
_ENDS_S = 60.0
_MOST_BYTES = 4 << 20


@dataclass
class Outcome:
    """What was seen: how many answers of each status (0: closed without one), and what should not have been."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """All in one."""
        return (
            f"{self.statuses.total():,} requests to the operations port: {self.statuses[200]:,} answered, "
            f"{self.statuses[0]:,} closed, {len(self.wrong)} wrong"
        )


def fuzz_operations(server: Server, count: int, seed: int = 0) -> Outcome:
    """Send `count` requests; stop at the tenth thing that is wrong. Every twentieth is a good one."""
    random, outcome = np.random.default_rng(seed), Outcome()
    url = urlsplit(server.operations)
    assert url.hostname is not None
    assert url.port is not None
    for number in range(count):
        is_good = number % 20 == 0
        path = PATHS[number // 20 % len(PATHS)]
        sent = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path if is_good else _message(random)
        goes = not is_good and random.random() < 0.1  # without waiting for an answer, by a reset
        started = time.monotonic()
        try:
            response = _answer((url.hostname, url.port), sent, goes)
        except TimeoutError:
            outcome.wrong.append(f"no end within {_ENDS_S:g} s: {sent[:80]!r}")
            continue
        status = 0 if goes else _judge(sent, response, server.key, outcome)
        outcome.statuses[status] += 1
        if is_good and (status != http.HTTPStatus.OK or time.monotonic() - started > _ENDS_S):
            outcome.wrong.append(f"{path!r} got {status}: {response[:200]!r}")
        if len(outcome.wrong) >= 10:
            break
    return outcome


def _message(random: np.random.Generator) -> bytes:
    def one(of: tuple[bytes, ...]) -> bytes:
        return of[int(random.integers(len(of)))]

    kind = random.random()
    if kind < 0.1:
        return one(_OTHERS)
    if kind < 0.2:
        return random.bytes(int(random.integers(1, 2000)))
    headers = [one(_HEADERS) for _ in range(int(random.integers(6)))]
    start = b" ".join((one(_METHODS), one(_TARGETS), one(_VERSIONS)))
    message = b"\r\n".join((start, *headers, b"", one(_BODIES)))
    if random.random() < 0.2:
        offset = int(random.integers(len(message)))
        message = message[:offset] + random.bytes(3) + message[offset + 3 :]
    return message


def _answer(address: tuple[str, int], sent: bytes, goes: bool) -> bytes:
    """All that comes back until the port ends the connection. Nothing more is sent: it has not to wait for more."""
    with socket.create_connection(address, _ENDS_S) as client:
        try:
            client.sendall(sent)
            if goes:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return b""
            client.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: client.recv(1 << 16), b""))
        except TimeoutError:
            raise
        except OSError:  # it has answered before all was sent, and ended
            return b""


class _Received:
    """Bytes, as http.client reads them from a socket."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(self._content)


def _judge(sent: bytes, answer: bytes, key: str, outcome: Outcome) -> int:
    """The status of an answer; 0: there is none."""
    if not answer:
        return 0
    if key.encode() in answer or len(answer) > _MOST_BYTES:
        outcome.wrong.append(f"{len(answer)} bytes, or the server's key in it")
    method = "HEAD" if sent.startswith(b"HEAD ") else "GET"
    response = http.client.HTTPResponse(_Received(answer), method=method)  # type: ignore[arg-type]
    try:
        response.begin()
        body = response.read()
    except http.client.HTTPException as error:
        outcome.wrong.append(f"no HTTP: {error!r}: {answer[:80]!r}")
        return 0
    status = response.status
    if status not in (200, 400, 404, 405, 431, 501, 503):
        outcome.wrong.append(f"status {status}")
    if response.getheader("Connection") != "close" or int(response.getheader("Content-Length") or -1) < len(body):
        outcome.wrong.append(f"status {status} with {response.getheaders()}")
    if not body.decode(errors="replace").replace("\n", "").isprintable() and status != http.HTTPStatus.OK:
        outcome.wrong.append(f"not fit for a screen: {body[:80]!r}")
    return status
