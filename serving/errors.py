"""Everything that can go wrong on the serving side, under one root."""

import enum
from collections.abc import Mapping
from typing import ClassVar


class ServingError(Exception):
    """Root of every error that `serving` raises.

    `code` is the gRPC status the error travels as; `retryable` says whether the same call may succeed if it
    is made again.
    """

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False


class Reason(enum.Enum):
    """What is wrong with a request, as metrics tell it."""

    FEATURES = "features"
    SHAPE = "shape"
    LENGTHS = "lengths"
    WEIGHTS = "weights"
    IDS = "ids"
    SIZE = "size"


class InvalidRequest(ServingError):
    """The caller sent ids, lengths, weights or feature names this model cannot answer."""

    code = "INVALID_ARGUMENT"

    def __init__(self, message: str, reason: Reason = Reason.SHAPE) -> None:
        super().__init__(message)
        self.reason = reason


class IdsOutside(InvalidRequest):
    """Ids are outside [0, rows) of a table that refuses them. `counts`: how many, by table."""

    def __init__(self, message: str, counts: Mapping[str, int]) -> None:
        super().__init__(message, Reason.IDS)
        self.counts = counts


class BundleError(ServingError):
    """A bundle cannot be loaded: damaged, incomplete, of another format, or made for another device."""

    code = "FAILED_PRECONDITION"


class ConfigurationError(ServingError):
    """A setting of a served model cannot be used; the message names it."""

    code = "FAILED_PRECONDITION"


class EnvironmentMismatch(ServingError):
    """The installed packages do not work together; the message says what to install."""

    code = "FAILED_PRECONDITION"


class ServerFailed(ServingError):
    """tritonserver could not be found, did not start, or died."""

    code = "UNAVAILABLE"


class ModelNotFound(ServingError):
    """The server has no such model or version."""

    code = "NOT_FOUND"


class DeadlineExceeded(ServingError):
    """The answer did not come in time."""

    code = "DEADLINE_EXCEEDED"
    retryable = True


class ServerUnavailable(ServingError):
    """The server cannot be reached, has not loaded the model yet, or its queue is full."""

    code = "UNAVAILABLE"
    retryable = True


class ModelUnavailable(ServerUnavailable):
    """The server has the model and no version of it that is ready: it is loaded anew, or the server is stopping."""


class ServerFull(ServerUnavailable):
    """The requests that were handed over together do not fit into the server's shared memory."""


class LimitExceeded(ServingError):
    """A message is larger than the other side takes, or a quota is used up: the same call would meet the same."""

    code = "RESOURCE_EXHAUSTED"


class RequestCancelled(ServingError):
    """The call was cancelled before it was answered."""

    code = "CANCELLED"


class AccessDenied(ServingError):
    """The server knows who is calling and does not allow it."""

    code = "PERMISSION_DENIED"


class NotAuthenticated(ServingError):
    """The server wants credentials that the call did not carry."""

    code = "UNAUTHENTICATED"


class ServerFault(ServingError):
    """The server failed in a way that is its own fault; its log says more."""

    code = "INTERNAL"


# Every status of gRPC (https://grpc.github.io/grpc/core/md_doc_statuscodes.html) but OK.
_BY_CODE: dict[str, type[ServingError]] = {
    "CANCELLED": RequestCancelled,
    "UNKNOWN": ServerFault,
    "INVALID_ARGUMENT": InvalidRequest,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "NOT_FOUND": ModelNotFound,
    "ALREADY_EXISTS": ServerFault,
    "PERMISSION_DENIED": AccessDenied,
    "RESOURCE_EXHAUSTED": LimitExceeded,
    "FAILED_PRECONDITION": ServerFault,
    "ABORTED": ServerUnavailable,
    "OUT_OF_RANGE": InvalidRequest,
    "UNIMPLEMENTED": ServerFault,
    "INTERNAL": ServerFault,
    "UNAVAILABLE": ServerUnavailable,
    "DATA_LOSS": ServerFault,
    "UNAUTHENTICATED": NotAuthenticated,
}


def from_status(code: str, message: str) -> ServingError:
    """The error for a gRPC status, `code` by its name ("UNAVAILABLE")."""
    return _BY_CODE[code](message)
