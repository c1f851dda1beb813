"""The meaning of Triton's errors to a caller, if the status alone does not tell it.

This is the only file that matches the words of messages. NOT_FOUND can mean that a model is being loaded, or that it
does not exist. INTERNAL can mean a fault, or that shared memory is full for a moment. A client does not know the
Triton release of its server, so it looks for the words of all releases.

Run with Triton 24.10. The source of 26.04 was read: it has the same words. If another release words one differently,
add a line.
"""

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from serving.errors import (
    ModelNotFound,
    ModelUnavailable,
    ServerUnavailable,
    ServingError,
    SharedMemoryFull,
    from_status,
    shown,
)


class _Words(NamedTuple):
    code: str
    words: str
    kind: type[ServingError]
    advice: str


# Triton has one message for versions that are being loaded and versions that were unloaded on request.
_NOT_LOADED = "it is being loaded, was unloaded, or the server stops: try again, unless it was unloaded"
_MESSAGES = (
    # The model is known, but no version of it is ready. For an unknown model, the message is "is not found".
    _Words("NOT_FOUND", r" has no available versions$", ModelUnavailable, _NOT_LOADED),
    _Words("UNAVAILABLE", r" is not at ready state$", ModelUnavailable, _NOT_LOADED),
    # The model's process died, and has not been replaced yet.
    _Words("INTERNAL", r"Stub process '[^']*' is not healthy", ModelUnavailable, "its process died: try again"),
    # gRPC's own words. It cannot distinguish a stopped server from one that requires TLS or a certificate.
    _Words(
        "UNAVAILABLE",
        r"(^|: )(recvmsg:)?(Socket closed|Connection reset by peer)$",
        ServerUnavailable,
        "the server stopped, or wants TLS, or another certificate of its caller",
    ),
    _Words(
        "UNAVAILABLE",
        r"^(connections to all backends failing|failed to connect to all addresses);.*Connection refused$",
        ServerUnavailable,
        "no server listens there: check the address, or start one with `tbe-serve run`",
    ),
    # Other requests use the shared memory, or this one is too large for all of it.
    _Words(
        "INTERNAL",
        r"Failed to increase the shared memory pool size|the grown shared memory region",
        SharedMemoryFull,
        "what is handed over together does not fit: send less at once, or raise --shm-mib: try again",
    ),
)


# gRPC's own words for a failed TLS handshake, and what is wrong with the client's options.
_HANDSHAKES = (
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the server's certificate is not signed by the root certificates that were given, or expired: `--tls-ca`, "
        "`Tls(root_certificates=…)`: expected those of its authority",
    ),
    (
        "Hostname Verification Check failed",
        "the server's certificate has another name than this address: `--tls-server-name`, `Tls(server_name=…)`: "
        "expected a name in it",
    ),
    ("WRONG_VERSION_NUMBER", "the server has no TLS: leave `--tls-ca`, `Tls(…)` out"),
)


def handshake_advice(message: str) -> str | None:
    """Advice about a failed TLS handshake of a client, or None if the message is about something else."""
    return next((advice for words, advice in _HANDSHAKES if words in message), None)


# A restarted tritonserver listens before it has loaded its models, and has this message for all of them. So the error
# may be temporary for a client that has used the model before.
_NOT_KNOWN_YET = _Words(
    "NOT_FOUND", r"^Request for unknown model: '[^']*' is not found$", ModelUnavailable, _NOT_LOADED
)
# For any other client, and for a version that is not loaded.
_NOT_SERVED = _Words(
    "NOT_FOUND",
    r"^Request for unknown model: '.*' (version \d+ )?is not found$",
    ModelNotFound,
    "check the name and the version: `tbe-serve status` shows what the server has",
)


# The message of a failed load about the first version that failed. A load also reloads the versions that serve.
_NOT_LOADED_VERSION = re.compile(r"version (\d+) is at UNAVAILABLE state: (?:Internal: TritonModelException: )?")


def load_failure(message: str, ready: Callable[[], Collection[int]]) -> str:
    """Triton's message of a failed load, corrected: a version that Triton calls unavailable may still serve.

    Args:
        message: Triton's message.
        ready: returns the versions of the model that serve now.
    """
    match = _NOT_LOADED_VERSION.search(message)
    if match is None:
        return message
    how = "cannot be reloaded, and continues to serve" if int(match[1]) in ready() else "cannot be loaded"
    return f"{message[: match.start()]}version {match[1]} {how}: {message[match.end() :]}"


def error_of(code: str, message: str, where: str = "", *, is_known: bool = False) -> ServingError:
    """The error for a gRPC status and its message.

    Args:
        code: the name of the status, such as "UNAVAILABLE".
        message: the message that came with it. It is not trusted.
        where: put before it in the error's message.
        is_known: whether the server has had the model that the call was for.
    """
    text = f"{where}{shown(message)}"
    for words in (*_MESSAGES, *([_NOT_KNOWN_YET] if is_known else []), _NOT_SERVED):
        if words.code == code and re.search(words.words, message):
            return words.kind(f"{text}: {words.advice}")
    return from_status(code, text)
