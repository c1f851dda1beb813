"""The errors of `serving`, under one root.

::

    ServingError                    code (a gRPC status)    retryable
    ├── InvalidRequest              INVALID_ARGUMENT        no   what the caller of a lookup sent
    │   └── IdsOutside              INVALID_ARGUMENT        no   ids outside [0, rows)
    ├── ConfigurationError          FAILED_PRECONDITION     no   an argument, option or setting
    ├── BundleError                 FAILED_PRECONDITION     no   a bundle on disk
    ├── EnvironmentMismatch         FAILED_PRECONDITION     no   packages that do not work together
    ├── TritonserverFailed          UNAVAILABLE             no   the tritonserver that we run ourselves
    ├── ServerUnavailable           UNAVAILABLE             yes  a server that is asked, or its load shedding
    │   ├── HostUnavailable         UNAVAILABLE             yes  a host of a router's plan
    │   ├── ModelUnavailable        UNAVAILABLE             yes  its model is being loaded
    │   └── SharedMemoryFull        UNAVAILABLE             yes  its shared memory is full for now
    ├── DeadlineExceeded            DEADLINE_EXCEEDED       yes
    ├── ModelNotFound               NOT_FOUND               no
    ├── LimitExceeded               RESOURCE_EXHAUSTED      no
    ├── RequestCancelled            CANCELLED               no
    ├── AccessDenied                PERMISSION_DENIED       no
    ├── NotAuthenticated            UNAUTHENTICATED         no
    └── InternalError               INTERNAL                no   a fault of the server's own

`export.errors.ExportError` is the root of what exports raise beside ConfigurationError.
"""

import enum
from collections.abc import Iterable, Mapping
from typing import ClassVar


class ServingError(Exception):
    """Root of every error that `serving` raises.

    Attributes:
        code: the gRPC status of the error.
        retryable: whether the same call may succeed later.
    """

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False


class Reason(enum.Enum):
    """Why a request is invalid. Metrics count invalid requests by reason."""

    FEATURES = "features"
    SHAPE = "shape"
    LENGTHS = "lengths"
    WEIGHTS = "weights"
    IDS = "ids"
    SIZE = "size"
    DENSE = "dense"


class InvalidRequest(ServingError):
    """The caller of a lookup sent ids, lengths, weights, dense inputs or feature names that the model cannot answer.

    Attributes:
        reason: what is wrong with the request.
    """

    code = "INVALID_ARGUMENT"

    def __init__(self, message: str, reason: Reason = Reason.SHAPE) -> None:
        super().__init__(message)
        self.reason = reason


class IdsOutside(InvalidRequest):
    """Ids are outside a table with the id policy `error`: the table has no such row, or its map no such id.

    Attributes:
        counts: the number of these ids, by table.
    """

    def __init__(self, message: str, counts: Mapping[str, int]) -> None:
        super().__init__(message, Reason.IDS)
        self.counts = counts


class BundleError(ServingError):
    """A bundle cannot be loaded: damaged, incomplete, of another format, or made for another device."""

    code = "FAILED_PRECONDITION"


class ConfigurationError(ServingError):
    """An argument, option, setting or configuration file cannot be used. The message names it."""

    code = "FAILED_PRECONDITION"


class EnvironmentMismatch(ServingError):
    """The installed packages do not work together. The message says what to install."""

    code = "FAILED_PRECONDITION"


class TritonserverFailed(ServingError):
    """The tritonserver that we run ourselves was not found, did not start, or died."""

    code = "UNAVAILABLE"


class ModelNotFound(ServingError):
    """The server has no such model or version."""

    code = "NOT_FOUND"


class DeadlineExceeded(ServingError):
    """The answer did not come in time."""

    code = "DEADLINE_EXCEEDED"
    retryable = True


class ServerUnavailable(ServingError):
    """The server cannot be reached, has not loaded the model yet, or sheds load."""

    code = "UNAVAILABLE"
    retryable = True


class HostUnavailable(ServerUnavailable):
    """A host of a router's plan does not answer, or lacks the bundle that the router's bundle names."""


class ModelUnavailable(ServerUnavailable):
    """The server has the model, but no version of it is ready: it loads, was unloaded, or the server stops."""


class SharedMemoryFull(ServerUnavailable):
    """The requests that the server answers together do not fit into its shared memory."""


class LimitExceeded(ServingError):
    """A message is larger than the receiver allows, or a quota is used up. The same call would fail again."""

    code = "RESOURCE_EXHAUSTED"


class RequestCancelled(ServingError):
    """The call was cancelled before it was answered, or the client is closed."""

    code = "CANCELLED"


class AccessDenied(ServingError):
    """The server knows the caller and does not allow the call."""

    code = "PERMISSION_DENIED"


class NotAuthenticated(ServingError):
    """The server requires credentials, and the call had none."""

    code = "UNAUTHENTICATED"


class InternalError(ServingError):
    """The server failed by its own fault. Its log has the details."""

    code = "INTERNAL"


# Every status of gRPC (https://grpc.github.io/grpc/core/md_doc_statuscodes.html) but OK.
_BY_CODE: dict[str, type[ServingError]] = {
    "CANCELLED": RequestCancelled,
    "UNKNOWN": InternalError,
    "INVALID_ARGUMENT": InvalidRequest,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "NOT_FOUND": ModelNotFound,
    "ALREADY_EXISTS": InternalError,
    "PERMISSION_DENIED": AccessDenied,
    "RESOURCE_EXHAUSTED": LimitExceeded,
    "FAILED_PRECONDITION": InternalError,
    "ABORTED": ServerUnavailable,
    "OUT_OF_RANGE": InvalidRequest,
    "UNIMPLEMENTED": InternalError,
    "INTERNAL": InternalError,
    "UNAVAILABLE": ServerUnavailable,
    "DATA_LOSS": InternalError,
    "UNAUTHENTICATED": NotAuthenticated,
}


def from_status(code: str, message: str) -> ServingError:
    """The error for a gRPC status.

    Args:
        code: the name of the status, such as "UNAVAILABLE".
        message: the error's message.
    """
    return _BY_CODE[code](message)


# Maximum characters of an error in a response.
MOST = 1000
_MOST_OF_A_NAME = 100
_MOST_LISTED = 3


def shown(text: str, most: int = MOST) -> str:
    """At most `most` characters of a text. Control characters, such as line ends, are escaped."""
    # Cut before escaping: a text may have megabytes.
    printable = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text[: most + 1]
    )
    return printable if len(printable) <= most else f"{printable[: most - 1]}…"


def listed(texts: Iterable[str], most: int = _MOST_LISTED) -> str:
    """The first `most` texts, and the number of others."""
    all_texts = [*texts]
    first = ", ".join(shown(text, _MOST_OF_A_NAME) for text in all_texts[:most])
    more = len(all_texts) - most
    return first if more <= 0 else f"{first} and {more} more"


def quoted(names: Iterable[str]) -> str:
    """The first eight names, in quotes, and the number of others."""
    return listed(map(repr, names), most=8)


def counted(number: int, noun: str) -> str:
    """A number of things, such as "1 file" and "2,000 files"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
