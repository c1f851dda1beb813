"""Hosts that break HTTP/2 itself: what they send in place of an answer."""

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

# Frames of HTTP/2, https://www.rfc-editor.org/rfc/rfc9113#section-6
DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """A frame."""
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def headers(stream: int, *fields: tuple[str, str], end: bool = False, first: bool = True) -> bytes:
    """Headers, or trailers. Names and values are as long as one byte says."""
    content = b"\x88" if first else b""  # :status 200
    for name, value in fields:
        content += bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, content)


GRPC = ("content-type", "application/grpc")


def begun(stream: int, content: bytes, size: int) -> bytes:
    """An answer that says it has `size` bytes, and what comes of it."""
    return headers(stream, GRPC) + frame(DATA, 0, stream, struct.pack(">BI", 0, size) + content)


# What a server does on the wire with a stream that it was asked on; None hangs up.
Wire = Callable[[int, bytes], "bytes | None"]
WIRES: dict[str, Wire] = {
    "silence": lambda stream, answer: b"",  # noqa: ARG005
    "silence behind headers": lambda stream, answer: headers(stream, GRPC),  # noqa: ARG005
    "silence in mid-message": lambda stream, answer: begun(stream, answer[:-1], len(answer)),
    "silence behind the message": lambda stream, answer: begun(stream, answer, len(answer)),
    "end in mid-message": lambda stream, answer: (
        begun(stream, answer[:-1], len(answer)) + headers(stream, ("grpc-status", "0"), end=True, first=False)
    ),
    "reset in mid-message": lambda stream, answer: (
        begun(stream, answer[:-1], len(answer)) + frame(RST_STREAM, 0, stream, bytes(4))
    ),
    "end without a status": lambda stream, answer: (
        begun(stream, answer, len(answer)) + frame(DATA, END_STREAM, stream)
    ),
    "a status that does not exist": lambda stream, answer: (
        begun(stream, answer, len(answer)) + headers(stream, ("grpc-status", "99"), end=True, first=False)
    ),
    "a status that is no number": lambda stream, answer: (
        begun(stream, answer, len(answer)) + headers(stream, ("grpc-status", "well"), end=True, first=False)
    ),
    "a message of 4 GB": lambda stream, answer: begun(stream, answer, 2**32 - 1),
    "a message that says it is compressed": lambda stream, answer: (
        headers(stream, GRPC) + frame(DATA, 0, stream, struct.pack(">BI", 1, len(answer)) + answer)
    ),
    "another content type": lambda stream, answer: headers(stream, ("content-type", "text/html"), end=True),  # noqa: ARG005
    "frames that are none": lambda stream, answer: b"\xff" * 64,  # noqa: ARG005
    "it hangs up": lambda stream, answer: None,  # noqa: ARG005
}


@contextmanager
def serve_http2(does: Wire, answer: bytes) -> Iterator[str]:
    """A server of HTTP/2 that does as told with every request; gets its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.put(connection)
                threading.Thread(target=_serve, args=(connection, does, answer), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        while not connections.empty():
            with suppress(OSError):
                connections.get().shutdown(socket.SHUT_RDWR)


def _serve(connection: socket.socket, does: Wire, answer: bytes) -> None:
    with connection, suppress(OSError), connection.makefile("rb") as sent_to_us:
        connection.sendall(frame(SETTINGS, 0, 0))
        sent_to_us.read(_PREFACE)
        while len(head := sent_to_us.read(9)) == 9:
            size, kind, flags, stream = struct.unpack(">IBBI", b"\0" + head)
            content = sent_to_us.read(size)
            if kind in (SETTINGS, PING) and not flags & ACK:
                connection.sendall(frame(kind, ACK, 0, content if kind == PING else b""))
            elif kind == DATA and flags & END_STREAM:
                if (told_so := does(stream, answer)) is None:
                    return
                connection.sendall(told_so)
